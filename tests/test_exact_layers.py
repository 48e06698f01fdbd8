"""Every layer equals DGL on the whole graph: logits, loss, all gradients, three optimizer steps.

The usual run covers pairs of values of the dimensions below; ``--full-matrix`` runs the whole
product. Each model makes the steps in one row; others compare logits, loss and gradients.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from harness import WorkerPool, models, run_threads
from harness.covering import pairs
from harness.late import run_late
from harness.parts import Cutter
from harness.training import Setting, case_train, check, start_state

pytestmark = pytest.mark.filterwarnings("ignore:reduce function")
MODELS = [*models.layers(), *models.HETERO]
SIZES = [1, 2, 3, 4, 8]
CUTS = ["coarsen", "random"]
ROUNDS = [1, 2, None]  # None is strict: P - 1
MFGS = [False, True]
REMATERIALIZE = [True, False]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
REST = [CUTS, ROUNDS, MFGS, REMATERIALIZE, DTYPES]
Row = tuple  # (model, size, cut, rounds, mfgs, rematerialize, dtype)


def possible(row: Row) -> bool:
    model, size, _, rounds, mfgs, _, dtype = row
    if dtype == torch.bfloat16 and not models.runs_in_bfloat16(model):
        return False
    if mfgs and not models.runs_on_blocks(model):
        return False
    return rounds is None or rounds < max(2, size - 1)  # as many as strict is strict


def product() -> Iterator[Row]:
    return filter(possible, itertools.product(MODELS, SIZES, *REST))


def usual(row: Row) -> bool:
    """Three ranks are for every other model, four for the others, eight for every third."""
    number = MODELS.index(row[0])
    return {3: number % 2 == 0, 4: number % 2 == 1, 8: number % 3 == 0}.get(row[1], True)


@cache
def covering() -> list[Row]:
    """Rows that hold every pair of values: per model and size the one with the most new pairs."""
    missing = set().union(*(pairs(row) for row in product() if usual(row)))
    shuffled, chosen = random.Random(0), []  # rows that are equally good differ from case to case
    for head in filter(usual, itertools.product(MODELS, SIZES)):
        rows = [(*head, *rest) for rest in itertools.product(*REST)]
        shuffled.shuffle(rows)
        best = max(filter(possible, rows), key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    for row in filter(usual, product()):
        if pairs(row) & missing:
            chosen.append(row)
            missing -= pairs(row)
    return chosen


@cache
def stepping() -> dict[str, Row]:
    """Of each model the row with the most ranks up to four, whose sums differ by their order."""
    rows = [row for row in covering() if row[1] <= 4 and row[-1] != torch.bfloat16]
    return {row[0]: row for row in sorted(rows, key=lambda row: row[1])}


def name(row: Row) -> str:
    model, size, cut, rounds, mfgs, rematerialize, dtype = row
    words = [model, f"P{size}", cut, f"rounds{rounds or 'P-1'}", "mfgs" if mfgs else "full"]
    words += ["rematerialize" if rematerialize else "keep", str(dtype).removeprefix("torch.")]
    return "-".join(words)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        everything = metafunc.config.getoption("full_matrix")
        metafunc.parametrize("row", list(product()) if everything else covering(), ids=name)


def to_setting(row: Row) -> Setting:
    model, _, _, rounds, mfgs, rematerialize, dtype = row
    exact = "adam" if models.comparable_with_adam(model) else "sgd"
    optimizers = {torch.float64: (exact,), torch.float32: ("sgd",), torch.bfloat16: ()}
    steps = optimizers[dtype] if row == stepping()[model] else ()
    return Setting(model, rounds, mfgs, rematerialize, dtype, steps)


def test_layer_equals_dgl(row: Row, partitioned: Cutter) -> None:
    setting, size = to_setting(row), row[1]
    path = partitioned(setting.sample, size, row[2])
    state = start_state(setting)
    with models.default_dtype(setting.model, setting.dtype):
        ranks = run_threads(size, case_train, path, setting, state)
    check(setting, ranks)


@pytest.mark.parametrize("method", ["contiguous", "adversarial", "balanced", "hotness"])
@pytest.mark.parametrize(
    "model", ["GraphConv-both", "SAGEConv-pool", "RelGraphConv-basis", "HeteroGraphConv-sum"]
)
def test_other_cuts(model: str, method: str, partitioned: Cutter) -> None:
    """Consecutive ids, parts of one node and of none, and parts alike in edges, halo or use."""
    for mfgs in (False, True):
        setting = Setting(model, mfgs=mfgs)
        path = partitioned(setting.sample, 4, method)
        check(setting, run_threads(4, case_train, path, setting, start_state(setting)))


@pytest.mark.parametrize(
    ("model", "size", "rounds", "mfgs"),
    [
        ("GraphConv-both", 4, None, False),
        ("SAGEConv-mean", 4, 2, True),
        ("SAGEConv-pool", 3, None, False),
        ("GatedGraphConv-3", 2, None, False),
        ("EdgeConv-norm", 3, 1, True),
        ("RelGraphConv-basis", 4, 1, False),
        ("HeteroGraphConv-sum", 4, None, True),
        ("SAGEConv-lstm", 4, None, True),
        ("PNAConv-edges", 3, 1, False),
    ],
)
def test_layer_equals_dgl_over_processes(
    model: str,
    size: int,
    rounds: int | None,
    mfgs: bool,
    partitioned: Cutter,
    processes: WorkerPool,
) -> None:
    setting = Setting(model, rounds, mfgs, optimizers=("sgd",))
    path = partitioned(setting.sample, size, "random")
    check(setting, processes.run(size, case_train, path, setting, start_state(setting)))


@pytest.mark.parametrize("rematerialize", [True, False])
@pytest.mark.parametrize(
    "model",
    ["SAGEConv-mean", "SAGEConv-pool", "GINConv-max", "RelGraphConv-basis", "GatedGraphConv-3",
     "EdgeConv-norm", "HeteroGraphConv-sum", "mailbox-weighted"],
)  # fmt: skip
def test_no_buffer_is_used_too_early(model: str, rematerialize: bool, partitioned: Cutter) -> None:
    for rounds, mfgs in ((None, False), (2, models.runs_on_blocks(model))):
        setting = Setting(model, rounds, mfgs, rematerialize)
        path = partitioned(setting.sample, 4, "random")
        check(setting, run_late(4, case_train, path, setting, start_state(setting)))
