"""From partition files to PyG's data of a rank's own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar import registry
from sar.comm import current_group
from sar.config import Policy
from sar.errors import MissingDependencyError, NotSupportedError
from sar.frontends.pyg import functions  # noqa: F401  (fills in what is known of indices)
from sar.frontends.pyg.columns import edge_name, names_of, node_name, read_later, stored_column
from sar.frontends.pyg.graph import EdgeGraph
from sar.frontends.pyg.groups import NodeGroups
from sar.frontends.pyg.index import ShardedEdgeIndex
from sar.graph.build import structure_of
from sar.graph.store import Structure
from sar.graph.view import READERS
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, ORIG_EID, ORIG_ID
from sar.partition.book import EType
from sar.partition.load import PartitionData

_OLDEST = (2, 6)


def _edges_of(given: Any) -> Any:
    """The edge index of data, or those of all relations; anything else as it is."""
    said = getattr(given, "edge_index_dict", None) or getattr(given, "edge_index", None)
    return said if isinstance(said, (dict, ShardedEdgeIndex)) else given


READERS.append(_edges_of)


def construct_full_graph(partition_data: PartitionData, policy: Policy | None = None) -> Any:
    """PyG's own ``Data``, or ``HeteroData``, of this rank's rows of the whole graph; collective.

    Columns have PyG's names: ``feat`` is ``x``, ``label`` is ``y``, ``feat`` of edges is
    ``edge_attr``; all others keep theirs. Where nodes and edges share a store and a name, that of
    the edges gets ``edge_`` before it. Rows of nodes are tensors on the device of the loaded edges.
    Columns of edges are lazy [num_edges, ...], and read from their file when they are needed first.

    Args:
        partition_data: what :func:`sar.load_partition_data` gave.
        policy: how halos stream; ``None`` follows :class:`sar.Config` at each call.

    Returns:
        ``Data`` for a graph of one type without a name, else ``HeteroData``. ``batch`` int64
        [num_nodes], for poolings, is the graph of each node: of one graph, or by a column ``batch``
        where several were cut together. ``edge_index`` is an
        int64 [2, num_edges] of the edges that end in this rank's nodes. PyG's layers take rows by
        it and sum by it, over all ranks; its numbers cannot be read. ``n_id`` int64 [num_nodes] and
        ``e_id`` int64 [num_edges], lazy, are the rows that nodes and edges had in the graph which
        was cut, as in PyG's mini-batches; the partitioning's own ids where it keeps no others. A
        column that has this name stays. ``batch`` is the graph of each node, for poolings.

    Raises:
        PartitionError: on every rank, when there are not as many parts as ranks, or when a rank
            has another part than its own.
        ValueError: on every rank, for a column called ``num_nodes`` or ``edge_index``.
        TypeError: on every rank, for another ``partition_data`` or ``policy`` on any of them.
        MissingDependencyError, NotSupportedError: on every rank, where any has no torch_geometric,
            one older than 2.6, or another version than the others.
        CommError: a rank needs a row that its owner does not have.
    """
    check_library()
    registry.front_end("pyg").install()
    structure = structure_of(partition_data, policy)
    return data_of(structure, graphs_of(structure, policy), partition_data)


def check_library() -> None:
    """Raise on every rank unless all have the same version of PyG, of those that are known."""
    alike = dict[str, Any]()
    with current_group().agreed("torch_geometric", alike):
        import_data()
        import torch_geometric

        version = alike["version"] = torch_geometric.__version__
        if tuple(map(int, version.split(".")[:2])) < _OLDEST:
            raise NotSupportedError(f"torch_geometric: got {version}, expected 2.6 or newer")


def import_data() -> tuple[Any, Any]:
    """PyG's ``Data`` and ``HeteroData``; raises ``MissingDependencyError``."""
    try:
        from torch_geometric.data import Data, HeteroData
    except ImportError as error:
        raise MissingDependencyError(
            "PyG's data needs torch_geometric: pip install torch_geometric"
        ) from error
    return Data, HeteroData


def is_unnamed(ntypes: list[str], etypes: list[EType]) -> bool:
    """Whether nodes and edges are of one type that nobody named: a ``Data``."""
    return ntypes == [NTYPE_HOMO] and etypes == [ETYPE_HOMO]


def graphs_of(structure: Structure, policy: Policy | None) -> dict[EType, EdgeGraph]:
    """A graph of each relation, which keep that of all of them."""
    whole = EdgeGraph(structure, None, policy)
    if is_unnamed(whole.ntypes, whole.canonical_etypes):
        return {ETYPE_HOMO: whole}
    parts = {etype: EdgeGraph(structure, [etype], policy) for etype in whole.canonical_etypes}
    for part in parts.values():
        part.whole = whole
    return parts


def data_of(
    structure: Structure,
    graphs: dict[EType, EdgeGraph],
    given: PartitionData,
    positions: dict[EType, Tensor] | None = None,
) -> Any:
    """A structure's rows and edges as PyG's data; int64 ``positions`` of edges: some, else all."""
    is_one = is_unnamed(given.book.ntypes, given.book.canonical_etypes)
    made, hetero = import_data()
    data = made() if is_one else hetero()
    for ntype, rows in structure.src_rows.items():
        store = data if is_one else data[ntype]
        store.num_nodes = len(rows)
        _put_nodes(store, ntype, given, None if positions is None else rows, structure.device)
        if positions is None:
            store.batch = _groups(structure, ntype, store)
    for etype, graph in graphs.items():
        store = data if is_one else data[etype]
        store.edge_index = ShardedEdgeIndex(graph)
        some = None if positions is None else positions[etype]
        _put_edges(store, etype, graph, given, some, is_one)
    return data


def _put_nodes(
    store: Any, ntype: str, given: PartitionData, rows: Tensor | None, device: torch.device
) -> None:
    columns, ids = given.node_features, f"{ntype}/{ORIG_ID}"
    for key, name in names_of(columns, ntype):
        store[node_name(name)] = _chosen(columns[key], rows).to(device)
    if "n_id" in store:
        return
    if ids not in columns:
        own = torch.arange(*given.book.node_ranges[ntype][given.part_id].tolist())
        store.n_id = _chosen(own, rows).to(device)
    else:
        store.n_id = store[ORIG_ID].long()


def _groups(structure: Structure, ntype: str, store: Any) -> NodeGroups:
    """The graph of each node: by column ``batch``, or one; collective."""
    if "batch" in store:
        return NodeGroups(store.batch, structure.group)
    count = torch.tensor([structure.book.num_nodes(ntype)], device=structure.device)
    return NodeGroups.of_one(store.num_nodes, count, structure.group)


def _put_edges(
    store: Any, etype: EType, graph: EdgeGraph, given: PartitionData, some: Tensor | None,
    is_one: bool,
) -> None:  # fmt: skip
    columns, kind = given.edge_features, ":".join(etype)
    taken = list(store.keys()) if is_one else None
    for key, name in names_of(columns, kind):
        there = edge_name(name, taken)
        column = store[there] = stored_column(graph, columns, key, name, some)
        graph.columns = {**graph.columns, there: column.materialize}
    first, last = given.book.edge_ranges[etype][given.part_id].tolist()
    key = f"{kind}/{ORIG_EID}"

    def ids() -> Tensor:
        return _chosen(columns[key].long() if key in columns else torch.arange(first, last), some)

    if "e_id" not in store:
        store.e_id = read_later(graph, ids, torch.int64, (), "e_id")


def _chosen(column: Tensor, rows: Tensor | None) -> Tensor:
    return column if rows is None else column.index_select(0, rows.to(column.device))
