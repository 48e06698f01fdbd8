"""Imports DGL where it is needed, with an error that says for what."""

from sar.errors import MissingDependencyError


def require_dgl(what: str):
    """The module dgl (with dgl.data). Raises MissingDependencyError saying that `what` needs it."""
    try:
        import dgl
        import dgl.data.utils
    except ImportError as error:
        raise MissingDependencyError(f"{what} needs dgl: pip install dgl==1.1.3") from error
    return dgl
