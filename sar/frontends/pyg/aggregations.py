"""PyG's aggregations of rows of edges by an end of the edges.

Sums, means and extremes are reductions. Those that look at all rows of a destination together run
their own code on mailboxes, which hold the halo of the layer. All others are made of PyG's scatter
and softmax and run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar._private import NormBase
from sar.errors import NotSupportedError
from sar.frontends.pyg.index import EdgeEnd
from sar.frontends.pyg.reducing import edges_first, reduce_at
from sar.ops import Messages, run_mailbox
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.program import Program

_REDUCED = {"Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min"}
# How many elements more than the most of any destination the dense batch has; None: there is none.
_ON_MAILBOXES = {
    "MulAggregation": None, "QuantileAggregation": None, "MLPAggregation": None,
    "LSTMAggregation": 0, "GRUAggregation": 0, "LCMAggregation": 0, "SortAggregation": 0,
    "SetTransformerAggregation": 0, "GraphMultisetTransformer": 0, "PatchTransformerAggregation": 1,
}  # fmt: skip
_SOME = 4  # rows of a group that another group, without any, is computed beside


def _reduced(op: str) -> Callable:
    def forward(
        module: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None,
        dim: int = -2,
    ) -> Tensor:  # fmt: skip
        _refuse_ptr(module, ptr)
        return reduce_at(index, x, dim, op, dim_size)

    return forward


def _on_mailboxes(name: str) -> Callable:
    """The forward of PyG's class ``name`` on the messages of each destination."""

    def forward(
        module: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None,
        dim: int = -2, max_num_elements: int | None = None,
    ) -> Tensor:  # fmt: skip
        _refuse_ptr(module, ptr)
        _refuse_mailbox(module, index)
        more, extra = {}, _ON_MAILBOXES[name]
        if extra is not None:
            most = _most_edges(index) + extra if max_num_elements is None else max_num_elements
            more["max_num_elements"] = most
        code = partial(original_of(name), module, dim=dim % x.dim(), **more)
        return _run(module, code, edges_first(index, x, dim), index, dim % x.dim())

    return forward


def original_of(name: str) -> Callable:
    """The forward of PyG's class ``name``, which takes plain tensors as it always did."""
    import torch_geometric.nn.aggr

    return getattr(torch_geometric.nn.aggr, name).forward  # type: ignore[no-any-return]


def _run(module: Any, code: Callable, rows: Any, index: EdgeEnd, dim: int) -> Tensor:
    """Mailboxes of ``rows`` reduced by ``code``, which gives rows without edges too; collective."""
    scope, like = rows.scope, rows.without_rows

    def call(flat: Tensor, groups: Tensor, count: int) -> Tensor:
        out = code(flat.movedim(0, dim), index=groups, dim_size=count)
        return out.movedim(dim, 0)  # type: ignore[no-any-return]

    def reduce(boxes: list[Tensor], *_: Any) -> list[Tensor]:
        count, size = boxes[0].shape[:2]
        groups = torch.arange(count, device=scope.device).repeat_interleave(size)
        return [call(boxes[0].flatten(0, 1), groups, count)]

    empty = scope.relation.in_degrees == 0
    has_empty, groups = bool(empty.any()), torch.zeros(_SOME, dtype=torch.int64)
    with torch.set_grad_enabled(torch.is_grad_enabled() and has_empty):
        some = like.new_ones((_SOME, *like.shape[1:]))
        none = call(some, groups.to(scope.device), 2)[1:]
    hidden = tuple(p for p in module.parameters() if p.requires_grad)
    program = Program([rows.read()])
    scope.relation.group.meter.tell("mailbox")
    (out,) = run_mailbox(
        scope.relation, program.messages(), program.inputs(), [like],
        Messages(reduce, is_udf=True, capturing=TORCH_CAPTURES, hidden=hidden), [],
        [none[:0].detach()], scope.policy, type(module).__name__,
    )  # fmt: skip
    if has_empty:
        out = torch.where(empty.view(-1, *[1] * (out.dim() - 1)), none, out)
    return out.movedim(0, dim)


def _most_edges(index: EdgeEnd) -> int:
    """The largest in-degree of all ranks; collective at first."""
    relation = index.graph.scope().relation

    def find() -> int:
        degrees = relation.in_degrees
        own = degrees.max() if len(degrees) else torch.zeros((), dtype=degrees.dtype)
        return int(relation.group.all_reduce(own.clone(), "max"))

    return relation.derived("most edges of all ranks", find)


def _refuse_mailbox(module: Any, index: EdgeEnd) -> None:
    name = type(module).__name__
    if index.side != "v":
        raise NotSupportedError(
            f"{name}: got sources to aggregate at; expected destinations, where all edges of a "
            "node are on its rank (flow='source_to_target')"
        )
    if index.graph.may_have_more_rows:
        raise NotSupportedError(
            f"{name}: got edges of several relations behind each other; expected those of one, or "
            "sums, means and extremes"
        )
    for part in module.modules():
        if isinstance(part, NormBase) and (part.training or part.running_mean is None):
            raise NotSupportedError(
                f"{name}: got {type(part).__name__} in it, whose statistics are over rows of all "
                "ranks, but rows are computed some at a time; expected another norm, or eval()"
            )


def _refuse_ptr(module: Any, ptr: Any) -> None:
    if ptr is not None:
        raise NotSupportedError(
            f"{type(module).__name__}: got ptr beside ends of edges, expected index alone"
        )


def refuse_dense(module: Any, index: EdgeEnd) -> None:
    """Raise for a class of the user's that wants a dense batch of the rows of all edges."""
    raise NotSupportedError(
        f"{type(module).__name__}: wants all rows of edges in a dense batch; expected sums, means, "
        f"extremes and softmax (scatter), or a class of PyG: {', '.join(_ON_MAILBOXES)}"
    )


def _refused(module: Any, *_: Any, **__: Any) -> Tensor:
    raise NotSupportedError(
        f"{type(module).__name__}: takes gradients of gradients over all nodes at once; expected "
        "an aggregation that computes each destination for itself"
    )


# By class of torch_geometric.nn.aggr: what stands in for its forward on ends of edges.
AGGREGATIONS: dict[str, Callable] = {
    **{f"{name}Aggregation": _reduced(op) for name, op in _REDUCED.items()},
    **{name: _on_mailboxes(name) for name in _ON_MAILBOXES},
    "EquilibriumAggregation": _refused,
}
