"""A number of nodes in every operator of a tensor: the one stated meaning, or an error."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import get_overridable_functions

from sar.errors import NotSupportedError
from sar.frontends.dgl.node_count import NodeCount

HERE, EVERYWHERE = 79, 211
SAYS = r"of a number of nodes: .* not known; expected x / count, .*num_nodes\(\).*num_nodes_global"
# Of most of these a count tells what any tensor of its shape would.
LEFT_OUT = {
    "dim", "ndimension", "size", "numel", "nelement", "stride", "element_size", "is_complex",
    "is_floating_point", "is_contiguous", "__len__", "__hash__", "__get__",
} | {
    "__reduce_ex__", "sym_not",  # of rows, whose protocol may be anything; of the list, not of it
    "gumbel_softmax",  # divides by its temperature, so by all nodes
}  # fmt: skip


def count(*shape: int) -> NodeCount:
    return NodeCount.of(torch.full(shape, HERE), torch.full(shape, EVERYWHERE))


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every function of torch that takes tensors, with counts in any of its first places."""
    functions = {f for some in get_overridable_functions().values() for f in some}
    for func in sorted(functions, key=str):
        name = getattr(func, "__name__", str(func))
        for args in (
            [0], [1], [1, 2], [1, None], [None, 0], [None, 1], [0, 0], [1, 1], [None, None, 1],
            [None, 2, 0], [None, 0, 2], [(1, 1)],
        ) if name not in LEFT_OUT else ():  # fmt: skip
            yield name, lambda f=func, a=args: f(*map(_made, a))


def _made(kind: Any) -> Any:
    """0 and 1: a count of so many dimensions; 2: two; ``None``: a row."""
    if isinstance(kind, tuple):
        return tuple(map(_made, kind))
    return torch.ones(1) if kind is None else 2 if kind == 2 else count(*[1] * kind)


def means_it(result: Any) -> bool:
    """Whether it is made of the counts as counts, of their size or of a division by all nodes."""
    if isinstance(result, (list, tuple)):
        return all(map(means_it, result))
    if isinstance(result, NodeCount):
        return bool((result.here == HERE).all() and (result.everywhere == EVERYWHERE).all())
    if isinstance(result, Tensor):
        shares = result * EVERYWHERE
        return HERE in result.shape or any(
            torch.allclose(shares, torch.full_like(shares, dividend)) for dividend in (1, 2)
        )
    return result is None or result is NotImplemented or isinstance(result, str)


def test_every_function_means_one_thing_or_raises() -> None:
    wrong, meant = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, call in calls():
            try:
                result = call()
            except Exception:  # noqa: S112
                continue  # gives no number
            meant.add(name)
            if not means_it(result):
                wrong.append((name, result))
    assert not wrong, {name for name, _ in wrong}
    assert {"repeat_interleave", "true_divide", "unbind", "expand"} <= meant


ALONE: dict[str, Callable[[NodeCount], Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "invert": operator.invert,
    "int": int, "float": float, "complex": complex, "bool": bool, "index": operator.index,
    "range": range, "sqrt": math.sqrt, "item": lambda n: n.item(),
    "tolist": lambda n: n.tolist(), "numpy": lambda n: n.numpy(), "asarray": np.asarray,
    "tensor": torch.tensor, "tensor of a list": lambda n: torch.tensor([n]),
    "Tensor": lambda n: n.as_subclass(Tensor), "T": lambda n: n.view(1, 1).T,
    "data": lambda n: n.data, "slice": lambda n: torch.ones(3)[:n],
    "row": lambda n: torch.ones(3)[n], "copy": copy.deepcopy, "in": lambda n: 3 in n.view(1),
    "as a value": lambda n: torch.full((2,), n), "to write": lambda n: torch.ones(2).fill_(n),
    "as a row": lambda n: operator.setitem(torch.ones(2), 0, n), "share": lambda n: n / 2,
    "ratio": lambda n: n / n, "out": lambda n: torch.div(torch.ones(1), 2, out=n.view(1)),
    "rsqrt": lambda n: n.double().rsqrt(),
    "exponent": lambda n: torch.ones(1) * n**-1, "into": lambda n: n.add_(1),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALONE)
def test_other_uses_raise(name: str) -> None:
    with pytest.raises(NotSupportedError, match=SAYS):
        ALONE[name](count())
