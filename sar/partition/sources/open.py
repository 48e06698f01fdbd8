"""Opens the INPUT of `sar partition`: a generator, a file, or the name of a data set."""

import difflib
import inspect
import os
from collections.abc import Callable

from sar.partition.arrays import GraphArrays
from sar.partition.require import where_to_get_dgl
from sar.partition.sources.datasets import (
    dgl_dataset_names,
    load_dgl_dataset,
    load_ogb_dataset,
    read_dgl_file,
)
from sar.partition.sources.generate import bibliography_graph, community_graph, rmat_graph
from sar.partition.sources.links import load_ogb_links
from sar.partition.sources.npz import read_npz
from sar.words import INPUTS

GENERATORS: dict[str, Callable[..., GraphArrays]] = {
    "synthetic": community_graph,
    "rmat": rmat_graph,
    "bibliography": bibliography_graph,
}
OGB_NAMES = ("ogbn-arxiv", "ogbn-products", "ogbn-proteins", "ogbn-papers100M", "ogbn-mag")
OGB_LINKS = (
    "ogbl-collab", "ogbl-citation2", "ogbl-ppa", "ogbl-ddi", "ogbl-vessel", "ogbl-wikikg2",
    "ogbl-biokg",
)  # fmt: skip


def open_source(text: str) -> GraphArrays:
    """The graph that `text` names; every node type has `orig_id`.

    `synthetic`, `rmat` and `bibliography` take the options of their `.._graph` as
    `:name=value,...`; a data set takes `:root=FOLDER`. Raises ValueError for what is unknown or
    damaged (with the closest known name), FileNotFoundError, SarError when a data set cannot be
    had, MissingDependencyError.
    """
    if os.path.isfile(text):
        return read_npz(text) if text.endswith(".npz") else read_dgl_file(text)
    if os.path.isdir(text):
        raise ValueError(f"input {text!r} is a folder; accepted: {INPUTS}")
    name, _, options = text.partition(":")
    if name in GENERATORS:
        maker = GENERATORS[name]
        return maker(**parse_options(name, options, _option_types(maker)))
    if name.startswith(("ogbn-", "ogbl-")):
        _check_known(name, (*OGB_NAMES, *OGB_LINKS))
        load = load_ogb_dataset if name in OGB_NAMES else load_ogb_links
        return load(name, **parse_options(name, options, {"root": str}))
    known = dgl_dataset_names()
    if name.lower() in known or name in known.values():
        return load_dgl_dataset(name, **parse_options(name, options, {"root": str}))
    if os.sep in text or text.endswith((".npz", ".bin", ".dgl")):
        raise FileNotFoundError(f"input file {text!r} does not exist")
    missing = "" if known else f"; data sets of dgl.data need dgl: {where_to_get_dgl()}"
    _check_known(name, [*GENERATORS, *OGB_NAMES, *OGB_LINKS, *known], missing)
    raise ValueError(f"input {text!r} is unknown; accepted: {INPUTS}")


def is_foreign(text: str) -> bool:
    """Whether compiled code of DGL, or a loader of a data set, reads what ``text`` names."""
    return not text.endswith(".npz") and text.partition(":")[0] not in GENERATORS


def _check_known(name: str, known, more: str = "") -> None:
    if name not in known:
        hint = closest(name, known) + more
        raise ValueError(f"input {name!r} is unknown{hint}; accepted: {INPUTS}")


def closest(name: str, known) -> str:
    """`, did you mean 'x'?` or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {found[0]!r}?" if found else ""


def _option_types(maker: Callable) -> dict[str, type]:
    """Every parameter of a generator is an option; the default's type is the option's."""
    return {p.name: type(p.default) for p in inspect.signature(maker).parameters.values()}


def parse_options(source: str, text: str, types: dict[str, type]) -> dict:
    """`a=1,b=2` as keyword arguments. Raises ValueError naming the option and the valid ones."""
    options: dict = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if name not in types:
            raise ValueError(
                f"{source}: option {name!r} is unknown{closest(name, types)}; "
                f"valid: {', '.join(types)}"
            )
        if not equals or name in options:
            raise ValueError(f"{source}: option {item!r}: expected each name once, as {name}=VALUE")
        try:
            options[name] = types[name](value)
        except ValueError:
            raise ValueError(
                f"{source}: option {name} is {value!r}, expected {types[name].__name__}"
            ) from None
    return options
