"""The planner: what it counts is what runs do, and what it measures is what they use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import GraphArrays, homogeneous, mixed
from harness.parts import Cutter

import sar
from sar.__main__ import main
from sar.models import ModelOptions, build_model, prepare_graph
from sar.plan import Costs, Hardware, Setting, Work, estimate, from_parts, measure_costs, predict
from sar.plan import probe as probing

COSTS = Costs(1e6, 1000.0, 10.0, 0.0, 1e-6, 1e-8, [1024], [512], [], 1e-9, 0.0, 0.0, 3, 4e8, 1000)
IN, OUT = (
    homogeneous(name, 31, *ends)
    for name, ends in (("in", ([*range(1, 31)], [0] * 30)), ("out", ([0] * 30, [*range(1, 31)])))
)


def rows_in_flight(group: sar.comm.Group, path: str) -> tuple[list[int], int, int]:
    graph = sar.construct_full_graph(sar.load_partition_data(path))
    plan = graph._relation(None).plan
    return plan.rows_in_flight.tolist(), sum(plan.send_counts), graph.num_nodes()


@pytest.mark.parametrize("cut", ["random", "adversarial"])
def test_rows_are_those_of_the_halo_plan(partitioned: Cutter, cut: str) -> None:
    path = partitioned(mixed(), 4, cut)
    ranks, graph = run_threads(4, rows_in_flight, path), from_parts(path)
    assert [rank.nodes for rank in graph.ranks] == [one[2] for one in ranks]
    assert graph.rows_sent() == sum(one[1] for one in ranks)
    for rounds in (1, 2, 3):
        found = max(one.pulled.in_flight(rank, rounds) for rank, one in enumerate(graph.ranks))
        assert found == ranks[0][0][rounds - 1]


def trained_bytes(
    group: sar.comm.Group, path: str, options: ModelOptions, constant_inputs: str
) -> int:
    """Bytes that a rank sends in the third epoch, when what is constant is kept."""
    data = sar.load_partition_data(path)
    graph = sar.construct_full_graph(data, sar.Policy(constant_inputs=constant_inputs))
    graph = prepare_graph(graph, options)
    model = build_model(options, 12, 5)
    x = torch.ones(graph.num_nodes(), 12)
    for _ in range(3):
        before = group.counters.sent_bytes
        model(graph, x).sum().backward()
    return group.counters.sent_bytes - before


@pytest.mark.parametrize(
    ("model", "constant_inputs", "graph"),
    [
        ("sage", "memory", mixed()),
        ("gcn", "memory", mixed()),
        ("gcn", "off", mixed()),
        ("gat", "memory", mixed()),
        ("gat", "mapped", mixed()),
        ("gat", "memory", IN),
        ("gat", "memory", OUT),
    ],
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_bytes_and_memory_of_a_model(
    partitioned: Cutter, model: str, constant_inputs: str, graph: GraphArrays
) -> None:
    """Graphs with many sources or many ends: backward of attention goes where fewer rows are."""
    options = ModelOptions(model, layers=3, hidden=20)
    work = Work(options, 12, 5, constant_inputs=constant_inputs)
    measure = probing.probe if model == "sage" else probing.probe_bytes
    costs = measure(work, 1, nodes=1024)
    path = partitioned(graph, 3, "random" if constant_inputs == "memory" else "adversarial")
    predicted = predict(from_parts(path), costs, Setting("", 2), Hardware())
    assert predicted.sent_bytes == sum(
        run_threads(3, trained_bytes, path, options, constant_inputs)
    )
    floats = sum(p.numel() for p in build_model(options, 12, 5).parameters())
    assert costs.parameters == floats
    # parameters, gradients and two moments; at the least x, two hidden layers and logits a node
    assert costs.fixed_bytes > 4 * 4 * floats * 0.9
    assert costs.node_bytes > 4 * (12 + 2 * 20 + 5)
    assert costs.edge_bytes > 4
    if model == "sage":
        assert costs.fixed_seconds > 0 and costs.byte_seconds > 0 and costs.message_seconds > 0


def test_estimate_of_a_random_cut_is_that_of_a_regular_graph(partitioned: Cutter) -> None:
    nodes, degree = 2000, 5
    src = torch.arange(nodes).repeat_interleave(degree)  # every node is the source of 5 edges
    dst = torch.randint(nodes, (len(src),), generator=torch.Generator().manual_seed(0))
    real = from_parts(partitioned(homogeneous("regular", nodes, src, dst), 4, "random"))
    guess = estimate("regular", nodes, nodes * degree, 4)
    assert guess.estimated and not real.estimated
    assert guess.rows_sent() == pytest.approx(real.rows_sent(), rel=0.03)
    given = estimate("regular", nodes, nodes * degree, 4, halo_share=0.5)
    assert given.rows_sent() == pytest.approx(nodes / 2, rel=0.01)
    assert estimate("regular", nodes, nodes * degree, 1).rows_sent() == 0


def even(size: int) -> Any:
    return estimate("even", 8000, 80_000, size, halo_share=1.0)


def test_memory_falls_with_ranks_and_rounds() -> None:
    peaks = [
        predict(even(size), COSTS, Setting("", max(1, size - 1)), Hardware()).memory_bytes
        for size in (1, 2, 4, 8)
    ]
    fixed = COSTS.process_bytes + COSTS.fixed_bytes
    assert peaks[0] == fixed + 8000 * 1000 + 80_000 * 10
    assert sorted(peaks[1:], reverse=True) == peaks[1:]
    one_shot = predict(even(8), COSTS, Setting("", 1), Hardware()).memory_bytes
    assert one_shot - peaks[3] == pytest.approx(2 * 1000 * 1024 * 5 / 7, rel=0.01)


def test_time_is_compute_and_wire_partly_at_once() -> None:
    slow, fast = (
        predict(even(4), COSTS, Setting("", 3), Hardware(bandwidth=rate)) for rate in (1e6, 1e12)
    )
    assert slow.wire_seconds < slow.seconds < slow.wire_seconds + slow.compute_seconds
    assert fast.seconds == pytest.approx(fast.compute_seconds, rel=1e-2)
    assert fast.compute_seconds == slow.compute_seconds
    assert slow.wire_seconds == pytest.approx((2000 * 1536 + 2 * 0.75 * 4000) * 8 / 1e6, rel=1e-3)
    packed = predict(even(4), COSTS, Setting("", 3), Hardware(1e12, ranks_per_host=4, cores=2))
    assert packed.compute_seconds == pytest.approx(2 * fast.compute_seconds)


def test_seconds_are_those_that_made_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that take what known costs say give these costs back."""
    fixed, node, edge, byte, nodes = 0.01, 3e-6, 2e-8, 5e-9, 1000
    runs = {
        "small": (fixed, 0.0),
        "few": (fixed + nodes * (node + 8 * edge), 0.0),
        "many": (fixed + nodes * (node + 32 * edge), 0.0),
        "remote": (fixed + nodes * (node + 8 * edge) + 4e5 * byte, 4e5),
    }
    monkeypatch.setattr(probing, "_timed", lambda work, path: runs[path])
    monkeypatch.setattr(probing.network, "byte_seconds", lambda: 1e-9)
    found = probing._seconds(Work(ModelOptions(), 12, 5), list(runs), nodes)
    assert found == pytest.approx((fixed, node, edge, byte + 1e-9))


def test_a_host_must_hold_all_its_ranks() -> None:
    peak = predict(even(4), COSTS, Setting("", 3), Hardware()).memory_bytes
    for ranks, memory, fits in ((1, peak, True), (1, peak - 2, False), (4, 3 * peak, False)):
        hardware = Hardware(memory=int(memory) + 1, ranks_per_host=ranks)
        assert predict(even(4), COSTS, Setting("", 3), hardware).fits is fits


def run_plan(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sar.cli.plan.measure_costs", lambda *_: COSTS)
    status = main(["plan", *words])
    return (status, *capsys.readouterr())


def test_a_recomputed_model_is_measured_where_nobody_imported_dgl() -> None:
    work = Work(ModelOptions("sage", layers=2, hidden=8), 4, 3, activations="recompute")
    assert measure_costs(work, seconds=False).node_bytes > 0


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: Any, partitioned: Cutter) -> None:
    words = ("ogbn-papers100M", "--hosts", "32", "--memory", "64GiB")
    status, out, _ = run_plan(monkeypatch, capsys, *words)
    assert status == 0 and "32 ranks" in out and "(estimated)" in out and "fits: " in out
    status, out, _ = run_plan(monkeypatch, capsys, "igb-large", "--hosts", "2", "--memory", "1GiB")
    assert "no setting fits" in out
    path = partitioned(mixed(), 3, "random")
    status, out, _ = run_plan(monkeypatch, capsys, path, "--feature-width", "12", "--json")
    content, graph = json.loads(out), from_parts(path)
    sent = graph.rows_sent() * 1024 + graph.rows_sent("summed") * 512
    assert content["ranks"] == 3 and not content["estimated"]
    names = [one["setting"]["name"] for one in content["settings"]]
    assert names == ["strict, keep", "one-shot, keep", "strict, recompute", "one-shot, recompute"]
    assert content["settings"][0]["sent_bytes"] == sent
    words, wires = (path, "--feature-width", "12", "--json", "--bandwidth"), []
    for rate in ("1Gbit", "5 Mbit/s"):
        content = json.loads(run_plan(monkeypatch, capsys, *words, rate)[1])
        wires.append(content["settings"][0]["wire_seconds"])
    assert wires[1] == pytest.approx(200 * wires[0])


def test_plot(monkeypatch: Any, capsys: Any, partitioned: Cutter, tmp_path: Path) -> None:
    """Lines for each setting against ranks; what was counted is told from what is estimated."""
    pytest.importorskip("matplotlib")
    parts, plot = partitioned(mixed(), 3, "random"), tmp_path / "plan.svg"
    known = ["ogbn-arxiv", "--hosts", "2", "--memory", "64GiB", "--ranks-per-host", "2"]
    for words, note in (
        ([parts, "--feature-width", "12"], "dotted: 3 ranks, counted; others: estimates"),
        (known, "dotted: 4 ranks"),
    ):
        status, _, _ = run_plan(monkeypatch, capsys, *words, "--plot", str(plot), "--dark")
        text = plot.read_text()
        assert status == 0 and f">{note}</text>" in text
        for word in ("strict, keep", "one-shot, recompute", "ranks", "6" if "3 r" in note else "8"):
            assert f">{word}</text>" in text, word
    assert ">a rank has 32 GiB</text>" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ogbn-product", "--hosts", "4"], "did you mean ogbn-products?"),
        (["ogbn-products"], "--hosts: got nothing"),
        (["ogbn-products", "--hosts", "0"], "--hosts: got '0', expected an integer of 1"),
        (["ogbn-products", "--hosts", "2", "--bandwidth", "25GB"], "--bandwidth: got '25GB'"),
        (["ogbn-products", "--hosts", "2", "--memory", "much"], "--memory: got 'much'"),
        (["ogbn-products", "--hosts", "2", "--memory", "4Gb"], "--memory: got '4Gb', which reads"),
        (["ogbn-products", "--hosts", "2", "--halo-share", "-1"], "--halo-share: got '-1'"),
        (["ogbn-products", "--hosts", "2", "--model", "gat", "--heads", "3"], "heads: got 3"),
        (["nowhere.json"], "nowhere.json"),
    ],
)
def test_typos(words: list[str], message: str, monkeypatch: Any, capsys: Any) -> None:
    status, _, error = run_plan(monkeypatch, capsys, *words)
    assert status == 2 and message in error


def test_partitions_fix_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, partitioned: Cutter
) -> None:
    path = partitioned(mixed(), 3, "random")
    words = (path, "--hosts", "2", "--feature-width", "4")
    status, _, error = run_plan(monkeypatch, capsys, *words)
    assert status == 2 and "--hosts: got 2 hosts of 1 ranks for a graph of 3 parts" in error
