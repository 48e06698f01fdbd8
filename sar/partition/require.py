"""DGL, imported where it is needed, with an error that says for what."""

import sys

from sar.errors import MissingDependencyError


def where_to_get_dgl() -> str:
    if sys.version_info < (3, 12):
        return "pip install dgl==1.1.3"
    return f"its wheels end at Python 3.11, and this is {sys.version_info[0]}.{sys.version_info[1]}"


def require_dgl(what: str):
    """The module dgl (with dgl.data). Raises MissingDependencyError saying that `what` needs it."""
    try:
        import dgl
        import dgl.data.utils
    except ImportError as error:
        raise MissingDependencyError(f"{what} needs dgl: {where_to_get_dgl()}") from error
    return dgl
