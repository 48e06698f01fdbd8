"""PyG's models of several types on the whole graph in one process, and on ranks as threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.parts import joined
from harness.pyg import asking, probe
from harness.threads import run_threads
from sar.partition.arrays import GraphArrays

Case = Callable[[Any, dict, dict, dict], dict]  # (model, x_dict, edge_index_dict, weight_dict)


def inputs(graph: GraphArrays, dtype: torch.dtype = torch.float64) -> tuple[dict, dict, dict]:
    """Rows of nodes [n, 6] by type, and edge indices [2, e] and weights [e] by relation."""
    rows = {ntype: data["feat"].to(dtype) for ntype, data in graph.node_data.items()}
    edges = {etype: torch.stack(ends) for etype, ends in graph.edges.items()}
    return rows, edges, {e: data["weight"].to(dtype) for e, data in graph.edge_data.items()}


def whole(graph: GraphArrays, model: Any, case: Case, dtype: torch.dtype = torch.float64) -> dict:
    """Results of a model on the whole graph, by name."""
    model = copy.deepcopy(model)
    rows, edges, weights = inputs(graph, dtype)
    rows, weights = ({k: asking(v) for k, v in part.items()} for part in (rows, weights))
    out = case(model, rows, edges, weights)
    _sum(out, {ntype: torch.arange(count) for ntype, count in graph.num_nodes.items()}).backward()
    return _found(model, out, rows, weights)


def sharded(
    path: str, parts: int, graph: GraphArrays, model: Any, case: Case, policy: Any = None,
    dtype: torch.dtype = torch.float64,
) -> dict:  # fmt: skip
    """The same of ranks that are threads, joined in the order of the original ids."""
    all_rows, _, all_weights = inputs(graph, dtype)

    def run(group: Any) -> Any:
        import sar
        import sar.pyg

        part = sar.load_partition_data(path)
        data = sar.pyg.construct_full_graph(part, policy)
        edges = {etype: data[etype].edge_index for etype in data.edge_types}
        nids = {n: part.node_features[f"{n}/orig_id"].long() for n in all_rows}
        eids = {e: part.edge_features[":".join(e) + "/orig_eid"].long() for e in all_weights}
        mine = copy.deepcopy(model)
        rows = {ntype: asking(all_rows[ntype][ids]) for ntype, ids in nids.items()}
        weights = {etype: asking(all_weights[etype][ids]) for etype, ids in eids.items()}
        lazy = {e: edges[e].graph.edge_columns(values, "weight") for e, values in weights.items()}
        out = case(mine, rows, edges, lazy)
        _sum(out, nids).backward()
        return {"nodes": nids, "edges": eids}, _found(mine, out, rows, weights)

    ranks = run_threads(parts, run)
    found = {}
    for name in ranks[0][1]:
        pieces = [r[1][name] for r in ranks]
        some = [one for one in pieces if one is not None]
        if name[0] == "parameter":
            found[name] = sum(some) if some else None
        elif not some:
            found[name] = None
        else:
            kind = "edges" if name[0] == "weight" else "nodes"
            ids = [r[0][kind][name[1]] for r in ranks]
            like = some[0]  # a rank without such rows may have no gradient
            pieces = [
                like.new_zeros(len(i), *like.shape[1:]) if one is None else one
                for one, i in zip(pieces, ids, strict=True)
            ]
            found[name] = joined(pieces, ids, sum(map(len, ids)))
    return found


def _sum(out: dict, ids: dict[Any, Tensor]) -> Tensor:
    parts = [(rows * probe(rows.shape, ids[t]).to(rows.dtype)).sum() for t, rows in out.items()]
    return torch.stack(parts).sum()


def _found(model: Any, out: dict, rows: dict, weights: dict) -> dict:
    found: dict = {("output", ntype): values.detach() for ntype, values in out.items()}
    found |= {("input", ntype): values.grad for ntype, values in rows.items()}
    found |= {("weight", etype): values.grad for etype, values in weights.items()}
    return found | {("parameter", name): p.grad for name, p in model.named_parameters()}
