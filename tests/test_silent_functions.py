"""Message and reduce functions whose rows depend on the chunk: told; right ones are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.function as fn
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.graphs import NUM_FEATURES, mixed
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.comm import Group

WHAT = "depends on which edges are computed together"
STATE = "gives other values when it is called again"


class Counting:
    """Python state that its calls change."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, edges: Any) -> dict[str, Tensor]:
        self.calls += 1
        return {"m": edges.src["h"] * self.calls}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)

    def forward(self, edges: Any) -> dict[str, Tensor]:
        return {"m": self.norm(edges.src["h"])}


def cached() -> Callable[[Any], Any]:
    """What a function keeps from its first call it may use in later ones."""
    kept: dict[str, Tensor] = {}

    def scaled(edges: Any) -> dict[str, Tensor]:
        if "scale" not in kept:
            kept["scale"] = torch.full((1,), 2.0)
        return {"m": edges.src["h"] * kept["scale"]}

    return scaled


def in_place(edges: Any) -> dict[str, Tensor]:
    edges.src["h"].mul_(2)
    return {"m": edges.src["h"] + edges.dst["h"]}


WRONG = {
    "batch_size": (lambda edges: {"m": edges.src["h"] / edges.batch_size()}, WHAT),
    "length": (lambda edges: {"m": edges.src["h"] * len(edges)}, WHAT),
    "mean": (lambda edges: {"m": edges.src["h"] - edges.src["h"].mean(0)}, WHAT),
    "softmax": (lambda edges: {"m": edges.src["h"].softmax(0)}, WHAT),
    "first row": (lambda edges: {"m": edges.src["h"] - edges.src["h"][:1]}, WHAT),
    "batch norm": (Normed(), WHAT),
    "position": (
        lambda edges: {"m": edges.src["h"] * torch.arange(edges.batch_size()).view(-1, 1)}, WHAT
    ),
    "of several": (lambda edges: {"m": edges.src["h"], "n": edges.dst["h"].cumsum(0)}, WHAT),
    "state": (Counting(), STATE),
}  # fmt: skip

RIGHT = {
    "plain": lambda edges: {"m": edges.src["h"] * edges.dst["h"]},
    "in place": in_place,
    "nan": lambda edges: {"m": edges.src["h"] * torch.nan},
    "dropout": lambda edges: {"m": F.dropout(edges.src["h"], 0.5)},
    "noise": lambda edges: {"m": edges.src["h"] + torch.rand_like(edges.src["h"])},
    "one number": lambda edges: {"m": edges.src["h"] * torch.rand(())},
    "softmax of a row": lambda edges: {"m": edges.src["h"].softmax(1)},
    "integers": lambda edges: {"m": edges.src["h"] * edges.data["_ID"].view(-1, 1)},
    "halves": lambda edges: {"m": (edges.src["h"].bfloat16() @ WEIGHT.bfloat16()).float()},
    "matrix": lambda edges: {"m": (edges.src["h"] @ WEIGHT).exp() @ WEIGHT},
    "norm in evaluation": Normed().eval(),
    "out of range": lambda edges: {"m": WEIGHT[(edges.src["small"] * 99).long()]},
    "cached": cached(),
}
WEIGHT = torch.rand(NUM_FEATURES, NUM_FEATURES, generator=torch.Generator().manual_seed(0))


def passing(group: Group, path: str, name: str, table: str) -> list[str]:
    """How often, and where, the function is refused."""
    func = {"wrong": WRONG, "right": RIGHT}[table][name]
    function = func[0] if table == "wrong" else func
    data = sar.load_partition_data(path)
    graph, words = sar.construct_full_graph(data), []
    graph.ndata["h"] = data.node_features["_N/feat"]
    graph.ndata["small"] = torch.zeros(graph.num_nodes())
    some = torch.arange(min(3, graph.num_edges()))
    for call in (
        lambda: graph.update_all(function, fn.sum("m", "out")),
        lambda: graph.apply_edges(function),
        lambda: graph.apply_edges(function, some),
    ):
        try:
            call()
        except sar.NotSupportedError as error:
            words.append(str(error))
    return words


@pytest.fixture
def path(partitioned: Cutter) -> str:
    return partitioned(mixed(), 2, "random")


@pytest.mark.parametrize("name", WRONG)
def test_messages_that_depend_on_the_chunk(name: str, path: str) -> None:
    function, what = WRONG[name]
    found = run_threads(2, passing, path, name, "wrong")
    for words in found:
        assert len(words) == 3, words
        assert all(what in one for one in words), words
        called = getattr(function, "__qualname__", type(function).__name__)
        assert all(one.startswith(f"message function {called}: ") for one in words), words


@pytest.mark.parametrize("name", RIGHT)
def test_right_messages_are_left_alone(name: str, path: str) -> None:
    assert run_threads(2, passing, path, name, "right") == [[], []]


BOXES = {
    "batch_size": (lambda nodes: {"o": nodes.mailbox["m"].sum(1) / nodes.batch_size()}, True),
    "mean": (lambda nodes: {"o": nodes.mailbox["m"].mean((0, 1)) + nodes.data["h"]}, True),
    "of its own": (lambda nodes: {"o": nodes.mailbox["m"].mean(1) + nodes.data["h"]}, False),
    "sorted": (lambda nodes: {"o": nodes.mailbox["m"].sort(1)[0][:, -1]}, False),
    "dropout": (lambda nodes: {"o": F.dropout(nodes.mailbox["m"].sum(1), 0.5)}, False),
    "noise": (lambda nodes: {"o": torch.rand_like(nodes.data["h"])}, False),
}


@pytest.mark.filterwarnings("ignore:reduce function")
@pytest.mark.parametrize("name", BOXES)
def test_reduce_functions(name: str, path: str) -> None:
    function, is_wrong = BOXES[name]

    def case(group: Group) -> None:
        data = sar.load_partition_data(path)
        graph = sar.construct_full_graph(data)
        graph.ndata["h"] = data.node_features["_N/feat"]
        if not is_wrong:
            graph.update_all(fn.copy_u("h", "m"), function)
            return
        words = "reduce function .*<lambda>: .*which nodes are computed together"
        with pytest.raises(sar.NotSupportedError, match=words):
            graph.update_all(fn.copy_u("h", "m"), function)

    run_threads(2, case)


@pytest.mark.parametrize("is_wrong", [True, False])
def test_scorers(is_wrong: bool, path: str) -> None:
    class Scorer(nn.Module):
        def forward(self, src: Tensor, dst: Tensor, types: Any) -> Tensor:
            scores = (src * dst).sum(1)
            return scores - scores.mean() if is_wrong else scores

    def case(group: Group) -> None:
        data = sar.load_partition_data(path)
        graph, h = sar.construct_full_graph(data), data.node_features["_N/feat"]
        if not is_wrong:
            sar.nn.score_edges(graph, Scorer(), h)
            return
        with pytest.raises(sar.NotSupportedError, match="scorer Scorer: .*computed together"):
            sar.nn.score_edges(graph, Scorer(), h)

    run_threads(2, case)
