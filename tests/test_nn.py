"""Loss, parameters, gradients and batch norm over several ranks against torch on all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import WorkerPool, run_threads
from harness.covering import by_pairs
from torch import Tensor, nn

from sar.comm import Group, ThreadGroup
from sar.nn import DistributedBN1D, convert_batch_norm, gather_grads, sync_params

# Rows of each rank: one, uneven, an empty rank first, in the middle, and a rank of one row.
SPLITS = [[9], [5, 4], [0, 9], [4, 0, 5], [1, 6, 0, 2]]


def run(splits: list[int], case: Callable[[Group], object]) -> list:
    return ThreadGroup.run(len(splits), case, timeout=20)


def close(a: Tensor, b: Tensor, bound: float = 1e-12) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    scale = max(float(b.abs().max()), 1e-30) if b.numel() else 1.0
    assert float((a - b).abs().max() if b.numel() else 0.0) <= bound * scale


def rows_of(x: Tensor, splits: list[int], rank: int) -> Tensor:
    return x.split(splits)[rank].clone()


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------- parameters and gradients


def test_sync_params_takes_rank_0s_parameters_and_buffers() -> None:
    def case(group: Group) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(group.rank + 5)
        before = [param.data_ptr() for param in model.parameters()]
        sync_params(model)
        assert before == [param.data_ptr() for param in model.parameters()]
        return model.state_dict()

    for state in run([1, 1, 1], case):
        assert len(state) == 7 and all(bool((value == 5).all()) for value in state.values())


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "shape": lambda: nn.Linear(2, 4),
    "number": lambda: nn.Linear(2, 3, bias=False),
    "dtype": lambda: nn.Linear(2, 3).double(),
    "transposed": lambda: nn.Linear(3, 2),
    "lazy": lambda: nn.LazyLinear(3),
}


@pytest.mark.parametrize("other", OTHERS)
def test_models_that_differ_are_an_error_on_every_rank(other: str) -> None:
    def case(group: Group) -> list[str]:
        model, messages = OTHERS[other]() if group.rank == 2 else nn.Linear(2, 3), []
        for call in (sync_params, gather_grads):
            with pytest.raises(ValueError, match="rank 2") as caught:
                call(model)
            messages.append(str(caught.value))
        return messages

    first, *rest = run([1, 1, 1], case)
    assert all(messages == first for messages in rest)


def test_gather_grads_sends_one_bucket_per_dtype() -> None:
    def case(group: Group) -> int:
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])
        sync_params(model)
        for _ in range(3):  # the first two calls also compare parameters
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            before = group.counters.collectives
            gather_grads(model)
        return group.counters.collectives - before

    assert run([1, 1], case) == [1, 1]


def steps_of_unlike_gradients(group: Any) -> list[Any]:
    """Steps after each other, in which other gradients are there on some ranks or all."""
    small, large = nn.Linear(2, 1), nn.Sequential(nn.Linear(3, 2), DistributedBN1D(2).double())
    found: list[Any] = []
    sync_params(small, group=group)
    sync_params(large.eval(), group=group)

    def step(model: nn.Module, without: str | None = None, extra: float = 0.0) -> None:
        for name, param in model.named_parameters():
            value = group.rank + 1 + extra
            param.grad = None if name == without else torch.full_like(param, value)
        gather_grads(model, group=group)
        sums = [p.grad if p.grad is None else p.grad.unique().tolist() for p in model.parameters()]
        found.append(sums)

    last = group.rank == group.size - 1
    step(small)
    step(small)
    step(small, without="bias" if last else None)
    step(small)
    step(small)
    step(small, without="bias")  # everywhere
    step(small, without="bias")
    step(large)
    step(small)
    step(large, extra=0.5)
    step(large, extra=0.5)
    large[0].bias.requires_grad = not last
    with pytest.raises(ValueError):
        step(large)
    large[0].bias.requires_grad = True
    step(large)
    rows = nn.Embedding(2, 2, sparse=True)
    sync_params(rows, group=group)
    if last:
        rows(torch.zeros(1, dtype=torch.long)).sum().backward()
    else:
        rows.weight.grad = torch.ones(2, 2)
    with pytest.raises(TypeError, match="sparse"):
        gather_grads(rows, group=group)
    step(large)
    return found


def expected_of_unlike_gradients(size: int) -> list[Any]:
    ranks = sum(range(1, size + 1))
    plain, large = [[ranks], [ranks]], [[ranks]] * 4
    more = [[ranks + size * 0.5]] * 4
    absent, some = [[ranks], None], [[ranks], [ranks - size]]
    first = [plain, plain, some, plain, plain, absent, absent, large, plain, more, more]
    return [*first, large, large]


def test_gradients_that_change_from_step_to_step(processes: WorkerPool) -> None:
    for size in (2, 3):
        expected = [expected_of_unlike_gradients(size)] * size
        assert run_threads(size, steps_of_unlike_gradients) == expected
        assert processes.run(size, steps_of_unlike_gradients) == expected


def test_bfloat16_gradients_are_sent_wide() -> None:
    """Otherwise a transport that adds one rank after another rounds after each."""

    def case(group: Group) -> Tensor:
        param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        param.grad = torch.tensor([[256.0], [1.0], [1.0]])[group.rank].bfloat16()
        gather_grads(nn.ParameterList([param]))
        return param.grad

    for grad in run([1, 1, 1], case):
        assert grad.dtype == torch.bfloat16 and float(grad) == 258


# ---------------------------------------------------------------- batch norm


def reference(norm: nn.Module, x: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.clone().requires_grad_()
    y = norm(whole)
    (y * coefficients).sum().backward()
    return y.detach(), whole.grad


@by_pairs(affine=[True, False], momentum=[0.1, 0.7, None], splits=SPLITS)
def test_batch_norm_equals_torch_on_all_rows(
    splits: list[int], momentum: float | None, affine: bool
) -> None:
    """Two training steps and an evaluation: outputs, all gradients, running statistics."""
    batches = [(seeded(9, 4, seed=i) * 2 + 3, seeded(9, 4, seed=10 + i)) for i in range(3)]
    norm = nn.BatchNorm1d(4, eps=1e-3, affine=affine, momentum=momentum).double()
    if affine:
        nn.init.normal_(norm.weight, 1, 0.3, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(norm.bias, 0, 0.3, generator=torch.Generator().manual_seed(2))
    start = {name: value.clone() for name, value in norm.state_dict().items()}
    expected = []
    for step, (x, coefficients) in enumerate(batches):
        norm.train(step < 2)
        expected.append(reference(norm, x, coefficients))

    def case(group: Group) -> tuple[list, nn.Module]:
        mine = DistributedBN1D(4, eps=1e-3, affine=affine, momentum=momentum).double()
        mine.load_state_dict(start)
        results = []
        for step, (x, coefficients) in enumerate(batches):
            mine.train(step < 2)
            parts = (rows_of(t, splits, group.rank) for t in (x, coefficients))
            results.append(reference(mine, *parts))
        gather_grads(mine)
        return results, mine

    outcomes = run(splits, case)
    for step, (y, dx) in enumerate(expected):
        close(torch.cat([results[step][0] for results, _ in outcomes]), y)
        close(torch.cat([results[step][1] for results, _ in outcomes]), dx)
    for _, mine in outcomes:
        for name, value in norm.state_dict().items():
            close(mine.state_dict()[name].double(), value.double())
        for got, param in zip(mine.parameters(), norm.parameters()):
            close(got.grad, param.grad)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [((9, 4, 3), [4, 0, 5]), ((9, 4, 3, 2), [4, 0, 5]), ((9, 4, 2, 1, 3), [4, 0, 5]),
     ((5000, 64), [4999, 1])],
    ids=["three dimensions", "four", "five", "a rank reads several blocks"],
)  # fmt: skip
def test_batch_norm_of_other_shapes(shape: tuple[int, ...], splits: list[int]) -> None:
    x, coefficients = seeded(*shape), seeded(*shape, seed=1)
    make = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(len(shape), nn.SyncBatchNorm)
    expected = reference(make(shape[1]).double(), x, coefficients)

    def case(group: Group) -> tuple[Tensor, Tensor]:
        mine = convert_batch_norm(make(shape[1]).double())
        assert isinstance(mine, DistributedBN1D)
        return reference(mine, *(rows_of(t, splits, group.rank) for t in (x, coefficients)))

    parts = run(splits, case)
    for i in range(2):
        close(torch.cat([part[i] for part in parts]), expected[i])


def test_batch_norm_without_running_statistics_or_other_ranks() -> None:
    """In evaluation the batch is used; and only this rank's rows, if asked for."""
    x, splits, options = seeded(9, 4), [4, 5], {"track_running_stats": False}
    norm = nn.BatchNorm1d(4, **options).double().eval()

    def case(group: Group) -> tuple[Tensor, Tensor]:
        norms = (DistributedBN1D(4, distributed=how, **options) for how in (None, False))
        return tuple(n.double().eval()(rows_of(x, splits, group.rank)).detach() for n in norms)

    together, alone = zip(*run(splits, case))
    close(torch.cat(together), norm(x).detach())
    close(torch.cat(alone), torch.cat([norm(part) for part in x.split(splits)]).detach())


def test_batch_norm_is_stable_where_the_mean_dwarfs_the_deviation() -> None:
    """float32 rows around 1e4: E[x^2] - E[x]^2 would lose every digit of the variance."""
    x = (seeded(4000, 2) * 0.01 + 1e4).float()
    expected = F.batch_norm(x.double(), None, None, training=True, eps=1e-12)

    def case(group: Group) -> Tensor:
        return DistributedBN1D(2, eps=1e-12)(rows_of(x, [1500, 2500], group.rank)).detach()

    close(torch.cat(run([1500, 2500], case)).double(), expected, 1e-5)


def test_one_row_cannot_be_normalized() -> None:
    def case(group: Group) -> str:
        with pytest.raises(ValueError, match="got 1 row") as caught:
            DistributedBN1D(2)(torch.zeros(1 if group.rank else 0, 2))
        with pytest.raises(ValueError, match=r"x: got shape \(3, 4\)"):
            DistributedBN1D(2)(torch.zeros(3, 4))
        with pytest.raises(TypeError, match="torch.int64"):
            DistributedBN1D(2)(torch.zeros(3, 2, dtype=torch.int64))
        return str(caught.value)

    assert len(set(run([0, 1], case))) == 1


def test_batch_norm_passes_activations_on_without_copies() -> None:
    """What is saved for backward is the input itself and vectors of its width."""
    x = seeded(1000, 8).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        DistributedBN1D(8).double()(x)
    big = [t for t in saved if t.numel() > 8]
    assert len(big) == 1 and big[0].data_ptr() == x.data_ptr()
    assert DistributedBN1D(8)(x.bfloat16()).dtype == torch.bfloat16


def test_convert_batch_norm() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.bn = nn.BatchNorm1d(3, eps=0.1, momentum=None)
            self.again = self.bn
            self.nothing = None

    model = nn.Sequential(Block(), nn.ModuleList([nn.BatchNorm1d(3, affine=False)])).double()
    model[0].bn(seeded(6, 3))
    model[1][0].eval()
    parameters, state = list(model.parameters()), model.state_dict()
    assert convert_batch_norm(model) is model
    block, other = model[0], model[1][0]
    assert isinstance(block.bn, DistributedBN1D) and isinstance(other, DistributedBN1D)
    assert block.again is block.bn and block.bn.training and not other.training
    assert (block.bn.eps, block.bn.momentum, other.affine) == (0.1, None, False)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert convert_batch_norm(model)[0].bn is block.bn
    assert isinstance(convert_batch_norm(nn.BatchNorm1d(2)), DistributedBN1D)
    with pytest.raises(ValueError, match="forward pass"):
        convert_batch_norm(nn.LazyBatchNorm1d())


@pytest.mark.parametrize("affine", [True, False])
def test_relu_in_the_pass_of_batch_norm(affine: bool) -> None:
    """The same numbers as relu after it, in both passes."""
    x, dy = seeded(9, 3), seeded(9, 3, seed=1)

    def case(group: Group) -> list[Tensor]:
        found = []
        for inside in (True, False):
            norm = DistributedBN1D(3, affine=affine).double()
            for number, param in enumerate(norm.parameters()):
                param.data += seeded(3, seed=2 + number)
            mine = rows_of(x, [4, 0, 5], group.rank).requires_grad_()
            y = norm(mine, relu=True) if inside else F.relu(norm(mine))
            y.backward(rows_of(dy, [4, 0, 5], group.rank))
            found.append([y, mine.grad, norm.running_var, *(p.grad for p in norm.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        return found[0][:1]

    assert any((y == 0).any() for (y,) in run([4, 0, 5], case))
