"""Comparing the ranks' models: in :func:`check`, now and then in training, and at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sar import expect
from sar._private import version_of
from sar.comm import Group, current_group
from sar.comm.diagnosis import rank_names
from sar.errors import DriftError
from sar.nn.history import CHECK_EVERY, History, history_of, is_due, warn_of_factors
from sar.nn.local_norms import warn_of_local_norms
from sar.nn.params import ShardedParameter, agree_on_layout, digest_of, layout_of, replicated
from sar.ops.capture import leaves_of

_UNREGISTERED = "parameter number"
_WHERE = "behind the loss or a graph's rows"

# Calls of each kind in which parameters are searched: odd and even ones, as there may be two in a
# step; and the first in which ranks are compared, when a step has been made. Later: every 49th.
_LOSSES, _FIRST_LOSS = {1, 2, 3, 5, 8, 13, 21, 34}, 2
_ROWS, _FIRST_ROWS = {1, 2, 3, 4, 5, 8, 13, 21, 34}, 5


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    buffers: bool = True,
    every: int = 1,
    group: Group | None = None,
) -> None:
    """Raise on every rank unless all ranks hold the same model, bit for bit; collective.

    What it tells: parameters that were never synchronized, gradients that were not summed on
    every rank, optimizers that step differently, memory that lost a bit. What it cannot tell: a
    step that is wrong in the same way everywhere, such as summed gradients of a loss that is a mean
    over one rank's nodes; :func:`sar.nn.gather_grads` warns of that. 8 bytes a rank are sent; a
    million parameters are read in about 0.2 ms.

    Args:
        model: sharded parameters are left out.
        optimizer: compare what it keeps for the model's parameters, and its options, as well.
        buffers: compare those as well. Statistics of an ``nn.BatchNorm1d`` that was not converted
            differ between ranks, and so do the results of evaluation on them.
        every: look in one of so many calls for this model; the others do nothing. All ranks give
            the same.

    Raises:
        DriftError: a parameter or buffer is not the same on all ranks; the first one is named, and
            the call that was missing.
        ValueError: the models have other parameters, or other shapes and dtypes; ``every`` is less
            than 1.
        TypeError: ``model`` is no module, ``optimizer`` no optimizer, ``every`` no int.
    """
    expect.integer(every, "every", at_least=1)
    if optimizer is not None:
        expect.instance(optimizer, "optimizer", torch.optim.Optimizer, "one of torch.optim")
    group = group or current_group()
    tensors: dict[str, Tensor] = dict(replicated(model))
    warn_of_local_norms(model, group)
    if every > 1 and history_of(group).count("check", model) % every:
        return
    if optimizer is not None:
        tensors |= _states(optimizer, replicated(model))
    if buffers:
        tensors |= dict(model.named_buffers())
    _compare(tensors, model, group)


def _states(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """An optimizer's states of parameters, and the numbers among its options, by name."""
    found = {}
    for name, param in params.items():
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            if isinstance(value, (Tensor, int, float)):
                found[f"the optimizer's {key} of {name}"] = torch.as_tensor(value)
    for place, options in enumerate(optimizer.param_groups):
        for key, value in sorted(options.items()):
            if isinstance(value, (Tensor, int, float)):
                found[f"the optimizer's {key} of group {place}"] = torch.as_tensor(value)
    return found


def check_sums(model: nn.Module, group: Group, factor: float = math.nan) -> None:
    """Look at losses, and now and then at parameters, in every sum of a model's gradients.
    Collective now and then, in the same calls on all ranks. ``factor`` is
    :meth:`sar.nn.history.GradientWatch.end`'s."""
    history = history_of(group)
    if model not in history.summed:
        history.summed.update(model.modules())
        warn_of_local_norms(model, group)
    if group.size == 1:
        return
    history.warn_of_local_losses(model, group)
    if is_due(history.count("sum", model)):
        history.summed.update(model.modules())  # there may be new ones
        known = {id(param) for part in history.summed for param in part.parameters(recurse=False)}
        behind = [
            param for param in (found() for found in history.unregistered) if param is not None
        ]
        others = _named([param for param in behind if id(param) not in known])
        _compare(dict(replicated(model)), model, group, others, factor)


def check_layout(model: nn.Module, number: int, group: Group) -> None:
    """Compare parameters when their number has changed; collective after ranks agreed on it."""
    seen = history_of(group).layouts.setdefault(model, set())
    if group.size > 1 and seen and number not in seen:
        _compare(dict(replicated(model)), model, group)
    seen.add(number)


def check_call(model: nn.Module, group: Group, number: int) -> None:
    """Compare parameters in the ``number``-th call of a module, where
    :func:`sar.nn.history.due_call` says so; collective. Not an error where nobody trains: no rank
    has written to a parameter since the first call."""
    params = replicated(model)
    is_trained = history_of(group).see_written(p for p in params.values() if not is_lazy(p))
    if number > 1 and _compare(dict(params), model, group, is_trained=is_trained):
        compare_at_end(model, group)


def _compare(
    tensors: dict[str, Tensor],
    model: nn.Module | None,
    group: Group,
    unregistered: Mapping[str, Tensor] | None = None,
    factor: float | None = None,
    is_trained: bool = True,
) -> bool:
    """Raise ``DriftError`` on every rank unless all hold the same tensors; collective.

    ``unregistered`` ones are compared as well where ranks have equally shaped ones; they need not.
    ``factor``: see :func:`check_sums`. Returns whether some rank ``is_trained``: if none, nothing
    is raised. With a ``factor`` that is not asked.
    """
    digests = [0 if is_lazy(tensor) else digest_of(tensor) for tensor in tensors.values()]
    others = [digest_of(tensor) for tensor in (unregistered or {}).values()]
    beside = int(is_trained)
    if factor is not None:  # the bits of a float64
        beside = int(torch.tensor(factor, dtype=torch.float64).view(torch.int64))
    found, history = _gathered([hash((*digests, *others)), beside], group), history_of(group)
    if factor is None and not found[:, 1].any():
        return False
    if factor is not None and model is not None and model not in history.rescaled:
        if warn_of_factors(model, found[:, 1].view(torch.float64), group):
            history.rescaled.add(model)
    if bool((found[:, 0] == found[0, 0]).all()):
        return True
    agree_on_layout(tensors, group)
    if unregistered is not None:
        layouts = _gathered(list(layout_of(unregistered)), group)
        if bool((layouts == layouts[0]).all()):
            tensors, digests = {**tensors, **unregistered}, [*digests, *others]
    differ = (found := _gathered(digests, group)) != found[0]
    if differ.any():
        history.has_drifted = True
        first = int(differ.any(0).nonzero()[0])
        name, ranks = list(tensors)[first], differ[:, first].nonzero().view(-1).tolist()
        raise DriftError(
            f"model: {name} of {rank_names(ranks)} is not the same as rank 0's "
            f"({int(differ.any(0).sum())} of {len(tensors)} tensors differ); "
            f"{_cause(name, model, history)}"
        )
    return True


def _gathered(numbers: list[int], group: Group) -> Tensor:
    """int64 [ranks, n]: the ``numbers`` of all ranks; collective."""
    return torch.stack(group.all_gather(torch.tensor(numbers, dtype=torch.int64)))


def compare_at_end(model: nn.Module, group: Group) -> None:
    """Have a trained model compared once more when the group ends."""
    history = history_of(group)
    if all(known() is not model for known in history.roots):
        history.roots.append(ref(model))
    if group.final_check is None:
        group.final_check = FinalModelCheck(history)


def _named(params: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    return {
        f"{_UNREGISTERED} {number} of shape {list(param.shape)} {_WHERE}": param
        for number, param in enumerate(params)
    }


def _cause(name: str, model: nn.Module | None, history: History) -> str:
    """Why tensor ``name`` of ``model`` may differ; ``None``: it is behind a loss."""
    if model is None or name.startswith(_UNREGISTERED):
        return (
            "its model was not given to sar.prepare(model, graph) or sar.sync_params(model) before "
            "the first step, or not to sar.gather_grads(model) after each loss.backward()"
        )
    owner = dict(model.named_modules()).get(name.rpartition(".")[0], model)
    if missing := history.missing(owner):
        return f"nobody called {missing}"
    return (
        "parameters were synchronized and gradients summed: does every rank step with an optimizer "
        "of the same options (learning rate), after sar.gather_grads, and is no parameter added "
        "after sar.sync_params(model), or written otherwise?"
    )


def watch_loss(values: Any, group: Group) -> None:
    """Now and then find the parameters behind a loss over all ranks, of models that nobody named.
    They are compared here, a collective, where no gradients are summed, else in the next comparison
    of :func:`sar.nn.gather_grads`."""
    number = _count("loss", group)
    if _is_searched(number, _LOSSES):
        _search([values], number >= _FIRST_LOSS, group)


def watch_rows(rows: Callable[[], Iterable[Any]], group: Group) -> None:
    """As :func:`watch_loss`, for rows that a graph gets, where there is no loss over all ranks."""
    number, history = _count("rows", group), history_of(group)
    if _is_searched(number, _ROWS) and not (history.summed or history.numbers["loss"]):
        _search(rows(), number >= _FIRST_ROWS, group)


def _count(what: str, group: Group) -> int:
    """This call's number; 0 under ``no_grad`` or for one rank. No rank's values decide it."""
    if group.size == 1 or not torch.is_grad_enabled():
        return 0
    numbers = history_of(group).numbers
    numbers[what] += 1
    return numbers[what]


def _is_searched(number: int, first: set[int]) -> bool:
    return number in first or (number > 0 and number % (CHECK_EVERY - 1) == 0)


def _search(tensors: Iterable[Any], is_compared: bool, group: Group) -> None:
    history, found = history_of(group), _params_behind(tensors, group)
    history.unregistered = [ref(param) for param in found]
    is_trained = history.see_written(found)
    if is_compared and not history.summed:
        _compare({}, None, group, _named(found), is_trained=is_trained)


def _params_behind(tensors: Iterable[Any], group: Group) -> list[nn.Parameter]:
    """Parameters behind ``tensors`` that ranks should share: none with a row per node or edge."""
    own = {count for graph in list(group.graphs) for count in graph.row_counts}
    asking = [t for t in tensors if type(t) is Tensor and t.grad_fn is not None]
    found = {id(leaf): leaf for leaf in leaves_of(asking) if isinstance(leaf, nn.Parameter)}
    return [
        param
        for param in found.values()
        if not isinstance(param, ShardedParameter)
        and not is_lazy(param)
        and not (param.dim() and param.shape[0] in own)
    ]


class FinalModelCheck:
    """Compares the models that still live; rank 0 only warns, as others may be gone."""

    def __init__(self, history: History) -> None:
        self._history = history

    def report(self) -> str:
        """JSON: per model its class, what has to be alike for it to be compared, digests by name.
        Ranks may write to a model after training, as rank 0 does that loads the best one; so only
        those with as many writes are compared."""
        return json.dumps([] if self._history.has_drifted else list(self._models()))

    def _models(self) -> Iterator[tuple[str, list[int], dict[str, int]] | None]:
        for model in (known() for known in self._history.roots):
            params = {} if model is None else replicated(model)
            if model is None or any(map(is_lazy, params.values())):
                yield None
                continue
            writes = sum(map(version_of, params.values()))
            digests = {name: digest_of(param) for name, param in params.items()}
            yield type(model).__name__, [*layout_of(params), writes], digests

    def compare(self, reports: Mapping[int, str]) -> str | None:
        found: dict[int, list[Any]] = {rank: json.loads(text) for rank, text in reports.items()}
        for place, mine in enumerate(found.get(0, ())):
            for rank, models in sorted(found.items()):
                other = models[place] if place < len(models) else None
                if mine and other and mine[1] == other[1] and mine[2] != other[2]:
                    name = next(n for n in mine[2] if mine[2][n] != other[2].get(n))
                    return self._warning(self._history.roots[place](), mine[0], name, rank)
        return None

    def _warning(self, model: nn.Module | None, kind: str, name: str, rank: int) -> str:
        missing = "" if model is None else self._history.missing(model)
        why = f"nobody called {missing}" if missing else "sar.check(model, optimizer) says more"
        return (
            f"{kind}: at the end {name} of rank {rank} is not the same as rank 0's, so ranks have "
            f"trained models of their own; {why}"
        )
