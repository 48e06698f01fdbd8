"""What becomes of each undocumented name in a version that lacks it, and what the names mean where
no other test would notice."""

from __future__ import annotations

import fcntl
import importlib
import io
import pickle
import runpy
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import WorkerPool
from torch import Tensor, nn
from torch.autograd import forward_ad

import sar
from sar import _private
from sar.kernels import jit
from sar.nn import wire_first
from sar.partition.unpickle import PlainUnpickler

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
    return pytest.raises(sar.MissingDependencyError, match=rf"has no {name}, expected a version")


class Bare:
    """A tensor of a torch that lacks every such attribute."""

    def is_inference(self) -> bool:
        return False

    def untyped_storage(self) -> object:
        return object()


def backward(call: Any) -> list:
    """What ``call`` returns inside of a backward pass."""
    x, got = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: got.append(call()))
    y.sum().backward()
    return got


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def drawn() -> bool:
    """Whether dropout may draw a seed."""
    return sar.comm.LocalGroup().seeds.draw(sar.comm.LocalGroup()) >= 0


def under(context: Any, call: Callable[[], Any]) -> Any:
    with context:
        return call()


NEST, HOOKS = (1, 2), torch.autograd.graph.saved_tensors_hooks
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip

# The owner and the name that is missing ("": a poor object stands for it), a use, and what it
# gives: another value, or, by a name in quotes, MissingDependencyError.
MISSING: list[tuple[str, str, Callable[[Any], Any], Any]] = [
    ("torch.utils._pytree", "tree_flatten", lambda p: p.tree_flatten(NEST), "tree_flatten"),
    ("torch.utils._pytree", "tree_unflatten", lambda p: p.tree_unflatten(NEST), "tree_unflatten"),
    ("torch.utils._pytree", "tree_leaves", lambda p: p.tree_leaves(NEST), "tree_leaves"),
    ("torch.utils._pytree", "tree_map", lambda p: p.tree_map(len, NEST), "tree_map"),
    ("", "", lambda p: p.version_of(Bare()), r"torch\.Tensor\._version"),
    ("", "", lambda p: p.is_view(Bare()), r"torch\.Tensor\._is_view"),
    ("", "", lambda p: p.without_memory(Bare()), False),
    ("", "", lambda p: p.storage_id(Bare()), r"torch\.UntypedStorage\._cdata"),
    # as make_wrapper, which cannot be taken from torch's class
    ("", "", lambda p: p._found("torch.Tensor._no_such")(2), r"torch\.Tensor\._no_such"),
    ("torch.multiprocessing.reductions", "StorageWeakRef",
     lambda p: p.StorageWeakRef(torch.zeros(4).untyped_storage()), r"torch\..*\.StorageWeakRef"),
    ("torch._C", "DisableTorchFunctionSubclass",
     lambda p: p.without_overrides(), r"torch\._C\.DisableTorchFunctionSubclass"),
    ("torch._utils", "_rebuild_tensor_v2",
     lambda p: p.rebuild_tensor(), r"torch\._utils\._rebuild_tensor_v2"),
    ("torch._C", "_current_graph_task_id",
     lambda p: [p.in_backward(), *backward(p.in_backward), *backward(drawn)], [False, False, True]),
    ("torch:_C:_autograd", "_get_current_graph_task_keep_graph",
     lambda p: backward(p.frees_graph), [False]),
    ("torch._C._autograd", "_top_saved_tensors_default_hooks",
     lambda p: under(HOOKS(len, len), p.innermost_saving_hooks), None),
    ("", "", lambda p: p.has_backward_hooks(Bare()), True),
    ("", "", lambda p: [p.can_be_renumbered(Bare()), p.can_be_renumbered(None)], [False, False]),
    ("", "", lambda p: wire_first(types.SimpleNamespace(grad_fn=Bare())), None),
    ("", "", lambda p: p.memory_events(object()), r"torch\.profiler\..*\.kineto_results"),
    ("", "", lambda p: p.children_of(types.SimpleNamespace(named_children=lambda: [("a", 1)])),
     {"a": 1}),
    ("torch.nn.modules.batchnorm", "_NormBase", lambda p: [
        *(isinstance(make(2), p.NormBase) for make in NORMS), isinstance(Bare(), p.NormBase)
    ], [True] * 7 + [False]),
    ("torch.overrides", "_get_current_function_mode_stack",
     lambda p: under(Mode(), lambda: p.looked_into(nn.Linear(2, 2))), None),
    ("torch.autograd.forward_ad", "_current_level",
     lambda p: p.looked_into(nn.Linear(2, 2)), None),
    ("numba.core.options:DefaultOptions", "_nrt", lambda p: p.without_counting(), {}),
    ("torch", "_disable_dynamo", lambda p: p.lazily_disabled, torch.compiler.disable),
    ("dgl.heterograph_index", "create_unitgraph_from_csr",
     lambda p: p.dgl_makers(), r"dgl\.heterograph_index"),
    ("dgl.partition", "_CAPI_DGLMetisPartition_Hetero",
     lambda p: p.dgl_metis(types.SimpleNamespace(_graph=0), torch.zeros(0)),
     r"dgl\.partition\._CAPI_DGLMetisPartition_Hetero"),
    ("", "", lambda p: p.width_wanted(nn.Linear(3, 4)), None),
]  # fmt: skip


@pytest.mark.parametrize("owner, name, use, found", MISSING)
def test_without_the_name(
    owner: str, name: str, use: Callable[[Any], Any], found: Any, without: Any
) -> None:
    if owner:
        pytest.importorskip(owner.partition(".")[0].partition(":")[0])
    old = without(owner, name) if owner else _private
    if not isinstance(found, str):
        assert use(old) == found
        return
    with raises(found if "." in found else rf"torch\.utils\._pytree\.{found}"):
        use(old)


def test_without_a_library_that_keeps_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__path__", ["nowhere"])
    assert _private.product_buffers_freed.__wrapped__()() is None


@pytest.mark.parametrize("module, use, found", [
    ("numba.core.options", lambda: _private.without_counting(), {}),
    ("numba.core.cgutils", lambda: _private.llvm_tools(), r"numba\.core\.cgutils"),
    ("torch._dynamo", lambda: _private.prepare_optimizers(), None),
])  # fmt: skip
def test_without_the_module(
    module: str, use: Callable[[], Any], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = importlib.import_module(module.rpartition(".")[0])
    importlib.import_module(module)
    use()
    monkeypatch.delattr(parent, module.rpartition(".")[2])
    monkeypatch.setitem(sys.modules, module, None)
    if isinstance(found, str):
        with raises(found):
            use()
    else:
        assert use() == found


# ---- what they mean


class Seen(Tensor):
    """Counts torch's functions that reach it."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Seen.count += 1
        return super().__torch_function__(func, types, args, kwargs)


def test_functions_pass_modes_and_subclasses_by(without: Any) -> None:
    seen, counting = torch.zeros(2).as_subclass(Seen), []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            counting.append(func)
            return func(*args, **(kwargs or {}))

    def calls(context: Any) -> int:
        before = Seen.count
        with context:
            seen.add(1)
        return Seen.count - before

    def in_mode(context: Any) -> int:
        counting.clear()
        with Counting(), context:
            torch.zeros(2).add(1)
        return len(counting)

    assert calls(_private.without_modes()) == calls(_private.without_overrides()) == 0
    old = without("torch._C", "DisableTorchFunction")
    assert in_mode(_private.without_modes()) == 0 < in_mode(old.without_modes())
    assert in_mode(_private.without_overrides()) > 0, "modes still see what plain tensors do"


def test_what_pickles_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = torch.zeros(3).__reduce_ex__(2)
    assert made is _private.rebuild_tensor
    assert (made.__module__, made.__name__) == _private.REBUILD_TENSOR
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what only old files name
        storage, _ = torch.zeros(3).storage().__reduce__()
    assert (storage.__module__, storage.__name__) == _private.STORAGE_FROM_BYTES
    for value, name in ((np.zeros(2), "_reconstruct"), (np.float64(1), "scalar")):
        maker = value.__reduce__()[0]
        assert maker.__name__ == name and name in _private.NUMPY_MAKERS
        assert maker.__module__ in _private.NUMPY_MODULES
    saved = pickle.dumps(np.arange(3))
    assert PlainUnpickler(io.BytesIO(saved)).load().tolist() == [0, 1, 2]
    module = importlib.import_module(np.zeros(2).__reduce__()[0].__module__)
    monkeypatch.delattr(module, "_reconstruct")
    with pytest.raises(AttributeError, match="_reconstruct"):
        PlainUnpickler(io.BytesIO(saved)).load()


def test_backward_is_known_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _private.in_backward() and backward(_private.in_backward) == [True]
    with pytest.raises(sar.SarError, match="drawn again in backward"):
        backward(drawn)
    done: list[int] = []
    backward(lambda: _private.after_backward(lambda: done.append(1)))
    assert done == [1]
    x = torch.ones(2, requires_grad=True)
    found, y = [], x * 2
    y.register_hook(lambda grad: found.append(_private.frees_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert found == [False, True] and not _private.frees_graph()
    monkeypatch.setattr(torch.autograd, "Variable", object())
    backward(lambda: _private.after_backward(lambda: done.append(2)))
    assert done == [1]


def test_hooks_of_saved_tensors_and_of_gradients() -> None:
    assert _private.innermost_saving_hooks() is None
    with HOOKS(lambda x: x, lambda x: x), HOOKS(abs, len):
        assert tuple(_private.innermost_saving_hooks()) == (abs, len)
    x = torch.ones(2, requires_grad=True) * 2
    handle = x.register_hook(lambda grad: grad)
    assert _private.has_backward_hooks(x)
    handle.remove()
    assert not _private.has_backward_hooks(x)


def test_backward_follows_the_numbers_of_nodes() -> None:
    def branches(renumber: bool) -> list[str]:
        order: list[str] = []
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
        return order

    assert (branches(False), branches(True)) == (["second", "first"], ["first", "second"])


def test_memory_is_profiled() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        x = torch.zeros(1 << 20)
        del x
    sizes = [size for _, size in sorted(_private.memory_events(prof))]
    assert sizes.index(4 << 20) < sizes.index(-(4 << 20))


def test_children_under_each_of_their_names() -> None:
    model, shared = nn.Module(), nn.Linear(2, 2)
    model.one, model.two = shared, shared
    model.register_module("none", None)
    assert _private.children_of(model) == {"one": shared, "two": shared, "none": None}
    assert all(isinstance(make(2), _private.NormBase) for make in NORMS)
    assert not isinstance(nn.LayerNorm(2), _private.NormBase)


def test_who_looks_into_a_layer() -> None:
    layer = nn.Sequential(part := nn.Linear(2, 2))
    layer.register_forward_hook(lambda *_: None)  # outside
    adders = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
    for name in adders:
        handle = getattr(part, f"register_{name}")(lambda *_: None)
        assert _private.looked_into(layer) == "Linear in it has a hook", name
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "global hooks" in str(_private.looked_into(layer))
    handle.remove()
    with torch.device("cpu"):
        assert _private.looked_into(layer) is None
        with Mode():
            assert "the mode Mode" in str(_private.looked_into(layer))
    with forward_ad.dual_level():
        assert "forward mode" in str(_private.looked_into(layer))


def test_kernels_own_no_memory_and_are_compiled_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numba = pytest.importorskip("numba")

    def take(size):
        return np.empty(size)

    assert _private.without_counting() == {"_nrt": False}
    with pytest.raises(numba.TypingError, match="[Oo]nly accept"):
        numba.njit(**_private.without_counting())(take)(3)
    kernel = _private.njit(nogil=True)(lambda x: x * 2)
    assert kernel(2) == 4
    limit = 1 << 20
    monkeypatch.setattr(_private.resource, "getrlimit", lambda kind: (limit, limit))
    assert kernel(3) == 6, "it is compiled"
    with pytest.raises(MemoryError, match=r"0 MiB are left .* expected 64 MiB.*ulimit -v"):
        kernel(2.5)


KERNEL = (
    """
from sar._private import njit

@njit(cache=True)
def step(x):
    return x + 1

@njit(cache=True)
def loop(x):
"""
    + 25
    * """
    for i in range(x):
        x = step(x) if x > i else i - x
"""
    + "    return x\n"
)


def compiled(group: Any, folder: str) -> int:
    """How often this process compiled the kernel, beside a small one that loads the compiler."""
    sys.path.insert(0, folder)
    kernels = importlib.import_module("kernels_of_ranks")
    sys.path.remove(folder)
    assert kernels.step(0.5) == 1.5
    group.agree(None)
    assert kernels.loop(0) == 0
    return sum(kernels.loop.stats.cache_misses.values())


def test_one_process_compiles_for_all(
    processes: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody waits for ever for one that was stopped while it did."""
    (tmp_path / "kernels_of_ranks.py").write_text(KERNEL)
    assert sorted(processes.run(2, compiled, str(tmp_path))) == [0, 1]
    (tmp_path / "again.py").write_text(KERNEL)
    monkeypatch.setattr("sar.alone.PATIENCE", 0.1)
    with open(tmp_path / "again.py") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert runpy.run_path(other.name)["step"](1) == 2


def test_the_compiler_looks_past_untraced_functions() -> None:
    """And is not loaded before code is compiled."""
    looked = []

    def asks(x: Tensor) -> Tensor:
        looked.append(torch.compiler.is_compiling())
        return x + 1

    plain, other = jit.untraced(asks), jit.untraced(asks, lambda x: x + 2)
    compiled = torch.compile(lambda x: plain(x) * other(x), backend="eager")
    assert compiled(torch.zeros(1)).item() == 2 and (plain(torch.ones(1)) == 2).all()
    assert other(torch.zeros(1)).item() == 1 and looked == [False] * 3
    torch._dynamo.reset()


# ---- DGL

NAMES = [n for n, value in vars(_private).items() if isinstance(value, _private.DglName)]


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
        found = getattr(importlib.import_module(module), function)
        code = getattr(found, "__wrapped__", found).__code__
        assert list(code.co_varnames[: code.co_argcount]) == taken


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
