"""Every change that is made to DGL, and to norms of torch, in one table, with its undo.

What stands in a few places of DGL sends our graphs, markers and counts to this package and all
else on to the original. It is put there when a sharded graph is first used, for modules of DGL that
are imported later at the next use; :func:`uninstall` puts every original back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from threading import Lock
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from sar._private import (
    EDGE_SOFTMAX,
    SDDMM,
    SPMM,
    TOP_ROWS,
    TYPED_EDGE_SOFTMAX,
    TYPED_SDDMM,
    TYPED_SPMM,
)
from sar.frontends.dgl import loops, operators, readout
from sar.frontends.dgl.adapters import LAYERS, graph_first
from sar.frontends.dgl.counts import Counts
from sar.frontends.dgl.node_count import NodeCount
from sar.frontends.dgl.sharing import sharing
from sar.frontends.dgl.typed import gated, segment_mm_in_udfs
from sar.frontends.dgl.undistributed import UNDISTRIBUTED, refusing
from sar.models.choice import Adapter, standing
from sar.nn.local_norms import norm_patches

Replace = Callable[[Any], Any]  # the original to what stands in its place


class Place(NamedTuple):
    """A patched attribute of a module or of a class, with what it was and what it is."""

    holder: Any
    name: str
    original: Any
    replacement: Any


def install() -> None:
    """Put the patches of all imported modules of DGL in place, each once."""
    if len(_undo) == len(_PATCHES) or not any(name in sys.modules for name in _missing()):
        return
    with _lock:
        for name in _missing():
            if name in sys.modules:
                module = import_module(name)  # waits while another thread imports it
                patches = _patches_of(name, module)
                _undo[name] = [place for patch in patches for place in _put(*patch)]


def uninstall() -> None:
    """Put back all originals that nobody else has replaced; the next use installs again."""
    with _lock:
        for name in reversed(list(_undo)):
            for place in reversed(_undo.pop(name)):
                if vars(place.holder).get(place.name) is place.replacement:  # nobody else's
                    setattr(place.holder, place.name, place.original)


_lock = Lock()
_undo: dict[str, list[Place]] = {}  # by module, in the order in which they were put in place


def _missing() -> list[str]:
    return [name for name in _PATCHES if name not in _undo]


def _put(holder: Any, name: str, replace: Replace) -> Iterator[Place]:
    original = getattr(holder, "__dict__", {}).get(name)
    if original is not None:
        place = Place(holder, name, original, replace(original))
        setattr(holder, name, place.replacement)
        yield place


def _patches_of(name: str, module: ModuleType) -> Iterator[tuple[Any, str, Replace]]:
    """(holder, attribute, its replacement) for a module; a version of DGL may lack some."""
    for path, replace in _PATCHES[name].items():
        *outer, attribute = path.split(".")
        holder = getattr(module, outer[0], None) if outer else module
        yield holder, attribute, replace
    if name == _TORCH:
        yield from norm_patches()
    if name == _LAYERS:
        kinds, adapters = [*vars(module).values()], LAYERS.adapters()
        for kind in dict.fromkeys([*adapters, *(one for one in kinds if isinstance(one, type))]):
            if issubclass(kind, nn.Module):
                yield from _patches_of_layer(kind, adapters.get(kind))


def _patches_of_layer(kind: type, adapter: Adapter | None) -> Iterator[tuple[Any, str, Replace]]:
    if reason := UNDISTRIBUTED.get(kind.__name__):
        for name, method in list(vars(kind).items()):
            if isinstance(method, FunctionType) and (name == "__init__" or name[0] != "_"):
                yield kind, name, lambda original: refusing(original, kind.__name__, reason)
    elif adapter or ((forward := vars(kind).get("forward")) and graph_first(forward)):
        yield (
            kind,
            "forward",
            partial(standing, adapter=adapter, graph=0, rows=1, columns=_OF_EDGES),
        )


_OF_EDGES = {
    "distances", "edge_feat", "edge_feats", "edge_weight", "efeat", "efeats", "etype", "etypes",
    "pseudo",
}  # fmt: skip


def _for(kind: type, function: Callable) -> Replace:
    """``function`` instead of the original where the first argument is of a kind of ours."""

    def replace(original: Callable) -> Callable:
        @wraps(original)
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = function if isinstance(first, kind) else original
            return chosen(first, *args, **kwargs)

        return call

    return replace


def _for_marked(function: Callable) -> Replace:
    """``function`` of a graph instead of the original where the first argument is its marker."""
    marker = operators.GraphMarker
    return _for(marker, lambda first, *args, **kwargs: function(first.graph, *args, **kwargs))


def _reverse(graph: Any, copy_ndata: bool = True, copy_edata: bool = False, **_: Any) -> Any:
    return graph.reverse(copy_ndata, copy_edata)


_REVERSE = {"reverse": _for(Counts, _reverse)}
_TRANSFORMS = _REVERSE | {
    "add_self_loop": _for(Counts, loops.add_self_loop),
    "remove_self_loop": _for(Counts, lambda graph, etype=None: graph.remove_self_loop(etype)),
}
_SEGMENTS = {
    "segment_reduce": _for(NodeCount, readout.segment_reduce),
    "segment_softmax": _for(NodeCount, readout.segment_softmax),
}
_SEVERAL = _for(operators.GraphMarker, operators.of_several)
_TORCH = "torch.nn"  # norms say when they see rows of a sharded graph
_LAYERS = "dgl.nn.pytorch"  # last, so that errors of what replaces a layer's code name it, too

_PATCHES: dict[str, dict[str, Replace]] = {
    _TORCH: {},
    "dgl": _TRANSFORMS | _SEGMENTS,
    "dgl.transforms": _TRANSFORMS,
    "dgl.transforms.functional": _TRANSFORMS,
    "dgl.backend": {"segment_mm": segment_mm_in_udfs},
    "dgl.readout": {TOP_ROWS.name: _for(Counts, readout.topk)},
    "dgl.ops": _SEGMENTS,
    "dgl.ops.segment": _SEGMENTS,
    "dgl.ops.edge_softmax": {
        EDGE_SOFTMAX.name: _for_marked(operators.edge_softmax),
        TYPED_EDGE_SOFTMAX.name: _SEVERAL,
    },
    "dgl.ops.spmm": {
        SPMM.name: _for_marked(operators.gspmm),
        TYPED_SPMM.name: _SEVERAL,
    },
    "dgl.ops.sddmm": {
        SDDMM.name: _for_marked(operators.gsddmm),
        TYPED_SDDMM.name: _SEVERAL,
    },
    "dgl.nn.pytorch.conv.graphconv": _REVERSE,
    "dgl.nn.pytorch.conv.gatedgraphconv": {"GatedGraphConv.forward": gated},
    "dgl.nn.pytorch.hetero": {"HeteroGraphConv.forward": sharing},
    # Sequential asks isinstance(graph, DGLGraph), and nothing else of it.
    "dgl.nn.pytorch.utils": {"DGLGraph": lambda original: (original, Counts)},
    _LAYERS: {},
}
