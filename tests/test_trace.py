"""Traces and summaries: the spans nest, the bytes are those of the counters, nobody is slowed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COLLECTIVE_TIMEOUT, WorkerPool, run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import nn

import sar
from sar.comm import Group

RANKS = 3


class Layer(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, out)

    def forward(self, graph: sar.ShardedGraph, x: torch.Tensor) -> torch.Tensor:
        return graph.aggregate(self.fc(x), "mean")


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Layer(width, 5), Layer(5, 4)

    def forward(self, graph: sar.ShardedGraph, x: torch.Tensor) -> torch.Tensor:
        return self.second(graph, self.first(graph, x).relu())


@pytest.fixture
def parts(partitioned: Cutter) -> str:
    return partitioned(mixed(200), RANKS)


def case(group: Group, parts: str, file: str) -> dict[str, Any]:
    data = sar.load_dgl_partition_data(parts, group.rank)
    graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"]
    model = Model(x.shape[1])
    sar.sync_params(model, group=group)
    sar.global_mean(model(graph, x).sum(1), group=group).backward()  # before the trace
    counters = group.counters
    before = counters.sent_bytes, counters.received_bytes
    with sar.trace(file, model, group=group) as recorded:
        for _ in range(2):
            model.zero_grad()
            loss = sar.global_mean(model(graph, x).sum(1), group=group)
            loss.backward(retain_graph=True)
            loss.backward()
            sar.gather_grads(model, group=group)
    sent, received = (
        group.counters.sent_bytes - before[0],
        group.counters.received_bytes - before[1],
    )
    return {"sent": sent, "received": received, "rows": recorded.summary()}


def check(file: Path, ranks: list[dict[str, Any]]) -> None:
    events = json.loads(file.read_text())["traceEvents"]
    for rank, result in enumerate(ranks):
        spans = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
        wire = [e["args"] for e in spans if e["tid"] > 0]
        for way in ("sent", "received"):
            assert sum(args[way] for args in wire) == result[way] > 0
            assert sum(row[way] for row in result["rows"]) == result[way]
        for lane in {e["tid"] for e in spans}:
            nest([e for e in spans if e["tid"] == lane])
        names = {(row["layer"], row["pass"]): row for row in result["rows"]}
        layers = itertools.product(("first", "second"), ("forward", "backward"))
        for layer, work in [*layers, ("", "other")]:
            row = names[layer, work]
            assert row["compute"] > 0 and row["wait"] >= 0
        assert names["second", "forward"]["exchanges"] == 2 * (RANKS - 1)
        assert names["second", "backward"]["exchanges"] == 4 * (RANKS - 1)  # two calls an epoch
        assert list(names)[-1] == ("", "other")


def nest(spans: list[dict[str, Any]]) -> None:
    """Each span lies inside or outside of each other."""
    open_until: list[float] = []
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        end = span["ts"] + span["dur"]
        while open_until and open_until[-1] <= span["ts"] + 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3, span
        open_until.append(end)


def test_a_trace_of_threads(parts: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    check(file, run_threads(RANKS, case, parts, str(file)))


def test_a_trace_of_processes(processes: WorkerPool, parts: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    check(file, processes.run(RANKS, case, parts, str(file)))


def test_nothing_is_kept_without_a_trace(parts: str) -> None:
    def quiet(group: Group) -> None:
        data = sar.load_dgl_partition_data(parts, group.rank)
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"]
        model = Model(x.shape[1])
        with sar.trace(model=model, group=group) as recorded:
            model(graph, x)
        assert group.meter.spans is None and len(recorded.summary()) >= 3
        assert not model.first._forward_hooks and not model.first._forward_pre_hooks

    run_threads(RANKS, quiet)


def test_an_error_inside_leaves_no_file_and_nobody_waiting(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def failing(group: Group) -> None:
        with sar.trace(file, group=group):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_threads(2, failing, timeout=COLLECTIVE_TIMEOUT)
    assert not file.exists()


def test_a_folder_that_is_missing_is_named_on_every_rank(tmp_path: Path) -> None:
    def nowhere(group: Group) -> None:
        with pytest.raises(FileNotFoundError, match="file: got '.*none/t.json'"):
            with sar.trace(tmp_path / "none" / "t.json", group=group):
                pass
        with pytest.raises(TypeError, match="rank 0: "):
            with sar.trace(5, group=group):
                pass

    run_threads(2, nowhere)
