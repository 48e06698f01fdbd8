"""Fused layers: a whole layer as one autograd function over a relation, one file each.

Their arguments know no library; adapters (:mod:`sar.models.choice`) in its front end bind layers.
"""
