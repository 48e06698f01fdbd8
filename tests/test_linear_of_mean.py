"""GraphSAGE's layer of means as one function: DGL's numbers, with what can be computed beside the
wire computed beside it, and DGL's own code wherever somebody could see the difference."""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dgl.nn
import pytest
import torch
from harness import late, run_threads
from harness.blocks import compare_blocks
from harness.graphs import mixed, shop, to_dgl
from harness.late import run_late
from harness.parts import Cutter
from harness.rows import Part, assert_share, results, whole
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sar
from sar.comm import Group
from sar.errors import NotSupportedError

WIDTH = 4
SIZE = 3
aten = torch.ops.aten
aggregate_module = sys.modules["sar.ops.aggregate"]
layer_module = sys.modules["sar.frontends.dgl.mean_layer"]


def sage(width: int = WIDTH, kind: str = "mean", **options: Any) -> nn.Module:
    return dgl.nn.SAGEConv(WIDTH, width, kind, **options)


def changed(**parts: Any) -> nn.Module:
    conv = sage()
    for name, part in parts.items():
        setattr(conv, name, part)
    return conv


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of rows that went through the one function."""
    found: list[int] = []
    compute = layer_module.linear_of_mean

    def noted(relation: Any, x: Tensor, *args: Any) -> Tensor:
        found.append(x.shape[1])
        return compute(relation, x, *args)

    monkeypatch.setattr(layer_module, "linear_of_mean", noted)
    return found


def compare(
    layer: nn.Module,
    partitioned: Cutter,
    size: int = SIZE,
    run: Callable[..., Any] = run_threads,
    method: str = "random",
    on_rank: Callable[[int, nn.Module], Any] = lambda rank, layer: None,
    **policy: Any,
) -> None:
    """``layer`` on some ranks is DGL's on the whole graph, twice."""
    arrays, layer = mixed(), layer.double()
    rows = whole(arrays.total_nodes, (WIDTH,), seed=1)
    with torch.no_grad():
        like = layer(to_dgl(arrays), rows)
    factor = whole(arrays.total_nodes, tuple(like.shape[1:]), seed=2)
    want = results(to_dgl(arrays), copy.deepcopy(layer), rows, factor)
    path = partitioned(arrays, size, method)

    def case(group: Group) -> None:
        part, mine = Part(group, path, sar.Policy(**policy)), copy.deepcopy(layer)
        on_rank(group.rank, mine)
        for _ in range(2):
            mine.zero_grad()
            got = results(part.graph, mine, rows[part.nodes], factor[part.nodes])
            assert_share(group, got, want, part.nodes)

    run(size, case)


class Then(nn.Module):
    """A layer, and what follows it."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(graph, x) if isinstance(step, dgl.nn.SAGEConv) else step(x)
        return x


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "products": sage,
    "narrow": lambda: sage(2),  # multiplied before it is summed
    "wide": lambda: sage(7),
    "no bias": lambda: sage(bias=False),
    "narrow without bias": lambda: sage(2, bias=False),
    "tanh": lambda: sage(activation=torch.tanh),
    "relu": lambda: sage(activation=F.relu),
    "a module": lambda: sage(activation=nn.ReLU()),
    "elu and norm": lambda: sage(activation=F.elu, norm=nn.LayerNorm(WIDTH)),
    "two": lambda: Then(sage(activation=F.relu), sage(3)),
    "relu behind": lambda: Then(sage(), F.relu, sage()),
    "twice the same rows": lambda: Then(sage(), lambda x: x + x.sin(), sage(2)),
}


@pytest.mark.parametrize("rounds", [1, SIZE - 1])
@pytest.mark.parametrize("name", WHOLE)
def test_layers_equal_dgl(name: str, rounds: int, partitioned: Cutter, uses: list[int]) -> None:
    """With rows that arrive at the last moment."""
    torch.manual_seed(0)
    compare(WHOLE[name](), partitioned, run=run_late, rounds=rounds)
    assert uses


@pytest.mark.parametrize("width", [2, WIDTH])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_ranks(width: int, size: int, partitioned: Cutter, uses: list[int]) -> None:
    """On five ranks one has a single row and one has none."""
    compare(sage(width), partitioned, size, method="adversarial" if size > SIZE else "random")
    assert uses


@pytest.mark.parametrize(
    "policy",
    [{"memory_budget": "1MiB"}, {"exchange": "pull"}, {"structure": "one"}, {"zeros": "skip"}],
)
def test_policies(policy: dict[str, Any], partitioned: Cutter, uses: list[int]) -> None:
    compare(WHOLE["two"](), partitioned, **policy)
    assert uses


@pytest.mark.parametrize("width", [2, WIDTH])
@pytest.mark.parametrize("frozen", ["fc_self", "fc_neigh", "all"])
def test_frozen_parts(frozen: str, width: int, partitioned: Cutter, uses: list[int]) -> None:
    layer = sage(width)
    (layer if frozen == "all" else getattr(layer, frozen)).requires_grad_(False)
    compare(layer, partitioned)
    assert uses


class Own(nn.Module):
    """A linear layer that hands what it gets to a function of its own."""

    class _Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return dy @ weight.t(), x.t() @ dy

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self._Product.apply(x, self.weight)


class OwnSage(dgl.nn.SAGEConv):
    """Somebody's own."""


class Inside(Then):
    """Repeated in backward by torch."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if not isinstance(graph, sar.ShardedGraph):
            return super().forward(graph, x)
        return checkpoint(super().forward, graph, x, use_reentrant=False)


class Noting(TorchFunctionMode):
    """Sees every function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Watched(Then):
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with Noting():
            return super().forward(graph, x)


class Weighted(nn.Module):
    """Edge weights; the same on all edges, as it is the call that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = sage()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.conv(graph, x, x.new_full((graph.num_edges(), 1), 0.5))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = sage()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.conv(graph, (x, x))


def hooked(layer: Any) -> nn.Module:
    layer.fc_self.register_forward_hook(lambda part, args, out: 2 * out)
    return layer


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "subclass": lambda: OwnSage(WIDTH, WIDTH, "mean"),
    "gcn": lambda: sage(kind="gcn"),
    "pool": lambda: sage(kind="pool"),
    "own product of rows": lambda: changed(fc_neigh=Own()),
    "own product of the own rows": lambda: changed(fc_self=Own()),
    "a bias of the mean": lambda: changed(fc_neigh=nn.Linear(WIDTH, WIDTH)),
    "a product that is broadcast": lambda: changed(fc_neigh=nn.Linear(WIDTH, 1, bias=False)),
    "a hook on a part": lambda: hooked(sage()),
    "a checkpoint": lambda: Inside(sage()),
    "a mode": lambda: Watched(sage()),
    "edge weights": Weighted,
    "a pair": Pairs,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_computed_as_they_say(kind: str, partitioned: Cutter, uses: list[int]) -> None:
    compare(OTHERS[kind](), partitioned, run=run_late)
    assert not uses


class First(nn.Module):
    """A module of a layer of several relations, for which it reads one side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = sage()

    def forward(self, graph: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.conv(graph, pair[0])


@pytest.mark.parametrize("alone", [False, True])
def test_rows_that_relations_share(alone: bool, partitioned: Cutter, uses: list[int]) -> None:
    """Travel once for all that read them; as a whole each layer would fetch its own."""
    path = partitioned(shop(), 2, "random")

    def case(group: Group) -> None:
        graph = sar.construct_full_graph(sar.load_dgl_partition_data(path, group.rank))
        assert graph["follows"].is_homogeneous
        modules: dict[str, nn.Module] = {name: sage() for name in graph.etypes}
        layer = dgl.nn.HeteroGraphConv({**modules, "follows": First()})
        inputs = {
            ntype: torch.ones(graph.num_nodes(ntype), WIDTH, requires_grad=True)
            for ntype in graph.ntypes
        }
        if alone:
            out = layer.mods["follows"](graph["follows"], (inputs["user"], None))
        else:
            out = layer(graph, inputs)["user"]
        out.sum().backward()

    run_threads(2, case)
    assert bool(uses) is alone


@pytest.mark.parametrize("of", [dgl.nn.SAGEConv, nn.Linear])
def test_changed_classes(
    of: type[nn.Module], partitioned: Cutter, uses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = of.forward
    monkeypatch.setattr(of, "forward", lambda layer, *args: 2 * forward(layer, *args))
    compare(sage(), partitioned)
    assert not uses


@pytest.mark.parametrize("width", [2, WIDTH])
def test_rows_that_nobody_trains(width: int, partitioned: Cutter, uses: list[int]) -> None:
    """Features: their sums are kept where they are summed before they are multiplied."""
    arrays, layer = mixed(), sage(width, activation=F.relu).double()
    rows = whole(arrays.total_nodes, (WIDTH,), seed=1)
    factor = whole(arrays.total_nodes, (width,), seed=2)
    whole_layer, path = copy.deepcopy(layer), partitioned(arrays, SIZE, "random")
    out = whole_layer(to_dgl(arrays), rows)
    (out * factor).sum().backward()

    def case(group: Group) -> None:
        part, mine, sent = Part(group, path), copy.deepcopy(layer), []
        x = rows[part.nodes]
        for _ in range(3):
            mine.zero_grad()
            before = group.counters.sent_bytes
            got = mine(part.graph, x)
            (got * factor[part.nodes]).sum().backward()
            sent.append(group.counters.sent_bytes - before)
            torch.testing.assert_close(got, out[part.nodes], rtol=1e-11, atol=1e-11)
            for ours, theirs in zip(mine.parameters(), whole_layer.parameters(), strict=True):
                total = group.all_reduce(ours.grad.clone())
                torch.testing.assert_close(total, theirs.grad, rtol=1e-11, atol=1e-11)
        assert (2 * sent[2] < sent[0]) is (width == WIDTH), sent

    run_late(SIZE, case)
    assert uses


@pytest.mark.parametrize("every", [4, 50])  # with 50, some ranks have nothing to compute
@pytest.mark.parametrize("widths", [(WIDTH, 3), (7, 2), (2, 5)])
@pytest.mark.parametrize("size", [1, SIZE])
def test_blocks_give_some_rows_of_the_whole_graphs(
    size: int, widths: tuple[int, int], every: int, partitioned: Cutter, uses: list[int]
) -> None:
    first = sage(widths[0], activation=F.relu)
    compare_blocks([first, dgl.nn.SAGEConv(*widths, "mean")], WIDTH, every, size, partitioned)
    assert sorted(uses) == sorted(size * [WIDTH, widths[0]])


def test_evaluation_and_lossy_rows(partitioned: Cutter, uses: list[int]) -> None:
    path, rows = partitioned(mixed(), 2), whole(mixed().total_nodes, (WIDTH,), seed=1)

    def case(group: Group) -> None:
        part, layer = Part(group, path), sage()
        x = rows[part.nodes].float()
        lossy = part.graph.with_policy(sar.Policy(lossy=sar.Lossy(wire_dtype="bfloat16")))
        layer(lossy, x.requires_grad_())
        layer.bfloat16()(part.graph, x.bfloat16().detach().requires_grad_())
        with torch.no_grad():
            layer.float()(part.graph, x)
        layer.requires_grad_(False)(part.graph, x.detach())

    run_threads(2, case)
    assert not uses


def test_ranks_that_go_different_ways_meet(partitioned: Cutter, uses: list[int]) -> None:
    """A hook on one rank alone: the others send it what it waits for, in both passes."""

    def on_rank(rank: int, layer: nn.Module) -> None:
        if rank == 1:
            for conv in layer.parts:
                conv.fc_self.register_forward_hook(lambda part, args, out: None)

    for rounds in (1, SIZE - 1):
        compare(WHOLE["two"](), partitioned, on_rank=on_rank, rounds=rounds)
    assert len(uses) == 2 * 2 * 2 * (SIZE - 1)


def test_a_trace_sees_what_runs_without_it(partitioned: Cutter, uses: list[int]) -> None:
    """Its marks are around the layers, not in them, where they would take them apart."""
    path, rows = partitioned(mixed(), 2), whole(mixed().total_nodes, (WIDTH,), seed=1)

    def case(group: Group) -> set[tuple[str, str]]:
        part, model = Part(group, path), WHOLE["two"]().double()
        with sar.trace(model=model, group=group) as recorded:
            model(part.graph, rows[part.nodes]).sum().backward()
        return {(row["layer"], row["pass"]) for row in recorded.summary()}

    names = {(f"parts.{i}", work) for i in range(2) for work in ("forward", "backward")}
    assert all(names <= found for found in run_threads(2, case))
    assert len(uses) == 4


class Order(TorchDispatchMode):
    """Notes the products that run."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.addmm.default, aten.mm.default, aten.mm.out, aten.addmm_.default):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(owner: Any, name: str, what: str, seen: threading.local) -> Iterator[None]:
    """Inside, calls of a function are noted."""
    function = getattr(owner, name)

    def noting(*args: Any) -> Any:
        seen.order.append(what)
        return function(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, noting)
        yield


@pytest.mark.parametrize("width", [2, WIDTH])
def test_own_rows_are_multiplied_while_others_travel(width: int, partitioned: Cutter) -> None:
    path, seen = partitioned(mixed(), 2, "random"), threading.local()

    def case(group: Group) -> list[str]:
        part, conv = Part(group, path), sage(width).double()
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        seen.order = []
        conv(part.graph, x)  # what is measured once has run
        seen.order = []
        with Order(seen.order):
            conv(part.graph, x)
        return seen.order

    with noted(aggregate_module, "spmm_add", "rows of others", seen):
        orders = run_late(2, case)
    for order in orders:
        first = order.index("rows of others")
        # y = x W^T, where that travels; the product of the own rows; then what came.
        assert order[:first] == ["product"] * (2 if width < WIDTH else 1)


@pytest.mark.parametrize("width", [2, WIDTH])
def test_gradients_leave_before_the_rest_is_computed(width: int, partitioned: Cutter) -> None:
    """By the plain backward of torch."""
    path, seen = partitioned(mixed(), 2, "random"), threading.local()

    def case(group: Group) -> list[str]:
        seen.order = []
        part, conv = Part(group, path), sage(width).double()
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        conv(part.graph, x).sum().backward()
        loss, seen.order = conv(part.graph, x).sum(), []
        with Order(seen.order):
            loss.backward()
        return seen.order

    leaving = noted(aggregate_module, "spmm_into", "gradients leave", seen)
    with leaving, noted(late._Late, "wait", "wait", seen):
        orders = run_late(2, case)
    for order in orders:
        if width < WIDTH:  # what travels is the gradient of z; dW and dx need what came
            assert order == ["gradients leave", "product", "wait", *["product"] * 3]
        else:  # what travels is made of the gradient of the mean, which lies where the mean was
            first, beside = ["product"] * 2, ["product"] * 2
            assert order == [*first, "gradients leave", *beside, "wait"]


class Count(TorchDispatchMode):
    """Counts what runs in the end, gradients included; notes where products lie."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self.places: list[int] = []
        self.added: list[tuple[int, int]] = []  # where a product is added, and its first factor
        self.written: list[int] = []  # where a product is written that has a place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        out = func(*args, **(kwargs or {}))
        if func is aten.addmm.default:
            self.places.append(out.data_ptr())
        if func is aten.addmm_.default:
            self.added.append((args[0].data_ptr(), args[1].data_ptr()))
        if func is aten.mm.out:
            self.written.append(out.data_ptr())
        return out


def counted_pass(group: Group, path: str, conv: nn.Module) -> tuple[Count, int, int]:
    """What runs in both passes of a layer, where its input was and where its result is."""
    part = Part(group, path)
    x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
    for _ in range(2):  # what is measured once has run
        rows = x * 1
        was = rows.data_ptr()
        with Count() as counted:
            out = conv.double()(part.graph, rows)
            del rows
            place = out.data_ptr()
            out.sum().backward()
    return counted, was, place


@pytest.mark.parametrize("size", [1, SIZE])
@pytest.mark.parametrize("activation", [None, F.relu])
def test_one_tensor_forward_and_none_backward(
    activation: Any, size: int, partitioned: Cutter
) -> None:
    """Gradients lie where the mean and the rows were."""
    path = partitioned(mixed(), size, "random")

    def case(group: Group) -> None:
        counted, was, place = counted_pass(group, path, sage(activation=activation))
        assert counted.places == [place]
        (_, mean), (home, _) = counted.added  # to the own product; to what comes home
        assert (counted.written, home) == ([mean], was)
        assert counted.calls[aten.mm.default] == 2  # gradients of both weights
        assert not counted.calls[aten.add.Tensor]

    run_threads(size, case)


@pytest.mark.parametrize("size", [1, SIZE])
def test_no_tensor_backward_where_rows_are_narrower(size: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), size, "random")

    def case(group: Group) -> None:
        counted, was, _ = counted_pass(group, path, sage(2))
        assert counted.written == [was]
        assert [home for home, _ in counted.added] == [was]

    run_threads(size, case)


KEEPS: dict[str, Callable[[Tensor], Any]] = {
    "a name": lambda rows: rows,
    "its memory": lambda rows: rows.detach(),
    "an array": lambda rows: rows.detach().numpy(),
    "a view": lambda rows: rows[1:2],
    "another function": lambda rows: rows.square(),
}


@pytest.mark.parametrize("width", [2, WIDTH])
@pytest.mark.parametrize("kind", KEEPS)
def test_rows_that_somebody_has_stay(kind: str, width: int, partitioned: Cutter) -> None:
    arrays, layer = mixed(), sage(width).double()
    rows = whole(arrays.total_nodes, (WIDTH,), seed=1)
    path = partitioned(arrays, 2, "random")

    def case(group: Group) -> None:
        part, mine = Part(group, path), copy.deepcopy(layer)
        for _ in range(2):
            x = rows[part.nodes].requires_grad_()
            own = x * 1
            before = own.detach().clone()
            out, kept = mine(part.graph, own), KEEPS[kind](own)
            if kind != "a name":
                del own
            was = KEEPS[kind](before)
            out.sum().backward()
            torch.testing.assert_close(torch.as_tensor(kept).detach(), torch.as_tensor(was))
            if kind == "another function":  # it saved them
                assert torch.equal(kept.grad_fn._saved_self, before)

    run_threads(2, case)


class OfAnArray(torch.autograd.Function):
    """Returns memory that somebody else has, which no count of references tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, array: Any) -> Tensor:
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


@pytest.mark.parametrize("width", [2, WIDTH])
def test_rows_in_the_memory_of_an_array_stay(width: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, conv = Part(group, path), sage(width).double()
        array = whole(57, (WIDTH,), seed=1)[part.nodes].numpy().copy()
        before, x = array.copy(), torch.from_numpy(array.copy()).requires_grad_()
        conv(part.graph, OfAnArray.apply(x, array)).sum().backward()
        assert (array == before).all()

    run_threads(2, case)


@pytest.mark.parametrize("size", [1, SIZE])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradients_of_relu_are_written_where_they_came(
    activations: str, size: int, partitioned: Cutter
) -> None:
    """In memory that our loops have read and written, through several layers."""
    path = partitioned(mixed(), size, "random")

    def case(group: Group) -> None:
        part, model = Part(group, path), Then(*(sage(activation=F.relu) for _ in range(3)))
        sar.set_activations(model.double(), activations)
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        for _ in range(2):  # what is measured once has run
            loss = (model(part.graph, x * 1) * 2).sum()
            with Count() as counted:
                loss.backward()
        assert not counted.calls[aten.clone.default]

    run_threads(size, case)


@pytest.mark.parametrize("width", [2, WIDTH])
def test_backward_may_run_twice(width: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, conv = Part(group, path), sage(width, activation=F.relu).double()
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        loss, weight = conv(part.graph, x * 1).square().sum(), conv.fc_neigh.weight
        wanted = [weight, x, conv.fc_self.weight, conv.fc_self.bias]
        grads = [torch.autograd.grad(loss, wanted, retain_graph=keep) for keep in (True, False)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        loss = conv(part.graph, x * 1).square().sum()
        assert torch.equal(torch.autograd.grad(loss, weight)[0], grads[0][0])

    run_threads(2, case)


@pytest.mark.parametrize("width", [2, WIDTH])
def test_gradients_of_gradients_raise(width: int, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, conv = Part(group, path), sage(width)
        x = torch.ones(part.graph.num_nodes(), WIDTH, requires_grad=True)
        with pytest.raises(NotSupportedError, match="create_graph"):
            torch.autograd.grad(conv(part.graph, x).sum(), x, create_graph=True)
        with pytest.raises(NotSupportedError, match="create_graph"):  # never comes to the rows
            out = conv(part.graph, x * 1).sum()
            torch.autograd.grad(out, conv.fc_neigh.weight, create_graph=True)

    run_threads(2, case)


def test_zeros_stay_at_home(partitioned: Cutter) -> None:
    """In both passes between two layers with a relu, whose own function tells what is zero."""
    path = partitioned(mixed(), 2, "random")
    wide = Then(
        dgl.nn.SAGEConv(WIDTH, 64, "mean", activation=F.relu), dgl.nn.SAGEConv(64, 64, "mean")
    )

    def case(group: Group) -> list[int]:
        part, sent = Part(group, path), []
        for zeros in ("send", "skip"):
            graph, mine = part.graph.with_policy(sar.Policy(zeros=zeros)), copy.deepcopy(wide)
            x = whole(57, (WIDTH,), seed=1)[part.nodes].float().requires_grad_()
            for passed in (lambda out: out, lambda out: out.sum().backward()):
                out = mine(graph, x)
                passed(out)
                start = group.counters.sent_bytes
                passed(mine(graph, x))
                sent.append(group.counters.sent_bytes - start)
        return sent

    for forward, both, forward_less, both_less in run_threads(2, case):
        assert forward_less < 0.9 * forward
        assert both_less - forward_less < 0.9 * (both - forward)


def test_zeros_whose_gradient_somebody_reads(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part, conv = Part(group, path, sar.Policy(zeros="skip")), sage()
        x = torch.ones(part.graph.num_nodes(), WIDTH, requires_grad=True).relu()
        loss = conv(part.graph, x).sum()
        x.retain_grad()
        with pytest.raises(NotSupportedError, match="a hook, or retain_grad, on rows"):
            loss.backward()

    run_threads(2, case)


@pytest.mark.parametrize("failing", [1, SIZE])
def test_an_error_leaves_nobody_behind(failing: int, partitioned: Cutter) -> None:
    """The first ranks' layers fail; the others get their rows, and everybody can go on."""
    path = partitioned(mixed(), SIZE, "random")
    rows = whole(mixed().total_nodes, (WIDTH,), seed=1)
    good = sage().double()
    want = good(to_dgl(mixed()), rows).detach()

    def case(group: Group) -> None:
        part, mine = Part(group, path), copy.deepcopy(good)
        own = rows[part.nodes].requires_grad_()
        if group.rank < failing:
            wrong = changed(fc_self=nn.Linear(WIDTH + 1, WIDTH)).double()
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                wrong(part.graph, own)
        else:
            torch.testing.assert_close(mine(part.graph, own), want[part.nodes])
        torch.testing.assert_close(mine(part.graph, own), want[part.nodes])

    run_late(SIZE, case)


def test_ranks_that_differ_in_a_gradient_raise(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group) -> None:
        part = Part(group, path)
        for width in (WIDTH, 2):
            layer = sage(width).requires_grad_(width == WIDTH)
            x = torch.ones(part.graph.num_nodes(), WIDTH, requires_grad=group.rank == 0)
            with pytest.raises(ValueError, match="requires a gradient on ranks \\[0\\] of 2 only"):
                layer(part.graph, x)

    run_threads(2, case)
