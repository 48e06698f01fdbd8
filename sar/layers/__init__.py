"""Fused layers: a whole layer as one function of autograd over a relation, and nothing else.

One file each, with arguments that no library names. What binds layers of another library to them is
an adapter (:mod:`sar.models.choice`) in that library's front end.
"""
