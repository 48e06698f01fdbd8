"""The quality of a cut, against sets of nodes and edges in plain Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs_to_cut import KINDS, small
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from harness.parts import write_partitions
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.__main__ import main
from sar.cli.cut_report import report_lines
from sar.partition.quality import CutQuality, balance, measure

Capture = pytest.CaptureFixture[str]


def random_parts(graph: GraphArrays, num_parts: int, seed: int, empty: bool = False) -> np.ndarray:
    """The part of every node; only of even numbers where there shall be empty ones."""
    parts = np.random.default_rng(seed).integers(0, num_parts, graph.total_nodes)
    return parts // 2 * 2 if empty else parts


def check(found: CutQuality, graph: GraphArrays, parts: np.ndarray, num_parts: int) -> None:
    """Everything but ``fewest``, from sets."""
    offsets, home = graph.node_offsets(), parts.tolist()
    edges, cut = [0] * num_parts, [0] * num_parts
    needed = set()
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        for start, end in zip(src.tolist(), dst.tolist()):
            node, part = start + offsets[src_type], home[end + offsets[dst_type]]
            edges[part] += 1
            if home[node] != part:
                cut[part] += 1
                needed.add((part, node))
    rows = np.zeros((num_parts, num_parts), dtype=np.int64)
    for part, node in needed:
        rows[part, home[node]] += 1
    boundary = [0] * num_parts
    for node in {node for _, node in needed}:
        boundary[home[node]] += 1
    training = [0] * num_parts
    for ntype, data in graph.node_data.items():
        for node in data["train_mask"].nonzero()[:, 0].tolist():
            training[home[node + offsets[ntype]]] += 1
    assert found.nodes.tolist() == [home.count(part) for part in range(num_parts)]
    for ntype, count in graph.num_nodes.items():
        own = home[offsets[ntype] : offsets[ntype] + count]
        assert found.typed_nodes[ntype].tolist() == [own.count(part) for part in range(num_parts)]
    assert (found.edges.tolist(), found.cut_edges.tolist()) == (edges, cut)
    assert found.rows.tolist() == rows.tolist()
    assert found.halo.tolist() == rows.sum(1).tolist()
    assert found.boundary.tolist() == boundary
    assert found.training is not None and found.training.tolist() == training
    for one in (found.nodes, found.edges, found.halo, found.boundary, found.training, found.rows):
        assert one.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    num_parts=st.sampled_from([1, 2, 3, 8, 12, 30, 70, 300]),
    num_edges=st.sampled_from([0, 1, 40, 150]),
    seed=st.integers(0, 1000),
    empty=st.booleans(),
)
def test_counts(kind: str, num_parts: int, num_edges: int, seed: int, empty: bool) -> None:
    graph = small(kind, num_edges, seed)
    parts = random_parts(graph, num_parts, seed, empty)
    found = measure(graph, parts, num_parts)
    check(found, graph, parts, num_parts)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small("several", 150, 2)
    parts = random_parts(graph, 3, 2)
    whole = measure(graph, parts, 3, cover=True)
    monkeypatch.setattr("sar.partition.progress.BLOCK", 7)
    blocks = measure(graph, parts.astype(np.int16), 3, cover=True)
    check(blocks, graph, parts, 3)
    assert whole.to_dict() == blocks.to_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_tell_the_same(kind: str, tmp_path: Path, capsys: Capture) -> None:
    """What was measured right after the cut is what is counted in written partitions."""
    graph = small(kind, 150, 3)
    parts = random_parts(graph, 4, 3)
    found = measure(graph, parts, 4, cover=True).to_dict()
    path = write_partitions(graph, torch.from_numpy(parts), tmp_path / "p", num_parts=4)
    assert main(["inspect", path, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"].pop("ended") is not None
    assert {key: shown[key] for key in found} == found
    assert shown["sum_rows"]["fewest"] == sum(map(sum, found["rows"]["fewest"]))


def test_masks_of_several_columns_and_none() -> None:
    graph = small("one type", 40, 4)
    parts = random_parts(graph, 2, 4)
    columns = torch.zeros(23, 3, dtype=torch.uint8)
    columns[5, 1] = columns[5, 2] = columns[7, 0] = 1
    graph.node_data[NTYPE_HOMO]["train_mask"] = columns
    found = measure(graph, parts, 2)
    assert found.training is not None and found.training.sum() == 2
    without = measure(small("one type", 40, 4, masks=False), parts, 2)
    assert without.training is without.train_balance is None
    described = without.to_dict()
    assert described["train_nodes"] is described["parts"][0]["train_nodes"] is None


def test_balances() -> None:
    edges = (torch.tensor([0, 1, 2]), torch.tensor([3, 3, 3]))
    graph = GraphArrays("g", {NTYPE_HOMO: 4}, {ETYPE_HOMO: edges})
    found = measure(graph, np.array([0, 0, 0, 1]), 2, cover=True)
    assert found.num_parts == 2 and found.cut_share == 1.0
    assert (found.node_balance, found.edge_balance) == (1.5, 2.0)
    assert (found.halo_balance, found.boundary_balance) == (2.0, 2.0)
    assert found.rows.tolist() == [[0, 0], [3, 0]]
    assert found.fewest is not None and found.fewest.tolist() == [[0, 0], [1, 0]]
    assert balance([0, 0]) == 1.0
    none = measure(GraphArrays("g", {NTYPE_HOMO: 0}, {}), np.zeros(0, int), 2, cover=True)
    assert none.cut_share == 0.0 and none.node_balance == 1.0


def test_lines_and_the_price_of_balance() -> None:
    graph = small("one type", 150, 5)
    found = measure(graph, random_parts(graph, 4, 5, empty=True), 4)
    lines, cut = report_lines(found), int(found.cut_edges.sum())
    assert lines[0] == "graph    g: 23 nodes, 150 edges, 1 node and 1 edge types"
    assert lines[1] == f"cut      {cut} edges ({100 * cut / 150:.1f} %) run between 4 partitions"
    labels = ["graph", "cut", "nodes", "edges", "halo", "boundary", "training", "empty"]
    assert [line[:9].strip() for line in lines] == labels
    assert lines[-1] == "empty    2 of 4 partitions have no node"
    halo = f"0 to {found.halo.max()} a partition, largest / mean {found.halo_balance:.3f}"
    assert lines[4] == f"halo     {halo}"
    even, uneven = np.arange(23) % 2, np.zeros(23, dtype=np.int64)
    uneven[:2] = 1
    before, after, alone = (measure(graph, parts, 2) for parts in (uneven, even, uneven * 0))
    (line,) = [line for line in report_lines(after, before) if line.startswith("balance")]
    old, new = int(before.halo.sum()), int(after.halo.sum())
    assert new > old > 0
    assert f"costs {new - old} halo rows ({100 * (new - old) / old:+.1f} %)" in line
    assert f"nodes {before.node_balance:.2f} to {after.node_balance:.2f}" in line
    assert any("saves" in line for line in report_lines(before, after))
    assert f"costs {new} halo rows;" in report_lines(after, alone)[-1]
