"""PyG's data, from one process to the rows of ranks: names, values, and what its methods say."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric
from foreign_files import write_pyg
from harness import run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, mixed
from harness.parts import Cutter, joined
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import transforms, utils
from torch_geometric.data import Data, HeteroData
from torch_geometric.explain import DummyExplainer, Explainer, ModelConfig
from torch_geometric.nn import GAT, GCN, GATConv

import sar
import sar.pyg
from sar.nn import DistMultScorer, DotScorer, NegativeSampler, link_loss, rank_links, score_edges
from sar.partition.features import FeatureStore

# -- round trips ---------------------------------------------------------------------------------

NODE_COLUMNS: dict[str, Callable[[int], Tensor]] = {
    "x": lambda n: torch.randn(n, 3),
    "y": lambda n: torch.randint(4, (n,)),
    "pos": lambda n: torch.randn(n, 2, dtype=torch.float64),
    "train_mask": lambda n: torch.rand(n) < 0.5,
    "split_masks": lambda n: torch.rand(n, 2) < 0.5,
    "time": lambda n: torch.randint(9, (n,), dtype=torch.int32),
    "node year": lambda n: torch.randint(99, (n,), dtype=torch.int16),
}
EDGE_COLUMNS: dict[str, Callable[[int], Tensor]] = {
    "edge_attr": lambda e: torch.randn(e, 2),
    "edge_weight": lambda e: torch.rand(e),
    "edge_type": lambda e: torch.randint(3, (e,)),
    "edge_time": lambda e: torch.randint(9, (e,)),
    "edge_train_mask": lambda e: torch.rand(e) < 0.5,
}
LABELS: list[Callable[[int], Tensor]] = [
    NODE_COLUMNS["y"],
    lambda n: torch.rand(n),
    lambda n: torch.randint(2, (n, 3)).float(),
]
COUNTS = st.integers(1, 12)


def put_nodes(draw: st.DrawFn, store: Any, count: int) -> None:
    store.num_nodes = count
    for name in draw(st.sets(st.sampled_from(list(NODE_COLUMNS)))):
        store[name] = NODE_COLUMNS[name](count)
    if "y" in store:
        store.y = draw(st.sampled_from(LABELS))(count)


def put_edges(draw: st.DrawFn, store: Any, src: int, dst: int) -> None:
    count = draw(st.integers(0, 20))
    store.edge_index = torch.stack([torch.randint(src, (count,)), torch.randint(dst, (count,))])
    for name in draw(st.sets(st.sampled_from(list(EDGE_COLUMNS)))):
        store[name] = EDGE_COLUMNS[name](count)


@st.composite
def graphs(draw: st.DrawFn) -> Data | HeteroData:
    torch.manual_seed(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        data = Data()
        put_nodes(draw, data, count := draw(COUNTS))
        put_edges(draw, data, count, count)
        return data
    data, types = HeteroData(), draw(st.permutations(["b paper", "an author", "term"]))
    for ntype in types[: draw(st.integers(1, 3))]:
        put_nodes(draw, data[ntype], draw(COUNTS))
    for relation in draw(st.permutations(["is of", "cites", "by"])):
        ends = [draw(st.sampled_from(data.node_types)) for _ in range(2)]
        counts = [data[ntype].num_nodes for ntype in ends]
        put_edges(draw, data[ends[0], relation, ends[1]], *counts)
    return data


def stores_of(data: Any) -> list[tuple[Any, list[Any]]]:
    """(store of nodes or edges, the stores of its ends) of all types."""
    if isinstance(data, Data):
        return [(data, [data, data])]
    nodes = [(data[n], []) for n in data.node_types]
    return nodes + [(data[e], [data[e[0]], data[e[2]]]) for e in data.edge_types]


def held(given: Any) -> list[dict[str, Any]]:
    """Columns of a rank's data by store; rows of edges, and their ends' ids, are computed."""
    found = []
    for store, ends in stores_of(given):
        columns = {name: rows for name, rows in store.items() if name != "edge_index"}
        if "edge_index" in store:
            lazy = [name for name, rows in columns.items() if hasattr(rows, "materialize")]
            columns |= {name: columns[name].materialize() for name in lazy}
            for side, end in enumerate(ends):
                columns[f"end {side}"] = end.n_id[store.edge_index[side]].materialize()
        found.append(columns)
    return found


@given(graphs(), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_columns_come_back_by_their_names(
    tmp_path_factory: pytest.TempPathFactory, data: Any, parts: int
) -> None:
    """Of all ranks together each row comes once, with the very values; types keep their order."""
    counts = [store.num_nodes for store, ends in stores_of(data) if len(ends) != 2]
    parts = min(parts, sum(counts) or data.num_nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = sar.partition_graph(data, tmp_path_factory.mktemp("cut") / "p", parts)

    def case(group: Any) -> Any:
        shown = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        assert type(shown) is type(data)
        assert isinstance(shown, Data) or shown.metadata() == data.metadata()
        return held(shown)

    ranks = run_threads(parts, case)
    added = {"n_id", "e_id", "orig_id", "orig_eid", "batch"}
    for number, (store, _) in enumerate(stores_of(data)):
        pieces = [rank[number] for rank in ranks]
        is_edges = "edge_index" in store
        names = set(store.keys()) - {"num_nodes", "edge_index"}
        assert names == {n for n in pieces[0] if not n.startswith("end ")} - added - {"num_nodes"}
        for name in names:
            ids = "e_id" if is_edges and not (isinstance(data, Data) and ends_as_node(name)) else ""
            key = ids or "n_id"
            got = joined([one[name] for one in pieces], [one[key] for one in pieces],
                         len(store[name]))  # fmt: skip
            assert got.dtype == store[name].dtype and torch.equal(got, store[name]), name
        if is_edges:
            for side in (0, 1):
                got = joined([one[f"end {side}"] for one in pieces],
                             [one["e_id"] for one in pieces], store.num_edges)  # fmt: skip
                assert torch.equal(got, store.edge_index[side])


def ends_as_node(name: str) -> bool:
    return name in NODE_COLUMNS


# -- what data can and cannot say ----------------------------------------------------------------


def on_ranks(path: str, parts: int, case: Callable[[Any], Any]) -> list[Any]:
    """What a case says of each rank's data."""
    return run_threads(
        parts, lambda group: case(sar.pyg.construct_full_graph(sar.load_partition_data(path)))
    )


COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda data: data.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "to": lambda data: data.to("cpu"),
    "cpu": lambda data: data.cpu(),
    "contiguous": lambda data: data.contiguous(),
    "detach": lambda data: data.detach(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_run_as_the_data(name: str, partitioned: Cutter) -> None:
    torch.manual_seed(0)
    layer = GATConv(6, 3, edge_dim=1)

    def case(data: Any) -> None:
        out = layer(data.x, data.edge_index, data.weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = COPIES[name](data)
        assert str(other) == str(data) and other.keys() == data.keys()
        torch.testing.assert_close(layer(other.x, other.edge_index, other.weight), out)

    on_ranks(partitioned(mixed(), 4, "adversarial"), 4, case)


def test_counts_are_of_the_rank(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 4, "adversarial")

    def case(data: Any) -> tuple[int, int]:
        assert data.validate() and data.has_self_loops() and data.num_features == 6
        assert data.is_node_attr("x") and not data.is_edge_attr("y")
        assert data.size() == (data.num_nodes, data.num_nodes)
        assert data["edge_index"] is data.edge_index and len(data.weight) == data.num_edges
        assert f"weight=[{data.num_edges}]" in str(data)
        return data.num_nodes, int(data.num_edges)

    nodes, edges = zip(*on_ranks(path, 4, case), strict=True)
    assert (sum(nodes), sum(edges)) == (57, len(mixed().edges[ETYPE_HOMO][0]))


IMPOSSIBLE: dict[str, Callable[[Any], Any]] = {
    "is_undirected": lambda data: data.is_undirected(),
    "has_isolated_nodes": lambda data: data.has_isolated_nodes(),
    "coalesce": lambda data: data.coalesce(),
    "sort": lambda data: data.sort(),
    "subgraph": lambda data: data.subgraph(torch.arange(2)),
    "edge_subgraph": lambda data: data.edge_subgraph(torch.arange(2)),
    "concat": lambda data: data.concat(data),
    "save": lambda data: torch.save(data, "/dev/null"),
    "meta": lambda data: data.to("meta"),
    "NormalizeFeatures": lambda data: transforms.NormalizeFeatures()(data),
    "TargetIndegree": lambda data: transforms.TargetIndegree()(data),
    "NormalizeRotation": lambda data: transforms.NormalizeRotation()(data),
    "homophily": lambda data: utils.homophily(data.edge_index, data.y),
    "nodes": lambda data: utils.subgraph(torch.arange(2), data.edge_index),
    "Explainer": lambda data: Explainer(
        GCN(6, 4, 2), DummyExplainer(), explanation_type="model", node_mask_type="object",
        model_config=ModelConfig(mode="regression", task_level="node"),
    )(data.x, data.edge_index),
    "gradient of a column": lambda data: data.weight.requires_grad_(),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_needs_all_ids_says_so(name: str, partitioned: Cutter) -> None:
    def case(data: Any) -> None:
        with pytest.raises(sar.NotSupportedError, match="got|expected|before .* cut|not cut"):
            IMPOSSIBLE[name](data)

    on_ranks(partitioned(mixed(), 2), 2, case)


def test_columns_of_edges_are_read_when_they_are_needed(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = FeatureStore.__getitem__
    monkeypatch.setattr(
        FeatureStore, "__getitem__", lambda store, name: read.append(name) or whole(store, name)
    )

    def case(data: Any) -> None:
        model = GCN(6, 4, 2)
        model(data.x, data.edge_index)
        assert not [name for name in read if "_E" in name]
        for _ in range(2):
            model(data.x, data.edge_index, data.weight)
        assert [name for name in read if "_E" in name] == ["_N:_E:_N/weight"]

    on_ranks(partitioned(mixed(), 1), 1, case)


@pytest.mark.parametrize(
    ("versions", "words"),
    [(["2.5.3"] * 2, r"got 2\.5\.3, expected 2\.6"), (["2.8.1", "2.9.0"], "torch_geometric")],
)
def test_versions_of_pyg(
    versions: list[str], words: str, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too old, or not the same on all ranks."""
    path, given = partitioned(mixed(), 2), iter(versions)

    class Module:
        def __getattr__(self, name: str) -> Any:
            return next(given) if name == "__version__" else getattr(torch_geometric, name)

    monkeypatch.setitem(__import__("sys").modules, "torch_geometric", Module())
    with pytest.raises((sar.NotSupportedError, ValueError), match=words):
        on_ranks(path, 2, lambda data: None)


def test_edge_index_of_its_own_class(tmp_path: Path) -> None:
    """In memory, and in a file of the command line's."""
    index = torch_geometric.EdgeIndex([[0, 1, 2], [1, 2, 3]], sparse_size=(4, 4), sort_order="row")
    data = Data(x=torch.rand(4, 2), edge_index=index)
    torch.save(data, tmp_path / "d.pt")
    for number, source in enumerate((data, tmp_path / "d.pt")):
        path = sar.partition_graph(source, tmp_path / f"p{number}", 1)
        (got,) = on_ranks(path, 1, held)
        assert [got[0][f"end {side}"].tolist() for side in (0, 1)] == index.as_tensor().tolist()


# -- training ------------------------------------------------------------------------------------


def whole_graph(graph: GraphArrays) -> tuple[Tensor, Tensor]:
    return graph.node_data["_N"]["feat"], torch.stack(graph.edges[ETYPE_HOMO])


def test_a_folder_of_pygs_partitioner_trains(tmp_path: Path) -> None:
    """Adam's losses are those of one process on the data that was cut."""
    graph, parts = mixed(), torch.arange(57).remainder(3).numpy()
    path = str(write_pyg(graph, parts, 3, tmp_path / "p"))
    torch.manual_seed(0)
    model, y = GCN(6, 8, 2, 4).double(), graph.node_data["_N"]["label"]

    def losses(model: Any, x: Tensor, edges: Tensor, y: Tensor, count: int, group: Any) -> list:
        optimizer, found = torch.optim.Adam(model.parameters(), lr=0.05), []
        for _ in range(5):
            each = torch.nn.functional.cross_entropy(model(x, edges), y, reduction="sum") / count
            optimizer.zero_grad()
            each.backward()
            if group is not None:
                sar.gather_grads(model)
                each = group.all_reduce(each.detach())
            optimizer.step()
            found.append(float(each.detach()))
        return found

    x, edges = whole_graph(graph)
    want = losses(copy.deepcopy(model), x.double(), edges, y, 57, None)

    def case(group: Any) -> list[float]:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        assert data.edge_attr.shape[1] == 2
        own = copy.deepcopy(model)
        return losses(own, data.x.double(), data.edge_index, y[data.n_id], 57, group)

    for got in run_threads(3, case):
        assert got == pytest.approx(want, rel=1e-9)


def test_edges_of_a_lazy_mask(partitioned: Cutter) -> None:
    """Edges and their weights, chosen by a column; without a warning."""
    graph = mixed()
    columns = graph.edge_data[ETYPE_HOMO]
    torch.manual_seed(0)
    model, keep = GCN(6, 4, 2).double(), columns["type"] == 1
    x, edges = whole_graph(graph)
    want = model(x.double(), edges[:, keep], columns["weight"].double()[keep])

    def case(data: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mask = data.type == 1
            weight = data.weight[mask].double()
            got = model(data.x.double(), data.edge_index[:, mask], weight)
        torch.testing.assert_close(got, want[data.n_id])

    on_ranks(partitioned(graph, 4, "adversarial"), 4, case)


def test_columns_that_have_the_names_of_others(partitioned: Cutter) -> None:
    """A column n_id stays; one that would hide the edges raises."""
    path = partitioned(mixed(), 2)

    def case(group: Any) -> None:
        part = sar.load_partition_data(path)
        part.node_features["_N/n_id"] = part.node_features["_N/orig_id"] + 100
        data = sar.pyg.construct_full_graph(part)
        assert torch.equal(data.n_id, data.orig_id + 100)
        part.node_features["_N/edge_index"] = data.n_id
        with pytest.raises(ValueError, match="'_N/edge_index'"):
            sar.pyg.construct_full_graph(part)

    run_threads(2, case)


def test_links_of_a_split(partitioned: Cutter) -> None:
    """True edges of a mask train; scores, losses and ranks do not depend on the cut."""
    graph = mixed()
    held_out = torch.arange(len(graph.edges[ETYPE_HOMO][0])) % 5 == 0
    torch.manual_seed(0)
    encoder, scorer = GAT(6, 8, 2, 5).double(), DistMultScorer(3, 5).double()
    x, edges = whole_graph(graph)
    h = encoder(x.double(), edges[:, ~held_out])
    want = (h[edges[0]] * h[edges[1]]).sum(1)

    def case(group: Any) -> Any:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        mask = held_out[data.e_id.materialize()]
        train = data.edge_index[:, ~mask]
        model = copy.deepcopy(encoder)
        h = model(data.x.double(), train)
        got = score_edges(data, DotScorer(), h)
        torch.testing.assert_close(got, want[data.e_id.materialize()])
        sampler = NegativeSampler(train, k=2, seed=3, columns=["type"])
        loss = link_loss(train, sampler(0), copy.deepcopy(scorer), h, edge_type="type")
        loss.backward()
        sar.gather_grads(model)
        ranks = rank_links(data.edge_index, DotScorer(), h, mask)
        grads = [p.grad for p in model.parameters()]
        return float(loss.detach()), grads, float(group.all_reduce(ranks.detach().sum()))

    found = []
    for parts in (1, 3):
        path = partitioned(graph, parts, "random")
        found.append(run_threads(parts, case)[0])
    assert found[0][0] == pytest.approx(found[1][0]) and found[0][2] == pytest.approx(found[1][2])
    torch.testing.assert_close(found[0][1], found[1][1])
