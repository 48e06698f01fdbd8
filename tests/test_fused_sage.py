"""GraphSAGE's layer of means as one function: DGL's numbers, kept or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.blocks import compare_blocks
from harness.covering import by_pairs
from harness.graphs import mixed
from harness.late import run_late
from harness.parts import Cutter
from harness.rows import Part, results, whole
from harness.sage import SIZE, WIDTH, Then, compare, fused_ones, sage
from torch import nn
from torch.nn import functional as F

import sar
from sar.comm import Group
from sar.layers.sage_columns import BLOCK


class Empty(dgl.nn.SAGEConv):
    """A subclass without code of its own."""


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "wide": lambda: sage(7),
    "narrow": lambda: sage(2),  # multiplied before it is summed
    "no bias": lambda: sage(bias=False),
    "narrow without bias": lambda: sage(2, bias=False),
    "tanh": lambda: sage(activation=torch.tanh),
    "relu": lambda: sage(activation=F.relu),
    "a module": lambda: sage(activation=nn.ReLU()),
    "elu and norm": lambda: sage(activation=F.elu, norm=nn.LayerNorm(WIDTH)),
    "two": lambda: Then(sage(activation=F.relu), sage(3)),
    "relu behind": lambda: Then(sage(), F.relu, sage()),
    "twice the same rows": lambda: Then(sage(), lambda x: x + x.sin(), sage(2)),
    "an empty subclass": lambda: Empty(WIDTH, WIDTH, "mean"),
    "a zero dropout": lambda: sage(feat_drop=0.0),
}


@pytest.mark.parametrize("rounds", [1, SIZE - 1])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_dgl(name: str, rounds: int, partitioned: Cutter) -> None:
    """With rows that arrive at the last moment."""
    compare(fused_ones(LAYERS[name]()), partitioned, run=run_late, rounds=rounds)


POLICIES: list[dict[str, Any]] = [
    {"memory_budget": "1MiB"}, {"exchange": "pull"}, {"structure": "one"}, {"zeros": "skip"},
    {"constant_inputs": "off"},
]  # fmt: skip


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: dict[str, Any], donate: bool, partitioned: Cutter) -> None:
    compare(fused_ones(LAYERS["two"](), donate=donate), partitioned, **policy)


@pytest.mark.parametrize("width", [2, WIDTH])
@pytest.mark.parametrize("frozen", ["fc_self", "fc_neigh", "all"])
def test_frozen_parts(frozen: str, width: int, partitioned: Cutter) -> None:
    layer = sage(width)
    (layer if frozen == "all" else getattr(layer, frozen)).requires_grad_(False)
    compare(fused_ones(layer), partitioned)


# With 50, some ranks have nothing to compute.
@by_pairs(
    size=[1, SIZE],
    widths=[(WIDTH, 3), (7, 2), (2, 5)],
    every=[4, 50],
    activations=["keep", "recompute"],
)
def test_blocks_give_some_rows_of_the_whole_graphs(
    size: int, widths: tuple[int, int], every: int, activations: str, partitioned: Cutter
) -> None:
    first = fused_ones(sage(widths[0], activation=F.relu), donate=True)
    second = fused_ones(sage(widths[1], widths[0]))
    for layer in (first, second):
        sar.set_activations(layer, activations)
    compare_blocks([first, second], WIDTH, every, size, partitioned)


# -- recomputed: a few columns at a time --------------------------------------------------------


def recomputed(rank: int, layer: nn.Module) -> None:
    sar.set_activations(layer, "recompute")


@by_pairs(
    size=[1, 2, 5],
    widths=[(1, 3), (BLOCK, BLOCK), (BLOCK + 1, 70), (100, 100), (70, 5)],
    donate=[False, True],
)
def test_recomputed_layers_equal_dgl(
    size: int, widths: tuple[int, int], donate: bool, partitioned: Cutter
) -> None:
    layer, method = fused_ones(sage(widths[1], widths[0]), donate=donate), "random"
    method = "adversarial" if size == 5 else "random"
    compare(layer, partitioned, size, method=method, width=widths[0], on_rank=recomputed)


def wide(**options: Any) -> nn.Module:
    return sage(40, 40, **options)


RECOMPUTED: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: wide(bias=False),
    "activation": lambda: wide(activation=F.relu),
    "activation and norm": lambda: wide(activation=torch.tanh, norm=nn.LayerNorm(40)),
    "relu": lambda: Then(wide(), F.relu),
    "value needed": lambda: Then(wide(), torch.exp, torch.tanh),
    "relu, value needed": lambda: Then(wide(activation=F.relu), torch.exp),
    "twice relu": lambda: Then(wide(), F.relu, lambda x: F.relu(x) + F.relu(-x)),
    "residual": lambda: Then(wide(), lambda x: F.relu(x) + x),
    "relu of columns": lambda: Then(wide(), lambda x: F.relu(x.t()).t()),
    "relu in place": lambda: Then(wide(), nn.ReLU(inplace=True)),
    "relu in place, value needed": lambda: Then(wide(), F.relu_, torch.exp),
    "relu in place of columns": lambda: Then(wide(), lambda x: F.relu_(x.t() * 1).t()),
    "elu": lambda: Then(wide(), F.elu),
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_what_surrounds_a_recomputed_layer(kind: str, partitioned: Cutter) -> None:
    torch.manual_seed(0)
    compare(fused_ones(RECOMPUTED[kind]()), partitioned, width=40, on_rank=recomputed)


@pytest.mark.parametrize("policy", [{"rounds": 1}, *POLICIES])
def test_policies_of_recomputed_layers(policy: dict[str, Any], partitioned: Cutter) -> None:
    compare(fused_ones(wide()), partitioned, width=40, on_rank=recomputed, **policy)


def test_means_travel_once_in_each_pass(partitioned: Cutter) -> None:
    """Columns cost no bytes, also where the value is computed again: the means are kept then."""

    def case(group: Group, is_plain: bool) -> list[int]:
        part, sent = Part(group, path), []
        for layer in (sage(70, 70), Then(sage(70, 70), torch.exp, torch.tanh)):
            for conv in layer.modules() if is_plain else ():
                conv.register_forward_hook(lambda part, args, out: None)
            sar.set_activations(layer.double(), "recompute")
            results(part.graph, layer, rows[part.nodes], rows[part.nodes])
            start = group.counters.sent_bytes
            results(part.graph, layer, rows[part.nodes], rows[part.nodes])
            sent.append(group.counters.sent_bytes - start)
        return sent

    path, rows = partitioned(mixed(), 3), whole(mixed().total_nodes, (70,), seed=1)
    assert run_threads(3, case, False) == run_threads(3, case, True)
