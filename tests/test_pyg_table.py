"""The table of PyG's classes in the docs: complete, and what it says of each holds.

What a row calls exact is among the cases that are compared with one process, here or in the files
of layers, aggregations, norms, models and types.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import test_pyg_aggregations
import test_pyg_hetero
import test_pyg_model_table
import test_pyg_norms
import test_pyg_training
import torch
import torch_geometric
from harness import pyg, run_threads
from harness.graphs import mixed, shop
from harness.parts import Cutter
from pyg_convs import CONVS
from torch import Tensor, nn
from torch_geometric import nn as of_pyg
from torch_geometric.utils import scatter

import sar
import sar.pyg
from sar.frontends.pyg.undistributed import UNDISTRIBUTED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "pyg.md"
KINDS = "exact|prepared|no graph|raises|not tried"
ROWS = {
    name: (kind, text)
    for name, kind, text in re.findall(
        rf"^\| `(\w+)` \| ({KINDS}) \| (.*) \|$", PAGE.read_text(), re.M
    )
}
WIDTH = 6
Make, Call = Callable[[], nn.Module], Callable[[Any, Tensor, Any, dict], Tensor]


def at_destinations(values: Tensor, x: Tensor, edges: Any) -> Tensor:
    return scatter(values, edges[1], 0, len(x))


def gcn() -> nn.Module:
    return of_pyg.GCNConv(WIDTH, 4)


EXACT: dict[str, tuple[Make, Call]] = {  # beside those of models
    "VGAE": (
        lambda: of_pyg.VGAE(of_pyg.Sequential("x, e", [
            (gcn(), "x, e -> z"), (lambda z: (z, 0 * z), "z -> z")
        ])).eval(),
        lambda m, x, e, c: m.encode(x, e),
    ),
    "EdgeCNN": (lambda: of_pyg.EdgeCNN(WIDTH, 8, 2, 4), lambda m, x, e, c: m(x, e)),
}  # fmt: skip
if hasattr(of_pyg, "ARLinkPredictor"):  # not before 2.8
    EXACT["ARLinkPredictor"] = (
        lambda: of_pyg.ARLinkPredictor(WIDTH, 8),
        lambda m, x, e, c: at_destinations(m(x, e), x, e),
    )


def parts_of(models: Any) -> set[str]:
    return {
        kind.__name__ for one in models for part in one.modules() for kind in type(part).__mro__
    }


def compared() -> set[str]:
    """Names of all classes in models that are compared with one process."""
    metadata = list(shop().num_nodes), list(shop().edges)
    typed = [make(metadata) for make, *_ in (one.values for one in test_pyg_hetero.MODELS)]
    tables = [
        test_pyg_aggregations.TABLE, test_pyg_norms.NORMS, test_pyg_norms.MODELS,
        test_pyg_norms.POOLS, test_pyg_training.TRAINED,
    ]  # fmt: skip
    made = [make() for table in tables for make in table.values()]
    pairs = [*CONVS.values(), *test_pyg_model_table.EXACT.values(), *EXACT.values()]
    made += [make() for make, _ in pairs]
    return parts_of([*made, *typed])


ELSEWHERE = {  # an old name, a base, a norm by types, what this version of PyG has no functions for
    "GlobalAttention", "ARGVA", "HeteroBatchNorm", "Aggregation", "SplineConv",
}  # fmt: skip
REASONS = {path: text for table in UNDISTRIBUTED.values() for path, text in table.items()}


def of_kind(kind: str) -> set[str]:
    """Names of classes that this version has."""
    return {name for name, row in ROWS.items() if row[0] == kind and hasattr(of_pyg, name)}


def test_every_class_has_a_row() -> None:
    classes = {name for name, _ in inspect.getmembers(of_pyg, inspect.isclass)}
    assert not classes - set(ROWS)
    if torch_geometric.__version__.startswith("2.8"):
        assert not set(ROWS) - classes


def test_what_is_exact_is_compared_with_one_process() -> None:
    assert of_kind("exact") | of_kind("prepared") <= compared() | ELSEWHERE


@pytest.mark.parametrize("name", EXACT)
def test_models_are_exact(name: str, partitioned: Cutter) -> None:
    torch.manual_seed(0)
    make, call = EXACT[name]
    model, x = make().double(), torch.randn(57, WIDTH, dtype=torch.float64)
    want = pyg.whole(mixed(), model, call, x, {})
    for parts, cut in ((2, "random"), (4, "adversarial")):
        got = pyg.sharded(partitioned(mixed(), parts, cut), parts, model, call, x, {})
        pyg.compare(want, got, 1e-9)


KIND = torch.arange(8) % 2
BY_ROW: dict[str, Callable[[], tuple[nn.Module, tuple]]] = {
    "Linear": lambda: (of_pyg.Linear(WIDTH, 4), ("x",)),
    "MLP": lambda: (of_pyg.MLP([WIDTH, 8, 4], norm=None), ("x",)),
    "HeteroLinear": lambda: (of_pyg.HeteroLinear(WIDTH, 4, 2), ("x", "kind")),
    "HeteroLayerNorm": lambda: (of_pyg.HeteroLayerNorm(WIDTH, 2), ("x", "kind")),
    "MessageNorm": lambda: (of_pyg.MessageNorm(learn_scale=True), ("x", "x")),
    "MaskLabel": lambda: (of_pyg.MaskLabel(2, WIDTH), ("x", "kind", "mask")),
    "JumpingKnowledge": lambda: (of_pyg.JumpingKnowledge("lstm", WIDTH, 2), ("rows",)),
    "PositionalEncoding": lambda: (of_pyg.PositionalEncoding(4), ("time",)),
    "TemporalEncoding": lambda: (of_pyg.TemporalEncoding(4), ("time",)),
    "Reshape": lambda: (of_pyg.Reshape(-1, 2, 3), ("x",)),
    "TransE": lambda: (of_pyg.TransE(2, 2, 4), ("kind", "kind", "kind")),
    "ComplEx": lambda: (of_pyg.ComplEx(2, 2, 4), ("kind", "kind", "kind")),
    "DistMult": lambda: (of_pyg.DistMult(2, 2, 4), ("kind", "kind", "kind")),
    "RotatE": lambda: (of_pyg.RotatE(2, 2, 4), ("kind", "kind", "kind")),
}
OF_DICTS = {"HeteroDictLinear", "HeteroJumpingKnowledge", "KGEModel"}  # of those above


def test_what_needs_no_graph_works_row_by_row() -> None:
    assert of_kind("no graph") <= {*BY_ROW, *OF_DICTS} <= set(ROWS)
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    for name, make in BY_ROW.items():
        module, names = make()
        rows = {"x": x, "time": x[:, 0], "kind": KIND, "mask": KIND == 0}
        given = {**rows, "rows": [x, x.sin()]}
        half = {n: v[::3] for n, v in rows.items()} | {"rows": [v[::3] for v in given["rows"]]}
        whole, some = (module(*(table[n] for n in names)) for table in (given, half))
        torch.testing.assert_close(some, whole[::3], msg=name)


def refused_call(kind: Any, method: str, data: Any) -> Any:
    return getattr(kind, method)(nn.Module(), data.x, data.edge_index)


def refused() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The row's name, and a call with a rank's data."""
    for module, reasons in UNDISTRIBUTED.items():
        for path in reasons:
            name, _, method = path.partition(".")
            kind = getattr(import_module(module), name, None)
            if kind is not None and not name.startswith("CuGraph"):
                call = partial(refused_call, kind, method or "forward")
                yield path, call
    for name in ("GCN", "GIN", "Graph", "SAGE", "GAT"):
        layer = f"Dense{name}Conv"
        arguments = [nn.Linear(WIDTH, 4)] if name == "GIN" else [WIDTH, 4]
        make = getattr(of_pyg, layer)
        yield layer, lambda d, make=make, given=arguments: make(*given)(d.x, d.edge_index)
    yield "DMoNPooling", lambda d: of_pyg.DMoNPooling(WIDTH, 3)(d.x, d.edge_index)
    yield (
        "MetaPath2Vec",
        lambda d: of_pyg.MetaPath2Vec(
            {("a", "to", "a"): d.edge_index}, 4, [("a", "to", "a")], 1, 1
        ),
    )
    yield (
        "EquilibriumAggregation",
        lambda d: of_pyg.EquilibriumAggregation(WIDTH, 5, [8])(
            d.x[d.edge_index[0]], d.edge_index[1]
        ),
    )
    if torch_geometric.typing.WITH_PYG_LIB:
        yield "Node2Vec", lambda d: of_pyg.Node2Vec(d.edge_index, 4, 4, 2)


def test_what_is_refused_says_why(partitioned: Cutter) -> None:
    """On every rank; with the text of the row, where a table of the library's has it."""
    cases = dict(refused())
    names = {path.partition(".")[0] for path in cases} | {"Node2Vec"}
    cu_graph = {name for name in REASONS if name.startswith("CuGraph")}
    assert of_kind("raises") <= names | cu_graph
    for path, reason in REASONS.items():
        kind, text = ROWS[path.partition(".")[0]]
        assert text == reason if kind == "raises" else path.partition(".")[2] in text

    def run(group: Any) -> dict[str, str]:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        told = {}
        for name, call in cases.items():
            with pytest.raises(sar.NotSupportedError) as caught:
                call(data)
            told[name] = str(caught.value)
        return told

    path = partitioned(mixed(), 2, "random")
    for told in run_threads(2, run):
        for path, reason in REASONS.items():
            assert path not in told or told[path].endswith(f"cannot be distributed: it {reason}")
