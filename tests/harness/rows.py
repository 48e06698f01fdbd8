"""Inputs that every rank cuts out of the same whole tensors, and results put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.graphs import mixed, to_dgl
from harness.parts import Cutter, joined
from harness.threads import run_threads
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO

EDGE_KEY = ":".join(ETYPE_HOMO)


def whole(count: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """[count, *shape] float64, of either sign, at least 0.5 from zero (so that it can divide)."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.rand(count, *shape, generator=rng, dtype=torch.float64) + 0.5
    sign = torch.randint(2, (count, *shape), generator=rng) * 2 - 1
    return size * sign


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The same float64 module each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def eager(column: Any) -> Tensor:
    """The values of an edge column, which may be lazy."""
    return getattr(column, "materialize", lambda: column)()


class Part:
    """One rank's graph and the original ids of its rows; homogeneous."""

    def __init__(self, group: Any, json_path: str, policy: Any = None) -> None:
        import sar

        self.data = sar.load_dgl_partition_data(json_path, group.rank, "cpu")
        self.graph = sar.construct_full_graph(self.data, policy)
        self.nodes = self.data.node_features[f"{NTYPE_HOMO}/orig_id"]
        self.edges = self.data.edge_features[f"{EDGE_KEY}/orig_eid"]

    def node_rows(self, values: Tensor, grad: bool = True) -> Tensor:
        return values[self.nodes].requires_grad_(grad)

    def edge_rows(self, values: Tensor, grad: bool = True) -> Tensor:
        return values[self.edges].requires_grad_(grad)


def check_all(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-10, msg=name)


def join_nodes(parts: list[dict], key: str, total: int) -> Tensor:
    """The ranks' ``key`` by original node id; each part also holds ``nodes``."""
    return joined([p[key] for p in parts], [p["nodes"] for p in parts], total)


def join_edges(parts: list[dict], key: str, total: int) -> Tensor:
    """The ranks' ``key`` by original edge id; each part also holds ``edges``."""
    return joined([p[key] for p in parts], [p["edges"] for p in parts], total)


def results(graph: Any, layer: nn.Module, x: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """What a step leaves behind; parameters' gradients are this rank's share."""
    x = x.clone().requires_grad_()
    out = layer(graph, x * 1)
    (out * factor).sum().backward()
    shares = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **shares}


def assert_share(
    group: Any, got: dict[str, Tensor], want: dict[str, Tensor], nodes: Tensor
) -> None:
    """:func:`results` of a rank with rows ``nodes`` are its share of those of the whole graph."""
    assert got.keys() == want.keys()
    for name, value in got.items():
        own = name in ("out", "x")
        value = value if own else group.all_reduce(value.clone())
        expected = want[name][nodes] if own else want[name]
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)


def compare(
    run: Callable[[Any, Tensor], Tensor],
    partitioned: Cutter,
    width: int = 4,
    whole_run: Callable[[Any, Tensor], Tensor] | None = None,
    **policy: Any,
) -> None:
    """``run`` of a graph and rows, on 3 ranks, equals it, or ``whole_run``, on the whole graph."""
    import sar

    arrays = mixed()
    rows = whole(arrays.total_nodes, (width,), seed=1)

    def trained(run: Any, graph: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        out = run(graph, x.requires_grad_())
        (out * out).sum().backward()
        return out.detach(), x.grad

    want = trained(whole_run or run, to_dgl(arrays), rows.clone())
    path = partitioned(arrays, 3, "random")

    def case(group: Any) -> None:
        part = Part(group, path, sar.Policy(**policy))
        for got, expected in zip(trained(run, part.graph, rows[part.nodes]), want, strict=True):
            torch.testing.assert_close(
                got, expected[part.nodes], rtol=1e-11, atol=1e-11, equal_nan=True
            )

    run_threads(3, case)
