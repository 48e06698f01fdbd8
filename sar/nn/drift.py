"""Whether every rank still trains the same model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sar import expect
from sar.comm import Group, current_group
from sar.errors import DriftError
from sar.nn.farewell import Farewell
from sar.nn.local_norms import warn_of_local_norms
from sar.nn.replicas import agree_on_layout, digest_of, layout_of, replicated
from sar.nn.steps import Steps, is_due, steps_of
from sar.nn.sums import warn_of_factors

_MOST_RANKS_NAMED, _LOOSE = 8, "parameter number"


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
    if every > 1 and steps_of(group).count("check", model) % every:
        return
    if optimizer is not None:
        tensors |= _states(optimizer, replicated(model))
    if buffers:
        tensors |= dict(model.named_buffers())
    _compare(tensors, model, group)


def _states(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """What an optimizer keeps for parameters, and the numbers among its options, by name."""
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
    """What every sum of a model's gradients looks at: losses, and parameters now and then.

    Collective now and then, in the same calls on all ranks.

    Args:
        factor: by which gradients were changed after backward, as of :mod:`sar.nn.sums`.
    """
    steps = steps_of(group)
    if model not in steps.summed:
        steps.summed.update(model.modules())
        warn_of_local_norms(model, group)
    if group.size == 1:
        return
    steps.warn_of_local_losses(model, group)
    if is_due(steps.count("sum", model)):
        steps.summed.update(model.modules())  # there may be new ones
        known = {id(param) for part in steps.summed for param in part.parameters(recurse=False)}
        loose = [param for param in steps.loose_params() if id(param) not in known]
        _compare(dict(replicated(model)), model, group, _named(loose), factor)


def check_layout(model: nn.Module, number: int, group: Group) -> None:
    """Compare parameters once they are of another number; collective after ranks agreed on it."""
    seen = steps_of(group).layouts.setdefault(model, set())
    if group.size > 1 and seen and number not in seen:
        _compare(dict(replicated(model)), model, group)
    seen.add(number)


def check_call(model: nn.Module, group: Group, *, is_layer: bool = False) -> None:
    """What every call of a module with a graph of several ranks looks at: parameters now and then.

    Such a call is collective, and so is this now and then; not where no gradient is recorded, nor
    where sums of gradients look. Parts of a model that is looked at are not, as layers. Nor is it
    an error where nobody trains: no rank has written to a parameter since the first call.
    """
    if group.size == 1 or not torch.is_grad_enabled() or not model.training:
        return
    steps = steps_of(group)
    if model in steps.summed or (is_layer and model in steps.called):
        return
    number = steps.count("call", model)
    if number == 1 and not is_layer:
        steps.called.update(model.modules())
    if is_due(number):
        params = replicated(model)
        is_trained = steps.see_written(params.values())
        if number > 1 and _compare(dict(params), model, group, is_trained=is_trained):
            compare_at_end(model, group)


def compare_loose(group: Group, is_trained: bool) -> None:
    """Compare the parameters that were found behind a loss or rows; collective."""
    _compare({}, None, group, _named(steps_of(group).loose_params()), is_trained=is_trained)


def _compare(
    tensors: dict[str, Tensor],
    model: nn.Module | None,
    group: Group,
    loose: Mapping[str, Tensor] | None = None,
    factor: float | None = None,
    is_trained: bool = True,
) -> bool:
    """Raise ``DriftError`` on every rank unless all hold the same tensors; collective.

    Args:
        loose: compared as well where ranks have equally shaped ones; they need not.
        factor: see :func:`check_sums`.
        is_trained: on some rank, else nothing is raised; not with a factor.

    Returns whether it is.
    """
    digests = [0 if is_lazy(tensor) else digest_of(tensor) for tensor in tensors.values()]
    others = [digest_of(tensor) for tensor in (loose or {}).values()]
    beside = int(is_trained) if factor is None else _bits(factor)
    found, steps = _gathered([hash((*digests, *others)), beside], group), steps_of(group)
    if factor is None and not found[:, 1].any():
        return False
    if factor is not None and model is not None and model not in steps.changed:
        if warn_of_factors(model, found[:, 1].view(torch.float64), group):
            steps.changed.add(model)
    if bool((found[:, 0] == found[0, 0]).all()):
        return True
    agree_on_layout(tensors, group)
    if loose is not None:
        layouts = _gathered(list(layout_of(loose)), group)
        if bool((layouts == layouts[0]).all()):
            tensors, digests = {**tensors, **loose}, [*digests, *others]
    differ = (found := _gathered(digests, group)) != found[0]
    if differ.any():
        steps.is_told = True
        name = list(tensors)[int(differ.any(0).nonzero()[0])]
        raise DriftError(f"{_first_difference(tensors, differ)}; {_cause(name, model, steps)}")
    return True


def _gathered(numbers: list[int], group: Group) -> Tensor:
    """int64 [ranks, n]"""
    return torch.stack(group.all_gather(torch.tensor(numbers, dtype=torch.int64)))


def _bits(number: float) -> int:
    """Those of a float64, as an int64."""
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))


def compare_at_end(model: nn.Module, group: Group) -> None:
    """Have a model that is trained compared once more when the group ends."""
    steps = steps_of(group)
    if all(known() is not model for known in steps.roots):
        steps.roots.append(ref(model))
    if group.final_check is None:
        group.final_check = Farewell(steps)


def _named(params: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    return {
        f"{_LOOSE} {number} of shape {list(param.shape)} behind the loss or a graph's rows": param
        for number, param in enumerate(params)
    }


def _first_difference(tensors: Mapping[str, Tensor], differ: Tensor) -> str:
    first = int(differ.any(0).nonzero()[0])
    ranks = differ[:, first].nonzero().view(-1).tolist()
    shown = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    more = " and more" if len(ranks) > _MOST_RANKS_NAMED else ""
    return (
        f"model: {list(tensors)[first]} of rank {shown}{more} is not the same as rank 0's "
        f"({int(differ.any(0).sum())} of {len(tensors)} tensors differ)"
    )


def _cause(name: str, model: nn.Module | None, steps: Steps) -> str:
    """Of a difference in the tensor ``name`` of ``model``, or in one that is behind a loss."""
    if model is None or name.startswith(_LOOSE):
        return (
            "its model was not given to sar.prepare(model, graph) or sar.sync_params(model) before "
            "the first step, or not to sar.gather_grads(model) after each loss.backward()"
        )
    owner = dict(model.named_modules()).get(name.rpartition(".")[0], model)
    if missing := steps.missing(owner):
        return f"nobody called {missing}"
    return (
        "parameters were synchronized and gradients summed: does every rank step with an optimizer "
        "of the same options (learning rate), after sar.gather_grads, and is no parameter added "
        "after sar.sync_params(model), or written otherwise?"
    )
