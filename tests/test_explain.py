"""What explain says is what runs, and nothing is left behind; what the trainer logs of it."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import dgl.function as fn
import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.commands import on_threads
from harness.compare import same
from harness.graphs import NUM_FEATURES, looped
from harness.parts import Cutter
from harness.rows import Part, whole
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.comm import Group
from sar.models import LayerRow
from sar.train import DataOptions, Trainer, TrainOptions, load_node_data

F32 = 4
Case = Callable[[Group, Part], Any]


class Udf(nn.Module):
    """A function of edges of its own, or of mailboxes."""

    def __init__(self, mailbox: bool = False) -> None:
        super().__init__()
        self.mailbox = mailbox

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            if self.mailbox:
                graph.update_all(
                    fn.copy_u("h", "m"), lambda n: {"o": n.mailbox["m"].amax(1) + n.data["h"]}
                )
            else:
                graph.update_all(
                    lambda e: {"m": (e.src["h"] - e.dst["h"]).tanh()}, fn.sum("m", "o")
                )
            return graph.ndata["o"]


class Own(dgl.nn.SAGEConv):
    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        return self.fc_self(feat) + graph.aggregate(feat, "max")[:, :1]


class Scale(nn.Module):
    """A part that torch does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(graph, x).flatten(1).tanh()
        return x


def sage(before: int = 4, width: int = 4, kind: str = "mean", **options: Any) -> nn.Module:
    return dgl.nn.SAGEConv(before, width, kind, **options)


def hooked() -> Any:
    conv: Any = sage()
    conv.fc_self.register_forward_hook(lambda part, args, out: 2 * out)
    return conv


WAYS: dict[str, tuple[Callable[[], nn.Module], str, str | None]] = {
    "fused": (sage, "fused", None),
    "a part of a user's": (lambda: sage(norm=Scale()), "fused", None),
    "hooked": (hooked, "sum", "Linear in it has a hook"),
    "pool": (lambda: sage(kind="pool"), "extreme", "the aggregator 'pool' has no fused form"),
    "its own forward": (lambda: Own(4, 4, "mean"), "extreme", "Own has a forward of its own"),
    "fused gin": (lambda: dgl.nn.GINConv(nn.Linear(4, 4), "sum"), "fused", None),
    "gin": (
        lambda: dgl.nn.GINConv(nn.Linear(4, 4), "max"),
        "extreme",
        "the aggregator 'max' has no fused form",
    ),
    "sgc": (lambda: dgl.nn.SGConv(4, 4), "sum", "no fused layer stands for SGConv"),
    "fused gat": (lambda: dgl.nn.GATConv(4, 2, 2), "fused", None),
    "gat": (
        lambda: dgl.nn.DotGatConv(4, 2, 2),
        "attention kernel",
        "no fused layer stands for DotGatConv",
    ),
    "edge function": (Udf, "edge program", "no fused layer stands for Udf"),
    "mailbox": (lambda: Udf(mailbox=True), "mailbox", "no fused layer stands for Udf"),
}


def on_ranks(size: int, partitioned: Cutter, case: Case, **policy: Any) -> list[Any]:
    path = partitioned(looped(), size)
    return run_threads(size, lambda group: case(group, Part(group, path, sar.Policy(**policy))))


def rows_of(part: Part, width: int = 4) -> Tensor:
    return whole(looped().total_nodes, (width,), seed=1).float()[part.nodes]


def moved(group: Group) -> tuple[int, int]:
    return group.counters.sent_bytes, group.counters.received_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_says_what_runs_and_why(size: int, kind: str, partitioned: Cutter) -> None:
    """The second layer is the one; the bytes are those of an epoch."""
    make, way, why = WAYS[kind]
    model = Stack(sage(), make())

    def case(group: Group, part: Part) -> None:
        mine, x = copy.deepcopy(model), rows_of(part)
        before = moved(group)
        found = sar.explain(mine, part.graph, x)
        stack, first, second = found.rows
        assert (found.rank, found.num_ranks) == (group.rank, size)
        assert [stack.name, first.name, second.name] == ["Stack", "layers.0", "layers.1"]
        assert (first.implementation, first.why_not_fused) == ("fused", None)
        assert (second.implementation, second.why_not_fused) == (way, why)
        assert second.class_name == type(mine.layers[1]).__name__ and second.calls == 1
        assert stack.implementation == "dense" and stack.sent_bytes == 0
        assert moved(group) == before
        sar.global_mean(mine(part.graph, x).sum(1), group=group).backward()
        for i, name in enumerate(("sent_bytes", "received_bytes")):
            assert sum(getattr(row, name) for row in found.rows) == moved(group)[i] - before[i]
        assert (moved(group)[0] > before[0]) == (size > 1)

    on_ranks(size, partitioned, case)


class Sum(nn.Module):
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return graph.aggregate(x)


@pytest.mark.parametrize("zeros", ["send", "skip"])
def test_rows_are_counted_whatever_they_are_coded_as(zeros: str, partitioned: Cutter) -> None:
    """What one rank sends the others get."""

    def case(group: Group, part: Part) -> LayerRow:
        x = rows_of(part, 6).requires_grad_()
        return sar.explain(Sum(), part.graph, x).rows[0]

    ranks = on_ranks(3, partitioned, case, zeros=zeros)
    assert sum(row.sent_rows for row in ranks) == sum(row.received_rows for row in ranks) > 0
    assert sum(row.sent_bytes for row in ranks) == sum(row.received_bytes for row in ranks)
    if zeros == "send":
        assert all(row.sent_bytes == row.sent_rows * 6 * F32 for row in ranks)


def snapshot(model: nn.Module, part: Part, group: Group) -> dict[str, Any]:
    return {
        "grads": [(id(p.grad), p.grad.clone()) for p in model.parameters() if p.grad is not None],
        "state": {
            k: (id(v), v._version, v.clone()) for k, v in model.state_dict(keep_vars=True).items()
        },
        "random": torch.get_rng_state() if group.size == 1 else None,
        "seeds": group.seeds.state(),
        "flags": [m.training for m in model.modules()],
        "columns": {name: id(column) for name, column in part.graph.ndata.items()},
        "counters": copy.copy(group.counters),
        "stretches": {key: value.exchanges for key, value in group.meter.stretches.items()},
        "meter": id(group.meter),
        "hooks": [len(m._forward_hooks) for m in model.modules()],
    }


class Noisy(nn.Module):
    """Changes all that a pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = sage(), dgl.nn.GATConv(4, 2, 2, attn_drop=0.5)
        self.norm, self.drop = sar.DistributedBN1D(4), sar.nn.Dropout(0.5)
        self.local = nn.BatchNorm1d(4)
        self.local.eval()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(graph, x)), graph)
        if graph.group.size == 1:  # torch's random numbers are those of all threads
            hidden = F.dropout(hidden, 0.3)
        graph.ndata["left"] = hidden.detach()
        self.local.train()
        return self.local(self.second(graph, hidden).flatten(1))


@pytest.mark.filterwarnings("ignore::sar.errors.MistakeWarning")  # `local` is meant to be
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_changes(size: int, partitioned: Cutter) -> None:
    """Nor do later epochs: constant rows are kept in the same call, random numbers come as ever."""
    model = Noisy()

    def epochs(group: Group, part: Part, explains: bool) -> list[Any]:
        torch.manual_seed(group.rank)
        group.seeds.restart(7)
        mine, x, found = copy.deepcopy(model), rows_of(part), []
        for _ in range(4):
            if explains:
                before = snapshot(mine, part, group)
                explained = sar.explain(mine, part.graph, x)
                assert same(before, snapshot(mine, part, group))
            sent = moved(group)
            loss = sar.global_mean(mine(part.graph, x).square().sum(1), group=group)
            loss.backward()
            mine.local.eval()
            now = moved(group)
            found.append((loss.detach(), now[0] - sent[0], now[1] - sent[1]))
            if explains:
                for place, name in enumerate(("sent_bytes", "received_bytes"), start=1):
                    assert sum(getattr(row, name) for row in explained.rows) == found[-1][place]
        grads = [p.grad for p in mine.parameters()]
        random = torch.get_rng_state() if group.size == 1 else None
        return [*found, grads, dict(mine.named_buffers()), random]

    run = partial(on_ranks, size, partitioned)
    like = run(lambda group, part: epochs(group, part, False))
    got = run(lambda group, part: epochs(group, part, True))
    for rank in (*got, *like):
        rank[0] = rank[0][:1]  # the first epoch also sends what is asked for once
    assert same(got, like)
    if size > 1:
        assert like[0][3][1] < like[0][1][1]  # constant rows were kept


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "lossy_bfloat16"])
def test_what_is_saved_counts_for_its_layer(activations: str, partitioned: Cutter) -> None:
    """A layer that doubles and squares saves its own rows once, whatever else reads them."""

    class Squares(nn.Module):
        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return (2 * x).square() + (2 * x).square()

    def case(group: Group, part: Part) -> None:
        model, rows = Stack(Squares(), Squares()), len(part.nodes)
        x = torch.randn(rows, 1000, requires_grad=True)
        one = x.nbytes
        sar.set_activations(list(model.layers), activations)
        stack, first, second = (row.saved_bytes for row in sar.explain(model, part.graph, x).rows)
        want = {"keep": 2 * one, "offload": 0, "lossy_bfloat16": one, "recompute": 0}[activations]
        assert second == want
        assert first == want

    on_ranks(1, partitioned, case)


def test_blocks(partitioned: Cutter) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = sage(), sage()

        def forward(self, blocks: Any, x: Tensor) -> Tensor:
            return self.second(blocks[1], self.first(blocks[0], x))

    def case(group: Group, part: Part) -> None:
        start = part.data.node_ranges[group.rank][0]
        blocks = sar.construct_mfgs(part.data, torch.arange(start, start + 2), 2)
        model = Two()
        first, second = sar.explain(model, blocks).rows[:2]
        assert first.implementation == second.implementation == "fused"
        assert first.saved_bytes is not None and "first" in str(sar.explain(model, blocks))

    on_ranks(2, partitioned, case)


def test_without_gradients_nothing_goes_back(partitioned: Cutter) -> None:
    """Of a frozen model, also where gradients are disabled."""

    def case(group: Group, part: Part) -> None:
        model = Stack(sage()).requires_grad_(False)
        with torch.no_grad():
            row = sar.explain(model, part.graph, rows_of(part)).rows[1]
            trained = sar.explain(Stack(sage()), part.graph, rows_of(part)).rows[1]
        assert row.saved_bytes == 0 and row.sent_rows > 0
        assert trained.saved_bytes > 0 and row.implementation == trained.implementation == "fused"

    on_ranks(2, partitioned, case)


def test_the_table_and_its_plain_values(partitioned: Cutter) -> None:
    def case(group: Group, part: Part) -> None:
        found = sar.explain(Stack(sage(), sage(kind="pool")), part.graph)  # rows are made
        lines = str(found).splitlines()
        assert lines[0] == "one epoch of rank 0 of 1" and len(lines) == 2 + len(found.rows)
        at = lines[1].index("runs as")
        assert lines[3][at:].startswith("fused") and lines[4][at:].startswith("extreme")
        assert lines[4].endswith("the aggregator 'pool' has no fused form")
        again = json.loads(json.dumps(found.to_dict()))
        assert again["rank"] == 0 and again["rows"][1]["implementation"] == "fused"
        with pytest.raises(FrozenInstanceError):
            found.rows[0].calls = 2  # type: ignore[misc]

    on_ranks(1, partitioned, case)


def test_what_it_does_not_take(partitioned: Cutter) -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(3, 4), sage()

    def case(group: Group, part: Part) -> None:
        with pytest.raises(TypeError, match="model: got str, expected a torch.nn.Module"):
            sar.explain("model", part.graph)  # type: ignore[arg-type]
        for graph, got in ((torch.ones(2), "Tensor"), ([part.graph, 1], "int"), ([], "an empty")):
            with pytest.raises(TypeError, match=f"graph: got {got}"):
                sar.explain(sage(), graph)
        for model in (Unknown(), Udf()):
            with pytest.raises(ValueError, match="inputs: got none.*pass its inputs"):
                sar.explain(model, part.graph)

    on_ranks(1, partitioned, case)


@pytest.mark.filterwarnings("ignore::sar.errors.MistakeWarning")  # `local` is meant to be
def test_an_error_of_the_model_leaves_nothing_behind(partitioned: Cutter) -> None:
    class Fails(Noisy):
        def forward(self, graph: Any, x: Tensor) -> Tensor:
            super().forward(graph, x)
            raise RuntimeError("no")

    def case(group: Group, part: Part) -> None:
        group.seeds.restart(7)
        model = Fails()
        before = snapshot(model, part, group)
        with pytest.raises(RuntimeError, match="no"):
            sar.explain(model, part.graph, rows_of(part))
        assert same(before, snapshot(model, part, group))

    on_ranks(2, partitioned, case)


def test_the_trainer_says_it_once(partitioned: Cutter, caplog: pytest.LogCaptureFixture) -> None:
    path = partitioned(looped(), 2)

    def case(group: Group) -> None:
        part = sar.load_partition_data(path, group.rank)
        data = load_node_data(part, DataOptions("feat", "label"), group=group)
        graph = sar.construct_full_graph(part)
        model = Stack(sage(NUM_FEATURES), sage(), sage(kind="pool"))
        Trainer(model, graph, data, TrainOptions(epochs=3, progress=False), group=group).fit()
        assert group.meter.notes is None

    with caplog.at_level(logging.INFO, logger="sar"):
        run_threads(2, case)
    prepared, *told = [record.message for record in caplog.records]
    assert prepared.startswith("Stack on 2 ranks: ")
    assert told == [
        "SAGEConv x 2: fused",
        "SAGEConv x 1: extreme, not fused: the aggregator 'pool' has no fused form "
        "(sar.explain shows more)",
    ]


def test_the_command_prints_it(
    tmp_path: Path, partitioned: Cutter, capfd: pytest.CaptureFixture[str]
) -> None:
    """And trains on as if it had not been asked."""
    path, runs = partitioned(looped(), 2, "random"), []
    for extra in ([], ["--explain"]):
        out = tmp_path / f"run{len(extra)}.json"
        words = ["--layers", "2", "--hidden", "8", "--epochs", "2", "--dropout", "0.5"]
        words += ["--no-progress", "--mfgs", "off", "--json", str(out)]
        on_threads(2, "train", path, *words, *extra)
        shown, run = capfd.readouterr().out, json.loads(out.read_text())
        assert ("one epoch of rank 0 of 2" in shown) == bool(extra)
        runs.append([epoch["loss"] for epoch in run["epochs"]])
    assert runs[0] == runs[1]
