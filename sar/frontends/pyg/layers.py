"""What is said of PyG's layers: which classes they are, how they are called, their adapters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sar.comm import current_group
from sar.errors import NotSupportedError
from sar.frontends.pyg.adapters import ADAPTERS
from sar.frontends.pyg.index import EdgeEnd, ShardedEdgeIndex
from sar.graph import GraphArgument, GraphView
from sar.models.calling import read_call
from sar.models.choice import Adapter
from sar.models.known import Layers

_CONVS = "torch_geometric.nn.conv"
EDGES = ("edge_index", "edge_index_dict", "pos_edge_index", "hyperedge_index")


class PygLayers(Layers):
    """Those of PyG; see :class:`sar.models.known.Layers`."""

    keys_functions = True

    def __init__(self) -> None:
        self._added: dict[type, Adapter] = {}

    def add(self, kind: type, adapter: Adapter) -> None:
        """Use an adapter for a class of PyG's, in place of the one that it has."""
        self._added[kind] = adapter

    def adapters(self) -> Mapping[type, Adapter]:
        convs = vars(sys.modules[_CONVS]) if _CONVS in sys.modules else {}
        return {convs[name]: one for name, one in ADAPTERS.items() if name in convs} | self._added

    def is_own(self, module: nn.Module) -> bool:
        return type(module).__module__.startswith(_CONVS)

    def takes_graph(self, module: nn.Module) -> bool:
        is_of_layers = type(module).__module__ == f"{_CONVS}.hetero_conv"  # called with any names
        return is_of_layers or edges_place(type(module).forward) is not None

    def converted(self, module: nn.Module) -> nn.Module:
        if "torch_geometric" not in sys.modules:
            return module
        from sar.frontends.pyg.norms import converted  # imports torch_geometric

        return converted(module)

    def drop_nothing(self, module: nn.Module) -> None:
        is_known = type(module).__module__.startswith("torch_geometric.nn")
        if is_known and isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]

    def width(self, module: nn.Module) -> int | None:
        given = getattr(module, "in_channels", None)
        given = given[0] if isinstance(given, (tuple, list)) else given
        is_known = type(module).__module__.startswith("torch_geometric.nn")
        return given if is_known and isinstance(given, int) and given > 0 else None

    def arguments(
        self, model: nn.Module, graph: Any, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        place = edges_place(type(model).forward)
        if isinstance(graph, ShardedEdgeIndex):
            return None if place is None else (*inputs[:place], graph, *inputs[place:])
        if not type(graph).__module__.startswith("torch_geometric.data"):
            return None
        wanted = list(inspect.signature(type(model).forward).parameters.values())[1:]
        if place is None and [one.default for one in wanted].count(inspect.Parameter.empty) == 1:
            return (graph, *inputs)  # forward(self, data)
        given, args = list(inputs), list[Any]()
        for name in read_call(model).places:
            if hasattr(graph, "edge_types"):  # to_hetero gives models that name no dictionaries
                name = name.removesuffix("_dict") + "_dict"
            args.append(given.pop(0) if given and name not in EDGES else getattr(graph, name))
        return tuple(args)


def edges_place(forward: Callable[..., Any]) -> int | None:
    """Which parameter behind the layer says the edges, by its name."""
    names = list(inspect.signature(forward).parameters)[1:]
    return next((names.index(name) for name in EDGES if name in names), None)


def agree_on_rows(layer: Any, edges: Any, x: Any) -> None:
    """Raise where ``x`` has not a row for each node; on every rank when such rows come first.

    Raises ``ValueError``, ``TypeError`` for a graph in place of its edges. Rows of a width and
    dtype that are known are looked at without a word to other ranks, which then end by the error of
    the one that has others.
    """
    if isinstance(edges, GraphView):
        got = type(edges).__name__
        raise TypeError(f"edges: got a {got}, expected edge_index of sar.pyg.construct_full_graph")
    if not isinstance(x, _ROWS) or isinstance(x, ShardedEdgeIndex):
        if isinstance(x, GraphArgument) or isinstance(edges, ShardedEdgeIndex):
            raise TypeError(
                f"x: got a {type(x).__name__}, expected a row for each of this rank's nodes"
            )
    if not isinstance(edges, ShardedEdgeIndex):
        _refuse_ids_of_all(layer, edges, x)
        return
    cached = getattr(layer, "_cached_edge_index", None)
    if cached is not None and not isinstance(cached[0], (ShardedEdgeIndex, EdgeEnd)):
        raise NotSupportedError(
            "got an edge index, but has cached that of a graph which is not cut; expected "
            "cached=False, or a layer made anew with the same parameters"
        ).of_layer(type(layer).__name__)
    looked, dim = None, getattr(layer, "node_dim", 0)
    if isinstance(x, Tensor):
        if x.dim() != 2 and not hasattr(layer, "node_dim"):
            return  # its parts know where the rows are
        looked = type(layer), dim, edges.order, x.dtype, x.shape
        if looked in edges.graph.rows_seen:
            return
    given = [one if isinstance(one, Tensor) and one.dim() >= max(-dim, dim + 1) else None
             for one in (x[:2] if isinstance(x, (tuple, list)) else [x])]  # fmt: skip
    relation = edges.graph.scope().relation
    looks = [one if one is None else (one.dtype, _without(one.shape, dim)) for one in given]
    key = (type(layer).__name__, *looks)
    known = relation.derived("rows of nodes agreed on", set)
    if key in known:
        _check_rows(edges, given, dim)
    else:
        with relation.group.agreed(f"{key[0]}: dtype and shape, but for rows, of x", looks):
            _check_rows(edges, given, dim)
        known.add(key)
    if looked is not None:
        edges.graph.rows_seen.add(looked)


_ROWS = (Tensor, tuple, list, dict, type(None))


def _refuse_ids_of_all(layer: Any, edges: Any, x: Any) -> None:
    """Raise ``ValueError`` where plain edges of the graph that was cut come with a rank's rows."""
    group, x = current_group(), x[0] if isinstance(x, (tuple, list)) and x else x
    if group.size == 1 or type(edges) is not Tensor or type(x) is not Tensor or x.dim() == 0:
        return
    for graph in list(group.graphs):
        own = {graph.num_nodes(one): graph.num_nodes_global(one) for one in graph.ntypes}
        if edges.dim() != 2 or own.get(len(x), len(x)) == len(x) or not edges.numel():
            continue
        counts = [graph.num_edges_global(one) for one in graph.canonical_etypes]
        if edges.shape[1] in counts or int(edges[0].max()) >= len(x):
            raise ValueError(
                f"{type(layer).__name__}: edges: got a plain tensor {tuple(edges.shape)} with ids "
                f"up to {int(edges.max())}, and x has {len(x)} rows, those of this rank; expected "
                "edge_index of sar.pyg.construct_full_graph's data"
            )


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(size for place, size in enumerate(shape) if place != dim % len(shape))


def _check_rows(edges: ShardedEdgeIndex, given: list[Tensor | None], dim: int) -> None:
    ends = [edges.end(0), edges.end(1)]
    for place, one in enumerate(given):
        fits = [ends[place]] if len(given) > 1 else ends  # one for either end, between types
        if one is not None and not any(end.are_rows(one.shape[dim]) for end in fits):
            raise ValueError(
                f"x: got shape {tuple(one.shape)}, expected {fits[0].num_rows} rows along "
                f"dimension {dim}, one for each of this rank's nodes"
            )


LAYERS = PygLayers()
