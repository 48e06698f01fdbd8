"""PyG's data, from one process to the rows of ranks: names, values, and what its methods say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.parts import joined
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import sar
import sar.pyg

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
