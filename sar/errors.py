"""Every class of errors and warnings; each also derives from the builtin a caller would expect."""

from __future__ import annotations


class SarError(Exception):
    """Base class of the errors that this library raises on its own account."""


class PartitionError(SarError, ValueError):
    """A partition file is missing, damaged, foreign, or does not fit the other ranks' files."""


class CommError(SarError, RuntimeError):
    """A collective failed: a peer died, timed out, or the process group could not be made."""


class DriftError(SarError, RuntimeError):
    """Ranks no longer hold the same model; raised on all of them."""


class NotSupportedError(SarError, NotImplementedError):
    """A layer, function, reduction or option that the library does not run.

    Attributes:
        layer: the class of the layer that the message names, if any.
    """

    layer: str | None = None

    def of_layer(self, layer: str) -> NotSupportedError:
        """The same problem, with a layer in front."""
        error = type(self)(f"{layer}: {self}")
        error.layer = layer
        return error


class UnsupportedMember(NotSupportedError, AttributeError):
    """A member of DGL's that the library's object in its place does not offer."""


class MissingDependencyError(SarError, ImportError):
    """An optional package is needed for this call; the message says how to install it."""


class MistakeWarning(UserWarning):
    """A model or a loop of the user's probably gives other numbers than its author expects.

    The message names the line to change. ``warnings.simplefilter("error", sar.MistakeWarning)``
    makes it an error.
    """
