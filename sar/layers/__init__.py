"""Layers of the field, each computed as a whole over a relation."""

from sar.layers.arriving import input_travels
from sar.layers.gat import gat

__all__ = ["gat", "input_travels"]
