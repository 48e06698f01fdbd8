"""Tensors that backward needs of a layer: kept, computed again, or moved to a file.

How operations find out which of these happens around them is in :mod:`sar.ops.saving`.
"""
