"""Each undocumented name: what it means in the installed versions, and what is done without it."""

from __future__ import annotations

import gc
import importlib
import pickle
import runpy
import sys
import types
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sar
from sar import _private
from sar.errors import MissingDependencyError
from sar.kernels import jit

SOURCE = Path(_private.__file__)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as it is where an attribute of another one is missing."""

    def read(owner: str, name: str) -> types.SimpleNamespace:
        module, *parts = owner.split(":")
        value: Any = importlib.import_module(module)
        for part in parts:
            value = getattr(value, part)
        monkeypatch.delattr(value, name)
        return types.SimpleNamespace(**runpy.run_path(str(SOURCE)))

    return read


def raises(name: str) -> Any:
    return pytest.raises(MissingDependencyError, match=rf"has no {name}, expected a version")


class Bare:
    """A tensor of a torch that lacks every such attribute."""

    def is_inference(self) -> bool:
        return False

    def untyped_storage(self) -> object:
        return object()


# ---- torch: tensors

Pair = namedtuple("Pair", "one two")


def test_nests_are_taken_apart_and_put_together() -> None:
    nest = ([1, {"a": 2}], Pair(3, (None,)))
    leaves, spec = _private.tree_flatten(nest)
    assert leaves == _private.tree_leaves(nest) == [1, 2, 3, None]
    assert _private.tree_unflatten(leaves, spec) == nest
    twice = _private.tree_map(lambda leaf: (leaf or 0) * 2, nest)
    assert twice == ([2, {"a": 4}], Pair(6, (0,))) and type(twice[1]) is Pair


@pytest.mark.parametrize("name", ["tree_flatten", "tree_unflatten", "tree_leaves", "tree_map"])
def test_without_nests_their_use_raises(without: Any, name: str) -> None:
    old = without("torch.utils._pytree", name)
    with raises(rf"torch\.utils\._pytree\.{name}"):
        getattr(old, name)((1, 2))


def test_writes_are_counted() -> None:
    x = torch.zeros(3)
    before = _private.version_of(x)
    x[1:].add_(1)
    assert _private.version_of(x.detach()) == _private.version_of(x) == before + 1
    with torch.inference_mode():
        assert _private.version_of(torch.zeros(3).add_(1)) == -1
    with raises(r"torch\.Tensor\._version"):
        _private.version_of(Bare())  # type: ignore[arg-type]


def test_views_are_known() -> None:
    x = torch.zeros(4)
    assert _private.is_view(x[1:]) and not _private.is_view(x) and not _private.is_view(x[1:] * 1)
    with raises(r"torch\.Tensor\._is_view"):
        _private.is_view(Bare())  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_of_one_memory_have_one_storage(device: str) -> None:
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    assert _private.storage_id(x) == _private.storage_id(x[1:].detach().view(3, 1))
    assert _private.storage_id(x) != _private.storage_id(y)
    with raises(r"torch\.UntypedStorage\._cdata"):
        _private.storage_id(Bare())  # type: ignore[arg-type]


def test_weak_references_to_storages_expire(without: Any) -> None:
    x = torch.zeros(4)
    view = x[1:].detach()
    seen = _private.StorageWeakRef(x.untyped_storage())
    del x
    gc.collect()
    assert not seen.expired()
    del view
    gc.collect()
    assert seen.expired()
    old = without("torch.multiprocessing.reductions", "StorageWeakRef")
    with raises(r"torch\.multiprocessing\.reductions\.StorageWeakRef"):
        old.StorageWeakRef(torch.zeros(4).untyped_storage())


class Seen(Tensor):
    """Counts torch's functions that reach it."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Seen.count += 1
        return super().__torch_function__(func, types, args, kwargs)


class Hollow(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(func)


def test_a_wrapper_has_a_shape_and_no_memory() -> None:
    made = _private.make_wrapper(Hollow, [1 << 40, 3], dtype=torch.float16, device="cpu")
    assert type(made) is Hollow and made.shape == (1 << 40, 3)
    assert made.dtype == torch.float16 and made.device.type == "cpu"


def test_functions_pass_modes_and_subclasses_by(without: Any) -> None:
    seen = torch.zeros(2).as_subclass(Seen)

    def calls(context: Any) -> int:
        before = Seen.count
        with context:
            seen.add(1)
        return Seen.count - before

    assert calls(_private.without_modes()) == calls(_private.without_overrides()) == 0
    counting = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            counting.append(func)
            return func(*args, **(kwargs or {}))

    def in_mode(context: Any) -> int:
        counting.clear()
        with Mode(), context:
            torch.zeros(2).add(1)
        return len(counting)

    old = without("torch._C", "DisableTorchFunction")
    assert in_mode(_private.without_modes()) == 0 < in_mode(old.without_modes())
    assert in_mode(_private.without_overrides()) > 0, "modes still see what plain tensors do"


def test_without_a_way_around_subclasses_their_use_raises(
    without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = without("torch._C", "DisableTorchFunctionSubclass")
    with raises(r"torch\._C\.DisableTorchFunctionSubclass"):
        old.without_overrides()


def test_a_name_that_nobody_has_raises_when_it_is_called() -> None:
    """How `make_wrapper` ends, which cannot be taken from torch's class."""
    nothing = _private._found("torch.Tensor._no_such_subclass")
    with raises(r"torch\.Tensor\._no_such_subclass"):
        nothing(Tensor, [2], dtype=torch.float32)


def test_pickled_tensors_name_what_makes_them(without: Any) -> None:
    made, _ = torch.zeros(3).__reduce_ex__(2)
    assert made is _private.rebuild_tensor
    assert (made.__module__, made.__name__) == _private.REBUILD_TENSOR
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what only old files name
        storage, _ = torch.zeros(3).storage().__reduce__()
    assert (storage.__module__, storage.__name__) == _private.STORAGE_FROM_BYTES
    old = without("torch._utils", "_rebuild_tensor_v2")
    assert old.REBUILD_TENSOR == _private.REBUILD_TENSOR
    with raises(r"torch\._utils\._rebuild_tensor_v2"):
        old.rebuild_tensor()


# ---- torch: autograd


def backward(call: Any) -> list:
    """What ``call`` returns inside of a backward pass."""
    x, got = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: got.append(call()))
    y.sum().backward()
    return got


def test_backward_is_known_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _private.in_backward() and backward(_private.in_backward) == [True]
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert not _private.in_backward() and backward(_private.in_backward) == [False]
    assert backward(lambda: sar.comm.LocalGroup().seeds.draw(sar.comm.LocalGroup()) >= 0) == [True]


def test_the_innermost_hooks_of_saved_tensors(without: Any) -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    def unpack(x: Tensor) -> Tensor:
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    assert _private.innermost_saving_hooks() is None
    with hooks(lambda x: x, lambda x: x), hooks(pack, unpack):
        assert tuple(_private.innermost_saving_hooks()) == (pack, unpack)
    old = without("torch._C._autograd", "_top_saved_tensors_default_hooks")
    with hooks(pack, unpack):
        assert old.innermost_saving_hooks() is None


def test_hooks_on_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    assert not _private.has_backward_hooks(x)
    handle = x.register_hook(lambda grad: grad)
    assert _private.has_backward_hooks(x)
    handle.remove()
    assert not _private.has_backward_hooks(x)
    assert _private.has_backward_hooks(Bare()), "who cannot know takes it for read"  # type: ignore


def test_backward_follows_the_numbers_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def branches(renumber: bool) -> list[str]:
        order.clear()
        x = torch.ones(2, requires_grad=True)
        first, second = x * 2, x * 3
        for name, y in (("first", first), ("second", second)):
            y.register_hook(lambda grad, name=name: order.append(name))
        total = first + second
        if renumber:
            one, two = first.grad_fn, second.grad_fn
            assert _private.can_be_renumbered(one)
            assert _private.sequence_number(one) < _private.sequence_number(two)
            _private.set_sequence_number(one, _private.sequence_number(two) + (1 << 40))
        total.sum().backward()
        return list(order)

    assert (branches(False), branches(True)) == (["second", "first"], ["first", "second"])


def test_without_numbers_torchs_order_stays() -> None:
    from sar.nn import wire_first

    assert not _private.can_be_renumbered(Bare()) and not _private.can_be_renumbered(None)
    wire_first(types.SimpleNamespace(grad_fn=Bare()))  # type: ignore[arg-type]


def test_a_call_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    backward(lambda: _private.after_backward(lambda: done.append(1)))
    assert done == [1]
    monkeypatch.setattr(torch.autograd, "Variable", object())
    backward(lambda: _private.after_backward(lambda: done.append(2)))
    assert done == [1]


def test_memory_is_profiled() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        x = torch.zeros(1 << 20)
        del x
    sizes = [size for _, size in sorted(_private.memory_events(prof))]
    assert 4 << 20 in sizes and -(4 << 20) in sizes
    assert sizes.index(4 << 20) < sizes.index(-(4 << 20))
    for poor in (object(), types.SimpleNamespace(profiler=object())):
        with raises(r"torch\.profiler\.profile\.profiler\.kineto_results"):
            _private.memory_events(poor)


# ---- torch: modules


def test_children_under_each_of_their_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Module()
    model.one, model.two = shared, shared
    assert _private.children_of(model) == {"one": shared, "two": shared}
    model.register_module("none", None)
    assert _private.children_of(model) == {"one": shared, "two": shared, "none": None}
    poor = types.SimpleNamespace(named_children=lambda: iter([("one", shared)]))
    assert _private.children_of(poor) == {"one": shared}  # type: ignore[arg-type]


def test_norms_have_one_class(without: Any) -> None:
    old = without("torch.nn.modules.batchnorm", "_NormBase")
    for make in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
                 nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):  # fmt: skip
        assert isinstance(make(2), _private.NormBase) and isinstance(make(2), old.NormBase)
    for part in (nn.LayerNorm(2), nn.Linear(2, 2)):
        assert not isinstance(part, _private.NormBase) and not isinstance(part, old.NormBase)


def test_optimizers_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    _private.prepare_optimizers()
    assert "torch._dynamo" in sys.modules
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it fails
    _private.prepare_optimizers()


# ---- numba


def test_kernels_do_not_count(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")

    def add(rows, one):
        for i in range(rows.shape[0]):
            rows[i] += one

    def take(size):
        return np.empty(size)

    options = _private.without_counting()
    old = without("numba.core.options:DefaultOptions", "_nrt")
    assert (options, old.without_counting()) == ({"_nrt": False}, {})
    for chosen in (options, {}):
        rows = np.zeros(3)
        numba.njit(**chosen)(add)(rows, 2.0)
        assert rows.tolist() == [2, 2, 2]
    assert len(numba.njit(take)(3)) == 3
    with pytest.raises(numba.TypingError, match="[Oo]nly accept"):  # they own no memory
        numba.njit(**options)(take)(3)
    monkeypatch.setitem(sys.modules, "numba.core.options", None)
    assert _private.without_counting() == {}


def test_kernels_are_compiled_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")

    def double(x):
        return x * 2

    kernel = _private.njit(nogil=True)(double)
    assert kernel(2) == 4
    limit = 1 << 20
    monkeypatch.setattr(_private.resource, "getrlimit", lambda kind: (limit, limit))
    assert kernel(3) == 6, "it is compiled"
    with pytest.raises(MemoryError, match=r"double: 0 MiB are left .* expected 64 MiB.*ulimit -v"):
        kernel(2.5)


def test_numba_writes_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    tools = _private.llvm_tools()
    assert all(map(callable, (tools.get_or_insert_function, tools.raw_memcpy, tools.for_range)))
    import numba.core

    monkeypatch.delattr(numba.core, "cgutils")
    monkeypatch.setitem(sys.modules, "numba.core.cgutils", None)
    with raises(r"numba\.core\.cgutils"):
        _private.llvm_tools()


# ---- numpy


def test_pickled_arrays_name_their_makers() -> None:
    for value, name in ((np.zeros(2), "_reconstruct"), (np.float64(1), "scalar")):
        made = value.__reduce__()[0]
        assert made.__name__ == name and name in _private.NUMPY_MAKERS
        assert made.__module__ in _private.NUMPY_MODULES


def test_a_maker_that_numpy_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from sar.partition.unpickle import PlainUnpickler

    saved = pickle.dumps(np.arange(3))
    assert PlainUnpickler(io.BytesIO(saved)).load().tolist() == [0, 1, 2]
    module = importlib.import_module(np.zeros(2).__reduce__()[0].__module__)
    monkeypatch.delattr(module, "_reconstruct")
    with pytest.raises(AttributeError, match="_reconstruct"):
        PlainUnpickler(io.BytesIO(saved)).load()


# ---- DGL

NAMES = [n for n, value in vars(_private).items() if isinstance(value, _private.DglName)]


def arguments(function: Any) -> list[str]:
    code = getattr(function, "__wrapped__", function).__code__
    return list(code.co_varnames[: code.co_argcount])


@pytest.mark.parametrize(
    "name, taken",
    [
        ("EDGE_SOFTMAX", ["gidx", "logits", "eids", "norm_by"]),
        ("SPMM", ["gidx", "op", "reduce_op", "lhs_data", "rhs_data"]),
        ("SDDMM", ["gidx", "op", "lhs_data", "rhs_data", "lhs_target", "rhs_target"]),
        ("TYPED_EDGE_SOFTMAX", ["gidx", "eids", "norm_by"]),
        ("TYPED_SPMM", ["g", "op", "reduce_op", "lhs_len"]),
        ("TYPED_SDDMM", ["g", "op", "lhs_len", "lhs_target", "rhs_target"]),
        ("TOP_ROWS", ["graph", "typestr", "feat", "k", "descending", "sortby", "ntype_or_etype"]),
    ],
)
def test_functions_of_dgl_that_layers_call(name: str, taken: list[str]) -> None:
    pytest.importorskip("dgl")
    function, modules = getattr(_private, name)
    for module in modules:
        assert arguments(getattr(importlib.import_module(module), function)) == taken


def test_widths_that_layers_of_dgl_want() -> None:
    dgl_nn = pytest.importorskip("dgl.nn")
    assert _private.width_wanted(dgl_nn.SAGEConv((3, 5), 4, "mean")) == 3
    assert _private.width_wanted(dgl_nn.GATConv(6, 4, 2)) == 6
    assert _private.width_wanted(dgl_nn.GraphConv(7, 4)) == 7
    assert _private.width_wanted(torch.nn.Linear(3, 4)) is None


def test_what_dgl_lacks_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dgl")
    from sar.frontends.dgl import patches

    patches.uninstall()
    for name in NAMES:
        function, modules = getattr(_private, name)
        for module in modules:
            monkeypatch.delattr(importlib.import_module(module), function)
    patches.install()
    for name in NAMES:
        function, modules = getattr(_private, name)
        assert not any(hasattr(sys.modules[module], function) for module in modules)
    patches.uninstall()


def test_dgls_metis_cuts_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    dgl = pytest.importorskip("dgl")
    ends = torch.arange(7), torch.arange(1, 8)
    graph = dgl.graph((torch.cat(ends), torch.cat(ends[::-1])))
    metis, index, weights = _private.dgl_metis(graph, torch.zeros(0, dtype=torch.int64))
    owner = metis(index, 2, weights, "recursive", True).asnumpy()
    assert sorted(owner) == [0, 0, 0, 0, 1, 1, 1, 1] and (np.diff(owner) != 0).sum() == 1
    monkeypatch.delattr(dgl.partition, "_CAPI_DGLMetisPartition_Hetero")
    with raises(r"dgl\.partition\._CAPI_DGLMetisPartition_Hetero"):
        _private.dgl_metis(graph, weights)


def test_dgls_blocks_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    dgl = pytest.importorskip("dgl")
    makers = _private.dgl_makers()
    src, dst, formats = torch.tensor([2, 0, 1]), torch.tensor([0, 0, 1]), ["coo", "csr", "csc"]
    starts = torch.tensor([0, 2, 3])
    for made in (
        makers.from_coo(2, 3, 2, src, dst, formats),
        makers.from_csr(2, 3, 2, starts, src, src[:0], formats, True),
    ):
        meta = makers.meta_graph(2, [0], [1], True)
        index = makers.from_relations(meta, [made], makers.to_index([3, 2], "int64"))
        block = makers.block(index, (["_N"], ["_N"]), ["_E"])
        assert isinstance(block, type(dgl.create_block((src, dst))))
        assert (block.num_src_nodes(), block.num_dst_nodes()) == (3, 2)
        ends = sorted(zip(*(one.tolist() for one in block.edges())))
        assert ends == [(0, 0), (1, 1), (2, 0)]
    monkeypatch.delattr(dgl.heterograph_index, "create_unitgraph_from_csr")
    with raises(r"dgl\.heterograph_index"):
        _private.dgl_makers()


def test_all_names_are_tested_here() -> None:
    """Every public name of the module stands in this file."""
    text = Path(__file__).read_text()
    made = [n for n, v in vars(_private).items() if not n.startswith("_") and _is_own(n, v)]
    assert len(made) > 30
    assert [name for name in made if name not in text] == []


def _is_own(name: str, value: Any) -> bool:
    source = SOURCE.read_text()
    return f"\ndef {name}(" in source or f"\n{name}" in source


# ---- what others can see of a layer


class Noted(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_looks_into_a_layer(without: Any) -> None:
    from torch.autograd import forward_ad

    layer = nn.Sequential(part := nn.Linear(2, 2))
    assert _private.looked_into(layer) is None
    layer.register_forward_hook(lambda *_: None)  # outside
    adders = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
    for name in adders:
        handle = getattr(part, f"register_{name}")(lambda *_: None)
        assert _private.looked_into(layer) == "Linear in it has a hook", name
        handle.remove()
    assert _private.looked_into(layer) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "global hooks" in str(_private.looked_into(layer))
    handle.remove()
    with torch.device("cpu"):
        assert _private.looked_into(layer) is None
        with Noted():
            assert "the mode Noted" in str(_private.looked_into(layer))
            old = without("torch.overrides", "_get_current_function_mode_stack")
            assert old.looked_into(layer) is None
    with forward_ad.dual_level():
        assert "forward mode" in str(_private.looked_into(layer))
    assert without("torch.autograd.forward_ad", "_current_level").looked_into(layer) is None


def test_whether_a_backward_pass_keeps_its_graph(without: Any) -> None:
    found = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, ask: Any) -> Tensor:
            ctx.ask = ask
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
            found.append(ctx.ask())
            return dout, None

    x = torch.ones(1, requires_grad=True)
    out = Asks.apply(x, _private.frees_graph)
    out.backward(retain_graph=True)
    out.backward()
    assert found == [False, True] and not _private.frees_graph()
    old = without("torch:_C:_autograd", "_get_current_graph_task_keep_graph")
    Asks.apply(x, old.frees_graph).backward()
    assert found[2:] == [False]


# ---- the compiler


def test_the_compiler_looks_past_untraced_functions(
    without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not loaded before code is compiled; a torch without the name loads it at once."""
    looked = []

    def asks(x: Tensor) -> Tensor:
        looked.append(torch.compiler.is_compiling())
        return x + 1

    plain, other = jit.untraced(asks), jit.untraced(asks, lambda x: x + 2)
    compiled = torch.compile(lambda x: plain(x) * other(x), backend="eager")
    assert compiled(torch.zeros(1)).item() == 2 and (plain(torch.ones(1)) == 2).all()
    assert other(torch.zeros(1)).item() == 1 and looked == [False] * 3
    torch._dynamo.reset()
    old = without("torch", "_disable_dynamo")
    monkeypatch.undo()  # torch itself needs it
    assert old.lazily_disabled is torch.compiler.disable
