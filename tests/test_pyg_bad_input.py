"""What needs ids or all nodes is refused by name on every rank; PyG's data work as data."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import graphs, pyg, run_threads
from harness.graphs import ETYPE_HOMO
from harness.parts import Cutter
from pyg_convs import CONVS, WIDTH, made, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex, utils
from torch_geometric import nn as layers

import sar
import sar.pyg

PARTS = 2


def blank(kind: str) -> Callable[[], nn.Module]:
    """A layer without its parts: making it takes packages that are not there."""

    def make() -> nn.Module:
        layer = getattr(layers, kind).__new__(getattr(layers, kind))
        nn.Module.__init__(layer)
        return layer

    return make


def rows_alone(layer: Any, x: Tensor, edges: Any, columns: Any) -> Any:
    return layer(x)


def colors(layer: Any, x: Tensor, edges: Any, columns: Any) -> Any:
    return layer((x[:, 0] > 0).long(), edges)


def scored(layer: Any, x: Tensor, edges: Any, columns: Any) -> Any:
    return layer(x, edges)[0]


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable, str]] = {
    "CuGraphGATConv": (blank("CuGraphGATConv"), plain, "use the layer without the prefix"),
    "CuGraphRGCNConv": (blank("CuGraphRGCNConv"), plain, "use the layer without the prefix"),
    "CuGraphSAGEConv": (blank("CuGraphSAGEConv"), plain, "use the layer without the prefix"),
    "DynamicEdgeConv": (blank("DynamicEdgeConv"), rows_alone, "make the edges before"),
    "FusedGATConv": (
        blank("FusedGATConv"), lambda layer, x, e, c: layer(x, e, e, e), "use GATConv"
    ),
    "GPSConv": (lambda: layers.GPSConv(WIDTH, layers.GCNConv(WIDTH, WIDTH), 2), plain, "N x N"),
    "GravNetConv": (blank("GravNetConv"), rows_alone, "make the edges before"),
    "MeshCNNConv": (made("MeshCNNConv", WIDTH, 5), plain, "by its place among all edges"),
    "PANConv": (made("PANConv", WIDTH, 5, 2), scored, "sparse matrices"),
    "SuperGATConv": (made("SuperGATConv", WIDTH, 5), plain, r"in training mode .* expected .eval"),
    "FastRGCNConv": (
        made("FastRGCNConv", 57, 5, 3),
        lambda layer, x, e, c: layer(None, e, torch.zeros(e.size(1), dtype=torch.int64)),
        "expected .*data.n_id",
    ),
    "RGCNConv": (
        made("RGCNConv", 57, 5, 3),
        lambda layer, x, e, c: layer(None, e, torch.zeros(e.size(1), dtype=torch.int64)),
        "expected .*data.n_id",
    ),
    "WLConv": (made("WLConv"), colors, "WLConvContinuous runs"),
    "XConv": (blank("XConv"), lambda layer, x, e, c: layer(x, x[:, :3]), "make the edges before"),
    "TopKPooling": (made("TopKPooling", WIDTH), scored, "pool by data.batch"),
    "SAGPooling": (made("SAGPooling", WIDTH), scored, "pool by data.batch"),
    "ASAPooling": (made("ASAPooling", WIDTH), scored, "pool by data.batch"),
    "EdgePooling": (made("EdgePooling", WIDTH), scored, "pool by data.batch"),
    "MemPooling": (made("MemPooling", WIDTH, 5, 2, 2), rows_alone, "pool by data.batch"),
    "GraphUNet": (made("GraphUNet", WIDTH, 5, 4, depth=2), plain, "pool by data.batch"),
}  # fmt: skip
ELSEWHERE = {"MessagePassing", "HeteroConv", "HGTConv", "HANConv", "SplineConv"}


def data_of(path: str) -> Any:
    data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
    data.x = torch.sin(data.orig_id.double().unsqueeze(1) + torch.arange(WIDTH))
    return data


def refusals(
    path: str, use: Callable[[Any], Any], kind: type = sar.NotSupportedError, parts: int = PARTS
) -> list[str]:
    """The message of the error on each rank; nothing travels before it."""

    def run(group: Any) -> str:
        data = data_of(path)
        before = group.meter.here.sent_bytes
        with pytest.raises(kind) as caught:
            use(data)
        assert group.meter.here.sent_bytes == before
        return str(caught.value)

    return run_threads(parts, run)


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_need_all_nodes_are_refused_by_name(name: str, partitioned: Cutter) -> None:
    make, call, reason = REFUSED[name]
    if not hasattr(layers, name):
        pytest.skip(f"this version of PyG has no {name}")
    layer = make()
    for message in refusals(
        partitioned(graphs.mixed(), PARTS), lambda data: call(layer, data.x, data.edge_index, None)
    ):
        assert message.startswith(name)
        assert re.search(reason, message), message


def test_every_convolution_is_exact_or_refused() -> None:
    kinds = {type(make()).__name__ for make, _ in CONVS.values()}
    assert set(layers.conv.__all__) <= kinds | set(REFUSED) | ELSEWHERE


@pytest.mark.parametrize("parts", [1, 2])
def test_refused_layers_run_on_graphs_that_are_not_cut(parts: int, partitioned: Cutter) -> None:
    path = partitioned(graphs.mixed(), parts)
    x, edges = torch.rand(5, WIDTH), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    layer = layers.GPSConv(WIDTH, layers.GCNConv(WIDTH, WIDTH), 2).eval()
    want = layer(x, edges)

    def run(group: Any) -> bool:
        data_of(path)
        return torch.equal(layer(x, edges), want)

    assert all(run_threads(parts, run))


# -- what reads ids, or needs them ---------------------------------------------------------------

USES: dict[str, Callable[[Any], Any]] = {
    "add of a ShardedEdgeIndex|addition of": lambda d: d.edge_index + 1,
    "mul of": lambda d: d.edge_index * 2,
    "__getitem__ of a ShiftedEnd": lambda d: d.x[d.edge_index[0] + 1],
    "sort of a ShardedEdgeIndex": lambda d: d.edge_index.sort(),
    "unique": lambda d: d.edge_index[0].unique(),
    "tolist": lambda d: d.edge_index.tolist(),
    "item": lambda d: d.edge_index[0].item(),
    "indexing of edges by int": lambda d: int(d.edge_index[0][0]),
    "numpy": lambda d: d.edge_index.numpy(),
    "__reduce_ex__.*state_dict": lambda d: pickle.dumps(d.edge_index),
    "state_dict": lambda d: torch.save(d, io.BytesIO()),
    "share_memory_": lambda d: d.share_memory_(),
    "to.torch.int32": lambda d: d.edge_index.to(torch.int32),
    "int of": lambda d: d.edge_index.int(),
    "to.meta": lambda d: d.to("meta"),
    "new_empty of": lambda d: d.coalesce(),
    "of a (EdgeEnd|ShardedEdgeIndex)": lambda d: d.is_undirected(),
    "indexing of edges by slice": lambda d: d.edge_index[:, :5],
    "indexing of edges by Tensor": lambda d: d.edge_index[:, torch.tensor([0])],
    "lt of a EdgeEnd": lambda d: d.edge_index[0] < d.edge_index[1],
    "comparison of ends": lambda d: d.edge_index[0] == 0,
    "embedding": lambda d: F.embedding(d.edge_index[0], d.x),
    "gather": lambda d: d.x.gather(0, d.edge_index[0].view(-1, 1).expand(-1, 3)),
    "one_hot": lambda d: F.one_hot(d.edge_index[0]),
    "indexing of a Tensor by ShardedEdgeIndex": lambda d: d.x[d.edge_index],
    "indexing of a Tensor by EdgeEnd, int": lambda d: d.x[d.edge_index[0], 0],
    "writing rows of a Tensor at EdgeEnd": lambda d: d.x.__setitem__(d.edge_index[0], 0.0),
    "cat of edge indices, some of them flipped": lambda d: torch.cat(
        [d.edge_index, d.edge_index.flip(0)], 1
    ),
    "cat of ShardedEdgeIndex, Tensor": lambda d: torch.cat(
        [d.edge_index, torch.tensor([[0], [1]])], 1
    ),
    "cat of ShardedEdgeIndex, EdgeIndex": lambda d: torch.cat(
        [d.edge_index, EdgeIndex([[0], [1]], sparse_size=(2, 2))], 1
    ),
    "FastRGCNConv: x: got whole numbers": lambda d: layers.FastRGCNConv(57, 5, 3)(
        d.n_id, d.edge_index, d.edge_index.graph.edge_columns(torch.zeros(d.num_edges).long())
    ),
    "EdgeIndex|detach|alias|as_subclass": lambda d: EdgeIndex(d.edge_index),
    "min.dim of": lambda d: torch.sparse_coo_tensor(d.edge_index, torch.ones(d.num_edges)),
    "to_dense_adj|batch|sum|view|mul|index": lambda d: utils.to_dense_adj(d.edge_index),
    "nonzero": lambda d: (d.edge_index[0] == d.edge_index[1]).nonzero(),
    "a sum of rows of torch.complex64": lambda d: utils.scatter(
        d.x.to(torch.complex64)[d.edge_index[0]], d.edge_index[1]
    ),
    "scatter_sum_ along 1": lambda d: torch.zeros(d.num_nodes, 3).scatter_add_(
        1, d.edge_index[1].view(-1, 1).expand(-1, 3), d.x[:, :3].float()[d.edge_index[0]]
    ),
    "scatter_sum_ along 0 of rows": lambda d: torch.zeros(d.num_nodes, 3).scatter_add_(
        0, d.edge_index[1].view(-1, 1), d.x[:, :3].float()[d.edge_index[0]]
    ),
    "a sum of rows .* into": lambda d: torch.zeros(d.num_nodes, 3).index_add_(
        0, d.edge_index[1], d.x[:, :1].float()[d.edge_index[0]]
    ),
    "bincount: got minlength=1000": lambda d: d.edge_index[1].bincount(minlength=1000),
    "max of a EdgeEnd with dim": lambda d: d.edge_index[0].max(dim=0),
    "scatter: got reduce='any'": lambda d: utils.scatter(
        d.x[d.edge_index[0]], d.edge_index[1], reduce="any"
    ),
    "fill_value: got 'mul'": lambda d: utils.add_self_loops(d.edge_index, d.weight, "mul"),
    "requires_grad": lambda d: setattr(d.edge_index, "requires_grad", True),
}


@pytest.mark.parametrize("reason", USES)
def test_uses_that_need_ids_are_refused(reason: str, partitioned: Cutter) -> None:
    for message in refusals(partitioned(graphs.mixed(), PARTS), USES[reason]):
        assert re.search(reason, message), message


LENGTHS: dict[str, Callable[[Any], Any]] = {
    "index_select: got rows": lambda d: d.x[1:][d.edge_index[0]],
    "num_nodes: got 1000": lambda d: utils.add_self_loops(d.edge_index, num_nodes=1000),
    "dim_size: got 1000": lambda d: utils.scatter(
        d.x[d.edge_index[0]], d.edge_index[1], dim_size=1000
    ),
    "rows: got .*3.*one for each of this rank's edges": lambda d: utils.scatter(
        torch.ones(3), d.edge_index[1]
    ),
    "weight: got shape .*3.*rows, one for each edge": lambda d: layers.GCNConv(WIDTH, 2).double()(
        d.x, d.edge_index, torch.ones(3)
    ),
}


@pytest.mark.parametrize("reason", LENGTHS)
def test_other_lengths_are_refused(reason: str, partitioned: Cutter) -> None:
    for message in refusals(partitioned(graphs.mixed(), PARTS), LENGTHS[reason], ValueError):
        assert re.search(reason, message), message


def test_loops_between_two_types_are_refused(partitioned: Cutter) -> None:
    path = partitioned(graphs.hetero(), PARTS)
    layer = layers.GATConv((WIDTH, WIDTH), 2)

    def run(group: Any) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        rows = (torch.ones(data[kind].num_nodes, WIDTH) for kind in ("user", "item"))
        with pytest.raises(sar.NotSupportedError, match=r"from 'user' .* add_self_loops=False"):
            layer(tuple(rows), data["user", "buys", "item"].edge_index)

    run_threads(PARTS, run)


def test_a_graph_in_place_of_edges_or_rows_is_refused(partitioned: Cutter) -> None:
    path = partitioned(graphs.mixed(), PARTS)

    def run(group: Any) -> None:
        graph = sar.construct_full_graph(sar.load_partition_data(path))
        rows, layer, data = (
            torch.ones(graph.num_nodes(), WIDTH),
            layers.GCNConv(WIDTH, 2),
            data_of(path),
        )
        with pytest.raises(TypeError, match="edges: got a ShardedGraph, expected edge_index of"):
            layer(rows, graph)
        for x, edges in ((data.edge_index, rows), (data, data.edge_index), (graph, rows)):
            with pytest.raises(TypeError, match=f"x: got a {type(x).__name__}, expected a row"):
                layer(x, edges)

    run_threads(PARTS, run)


PLAIN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "all edges": lambda edges, own: edges,
    "all edges, by ids that a rank has": lambda edges, own: edges % own,
    "some edges": lambda edges, own: edges[:, ::2],
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", ["GCNConv", "SAGEConv"])
def test_edges_that_are_not_cut_are_refused(kind: str, name: str, partitioned: Cutter) -> None:
    edges = torch.stack(graphs.mixed().edges[ETYPE_HOMO])
    layer = getattr(layers, kind)(WIDTH, WIDTH).double()

    def use(data: Any) -> None:
        layer(data.x, PLAIN[name](edges, data.num_nodes))

    for message in refusals(partitioned(graphs.mixed(), PARTS), use, ValueError):
        assert message.startswith(f"{kind}: edges: got a plain tensor (2, ")


def test_edges_among_the_rows_of_a_rank_are_its_own_affair(partitioned: Cutter) -> None:
    edges = torch.stack(graphs.mixed().edges[ETYPE_HOMO])
    layer = layers.GCNConv(WIDTH, 2).double()

    def run(group: Any) -> None:
        data = data_of(path)
        own = data.num_nodes
        layer(data.x, edges[:, (edges < own).all(0)])
        layer(torch.ones(57, WIDTH).double(), edges)
        layer((data.x, data.x)[0], torch.empty(2, 0, dtype=torch.int64))

    path = partitioned(graphs.mixed(), PARTS)
    run_threads(PARTS, run)


@pytest.mark.parametrize("kind", ["GCNConv", "EGConv"])
def test_edges_cached_of_another_graph_are_refused(kind: str, partitioned: Cutter) -> None:
    layer = made(kind, WIDTH, 8, cached=True)().double()
    layer(torch.ones(57, WIDTH).double(), torch.stack(graphs.mixed().edges[ETYPE_HOMO]))
    path = partitioned(graphs.mixed(), PARTS)
    for message in refusals(path, lambda data: layer(data.x, data.edge_index)):
        assert message.startswith(f"{kind}: got an edge index, but has cached that of a graph")


def test_errors_name_the_layer(partitioned: Cutter) -> None:
    class Hashed(layers.MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor, edge_index_i: Tensor) -> Tensor:
            return x_j * edge_index_i.view(-1, 1)

    layer = Hashed()
    path = partitioned(graphs.mixed(), PARTS)
    for message in refusals(path, lambda data: layer(data.x, data.edge_index)):
        assert message.startswith("Hashed: mul of a EdgeEnd: there are no ids")


# -- what works ----------------------------------------------------------------------------------


def test_data_are_data(partitioned: Cutter) -> None:
    path = partitioned(graphs.mixed(), PARTS)
    whole = torch.stack(graphs.mixed().edges[ETYPE_HOMO])

    def run(group: Any) -> int:
        data = data_of(path)
        edges = data.edge_index
        assert f"{edges}" == str(edges) == f"ShardedEdgeIndex((2, {data.num_edges}))"
        assert f"edge_index=[2, {data.num_edges}]" in str(data)
        assert "edge_index" in data and "adj_t" not in data and edges in {edges}
        assert data.validate() and data.num_features == WIDTH
        assert data.has_self_loops() == utils.contains_self_loops(whole)
        others = copy.copy(data), copy.deepcopy(data), data.clone(), data.detach()
        layer = layers.GraphConv(WIDTH, 3).double()
        want = layer(data.x, edges)
        for other in (*others, data.to("cpu"), data.cpu(), data.contiguous()):
            assert torch.equal(layer(other.x, other.edge_index), want)
        assert torch.equal(utils.degree(edges[1]).long(), edges[1].bincount())
        rows = data.x.index_select(dim=0, index=edges[0])
        assert torch.equal(utils.scatter(rows, edges[1]), utils.scatter(data.x[edges[0]], edges[1]))
        return data.num_edges

    assert sum(run_threads(PARTS, run)) == whole.shape[1]


class Stack(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.second = kind(WIDTH, 5), kind(5, 4)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        return self.second(torch.tanh(self.first(x, edges)), edges)


def again(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return checkpoint(layer, x, edges, use_reentrant=False)


def again_reentrant(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return checkpoint(layer, x, edges, use_reentrant=True)


def compiled(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return torch.compile(layer, backend="eager")(x, edges)


def without_grad(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    with torch.inference_mode():
        first = layer(x, edges).clone()
    return layer(x, edges) + torch.tensor(first.tolist(), dtype=x.dtype)


MODES = [again, again_reentrant, compiled, without_grad]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("kind", [layers.GATConv, layers.SAGEConv])
def test_models_run_in_modes_of_torch(kind: Any, mode: Any, partitioned: Cutter) -> None:
    graph = graphs.mixed()
    torch.manual_seed(0)
    model, x = Stack(kind).double(), torch.randn(57, WIDTH, dtype=torch.float64)
    want = pyg.whole(graph, model, mode, x, {})
    got = pyg.sharded(partitioned(graph, PARTS), PARTS, model, mode, x, {})
    pyg.compare(want, got, 1e-9)


@pytest.mark.parametrize("kind", [layers.GATConv, layers.SAGEConv, layers.GCNConv])
def test_models_run_under_autocast(kind: Any, partitioned: Cutter) -> None:
    def narrow(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x, edges)

    graph = graphs.mixed()
    torch.manual_seed(0)
    model, x = Stack(kind), torch.randn(57, WIDTH)
    want = pyg.whole(graph, model, narrow, x, {})
    got = pyg.sharded(partitioned(graph, PARTS), PARTS, model, narrow, x, {})
    assert want["output"].dtype == got["output"].dtype
    pyg.compare(want, got, 0.03)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_sums_have_the_dtype_of_rows(op: str, dtype: str, partitioned: Cutter) -> None:
    graph, layer = graphs.mixed(), layers.SimpleConv(op)
    x = (torch.arange(57 * 3).view(57, 3) * 7 % 31).to(getattr(torch, dtype))
    want = layer(x, torch.stack(graph.edges[ETYPE_HOMO]))
    path = partitioned(graph, PARTS)

    def run(group: Any) -> tuple[Tensor, Tensor]:
        data = data_of(path)
        return data.orig_id.long(), layer(x[data.orig_id.long()], data.edge_index)

    for ids, rows in run_threads(PARTS, run):
        assert rows.dtype == want.dtype
        assert torch.allclose(rows.double(), want[ids].double(), rtol=0.02)


# -- ranks that differ ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT", "SAGE both ends", "Edge", "Hypergraph"])
def test_rows_of_another_length_on_one_rank_raise_on_all(name: str, partitioned: Cutter) -> None:
    make, call = CONVS[name]
    layer = make().double()
    path = partitioned(graphs.mixed(), 3)

    def run(group: Any) -> str:
        data = data_of(path)
        x = data.x[1:] if group.rank == 1 else data.x
        with pytest.raises(ValueError) as caught:
            call(layer, x, data.edge_index, None)
        return str(caught.value)

    for message in run_threads(3, run):
        assert "x: got shape" in message and "one for each of this rank's nodes" in message


def test_an_old_library_is_refused(partitioned: Cutter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_geometric.__version__", "2.5.3")
    path = partitioned(graphs.mixed(), PARTS)

    def run(group: Any) -> None:
        with pytest.raises(sar.NotSupportedError, match=r"got 2\.5\.3, expected 2\.6 or newer"):
            data_of(path)

    run_threads(PARTS, run)
