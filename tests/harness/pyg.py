"""PyG's layers on the whole graph in one process, and on the rows of ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.parts import joined
from harness.threads import run_threads
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

Case = Callable[[Any, Tensor, Any, dict[str, Tensor]], Tensor]  # (layer, x, edge_index, columns)


def whole(
    graph: GraphArrays, layer: Any, case: Case, x: Tensor, columns: dict[str, Tensor]
) -> dict:
    """Results of a layer of PyG's on the whole graph, by name; ``case`` gets ``batch``, too."""
    layer = copy.deepcopy(layer)
    x = x.clone().requires_grad_()
    columns = {name: asking(values) for name, values in columns.items()}
    batch = torch.zeros(len(x), dtype=torch.int64)
    out = case(layer, x, torch.stack(graph.edges[ETYPE_HOMO]), {**columns, "batch": batch})
    (out * probe(out.shape, torch.arange(len(out)))).sum().backward()
    return _found(layer, out, x, columns)


def sharded(
    path: str, parts: int, layer: Any, case: Case, x: Tensor, columns: dict[str, Tensor],
    policy: Any = None,
) -> dict:  # fmt: skip
    """The same of ranks that are threads, joined in the order of the original ids."""

    def run(group: Any) -> Any:
        import sar
        from sar.frontends.pyg.data import construct_full_graph

        data = sar.load_partition_data(path)
        nids = data.node_features[f"{NTYPE_HOMO}/orig_id"].long()
        eids = data.edge_features[":".join(ETYPE_HOMO) + "/orig_eid"].long()
        shown = construct_full_graph(data, policy)
        index = shown.edge_index
        mine = copy.deepcopy(layer)
        rows = x[nids].clone().requires_grad_()
        stored = {name: asking(values[eids]) for name, values in columns.items()}
        lazy = {name: index.graph.edge_columns(v, name) for name, v in stored.items()}
        out = case(mine, rows, index, {**lazy, "batch": shown.batch})
        (out * probe(out.shape, nids)).sum().backward()
        return nids, eids, _found(mine, out, rows, stored)

    ranks = run_threads(parts, run)
    nids, eids = [r[0] for r in ranks], [r[1] for r in ranks]
    found = {}
    for name in ranks[0][2]:
        pieces = [r[2][name] for r in ranks]
        if name.startswith("parameter"):
            some = [one for one in pieces if one is not None]
            found[name] = sum(some) if some else None
        elif pieces[0] is None:
            found[name] = None
        else:
            ids = eids if name.startswith("column") else nids
            found[name] = joined(pieces, ids, sum(map(len, ids)))
    return found


def compare(expected: dict, got: dict, tolerance: float) -> float:
    """The largest difference, in units of the largest number of each; raises where it is more."""
    worst, names = 0.0, []
    for name, value in expected.items():
        other = got[name]
        if value is None or other is None:
            zero = value if other is None else other
            assert zero is None or not zero.abs().max() > tolerance, f"{name}: one is None"
            continue
        if value.numel() == 0:
            continue
        scale = max(1.0, float(value.abs().max()))
        error = float((value - other).abs().max()) / scale
        names.append((name, error))
        worst = max(worst, error if error == error else float("inf"))
    assert worst <= tolerance, names
    return worst


def asking(values: Tensor) -> Tensor:
    return values.clone().requires_grad_() if values.is_floating_point() else values


def probe(shape: Any, ids: Tensor) -> Tensor:
    flat = torch.arange(1, 1 + int(torch.Size(shape[1:]).numel()), dtype=torch.float64)
    rows = torch.sin((ids.double() + 1).unsqueeze(1) * 0.7 + flat * 1.3)
    return rows.view(len(ids), *shape[1:])


def _found(layer: Any, out: Tensor, x: Tensor, columns: dict[str, Tensor]) -> dict:
    found = {"output": out.detach(), "input": x.grad}
    for name, values in columns.items():
        if values.is_floating_point():
            found[f"column {name}"] = values.grad
    for name, parameter in layer.named_parameters():
        found[f"parameter {name}"] = parameter.grad
    return found
