"""What backward needs of a layer: kept, computed again, or moved to a file."""

from sar.memory.activations import set_activations

__all__ = ["set_activations"]
