"""Every name of torch, numba, numpy and DGL that this library uses and they do not document.

Such a name may go, or mean another thing, in any new version. Each says what becomes of it where it
is missing: another way, or `MissingDependencyError` when it is used, never when this library is
imported. `tests/test_private.py` shows both for each.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from sar.alone import alone
from sar.errors import MissingDependencyError


def _missing(name: str, *_: Any, **__: Any) -> NoReturn:
    package = name.partition(".")[0]
    version = getattr(importlib.import_module(package), "__version__", "")
    raise MissingDependencyError(
        f"{package} {version} has no {name}, expected a version that this library was tested with: "
        "pip install torch==2.13.0 dgl==1.1.3 'numba<0.70'"
    )


def _found(name: str, otherwise: Any = None) -> Any:
    """torch's object of a dotted name, else ``otherwise``, else what raises when called."""
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    if value is not None:
        return value
    return partial(_missing, name) if otherwise is None else otherwise


# ---- torch: the compiler

lazily_disabled: Any = _found("torch._disable_dynamo", torch.compiler.disable)
"""``torch.compiler.disable``, that loads the compiler with the first call; missing: that itself,
which loads it with the library."""


# ---- torch: tensors

tree_flatten: Any = _found("torch.utils._pytree.tree_flatten")
"""(leaves, spec) of nested tuples, lists and dicts; missing: raises when called, as the next."""
tree_unflatten: Any = _found("torch.utils._pytree.tree_unflatten")
"""What leaves and spec were made of."""
tree_leaves: Any = _found("torch.utils._pytree.tree_leaves")
"""The leaves alone."""
tree_map: Any = _found("torch.utils._pytree.tree_map")
"""The same nest of what a function makes of each leaf."""


def version_of(tensor: Tensor) -> int:
    """Number of writes into the tensor's memory, -1 of an inference tensor (uncounted); missing:
    raises."""
    try:
        return -1 if tensor.is_inference() else tensor._version
    except AttributeError:
        _missing("torch.Tensor._version")


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows it to be a view of another tensor; missing: raises."""
    try:
        return tensor._is_view()
    except AttributeError:
        _missing("torch.Tensor._is_view")


def without_memory(tensor: Tensor) -> bool:
    """Whether it is one of forward mode's zeros, whose storage cannot be read; missing: no."""
    return getattr(tensor, "_is_zerotensor", bool)()


def storage_id(tensor: Tensor) -> int:
    """A number that tensors on one memory share, also on the meta device; missing: raises."""
    try:
        return tensor.untyped_storage()._cdata
    except AttributeError:
        _missing("torch.UntypedStorage._cdata")


StorageWeakRef: Any = _found("torch.multiprocessing.reductions.StorageWeakRef")
"""A reference to a storage with ``expired()``; missing: raises when called."""

make_wrapper: Any = _found("torch.Tensor._make_wrapper_subclass")
"""``(cls, shape, dtype=, device=)``: a tensor of a subclass without memory; missing: raises."""

without_modes: Any = _found("torch._C.DisableTorchFunction", nullcontext)
"""A context in which no function mode and no subclass sees torch's functions, for plain tensors;
missing: they see them, which is slower."""

without_overrides: Any = _found("torch._C.DisableTorchFunctionSubclass")
"""A context in which subclasses are tensors as any; missing: raises when called."""

rebuild_tensor: Any = _found("torch._utils._rebuild_tensor_v2")
"""What a pickled tensor names to be made of its storage; missing: raises when called."""
REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
"""The same as files name it, whatever torch has."""

STORAGE_FROM_BYTES = ("torch.storage", "_load_from_bytes")
"""What a pickled storage names, in files alone."""

_DispatchMode: Any = _found("torch.utils._python_dispatch.TorchDispatchMode")


def watched(run: Callable[[Any, tuple, dict], Any]) -> Any:
    """A context in which ``run(operator, args, kwargs)`` stands for each operator below autograd
    in this thread, in backward passes too; missing: raises."""
    if not isinstance(_DispatchMode, type):
        _missing("torch.utils._python_dispatch.TorchDispatchMode")

    class Watched(_DispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:  # it would import the compiler, 70 MB
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
            return run(func, args, kwargs or {})

    return Watched()


# ---- torch: autograd


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; missing: no, which refuses nothing there."""
    task = _found("torch._C._current_graph_task_id", lambda: -1)
    return task() != -1


def frees_graph() -> bool:
    """Whether a backward pass is running that frees its saved tensors for good; missing: no."""
    keeps: Any = _found("torch._C._autograd._get_current_graph_task_keep_graph", lambda: True)
    return in_backward() and not keeps()


def innermost_saving_hooks() -> Any:
    """(pack, unpack) hooks of saved tensors in force, or ``None``; missing: ``None``."""
    return _innermost(True)


_innermost: Any = _found(
    "torch._C._autograd._top_saved_tensors_default_hooks", lambda tracing: None
)


def has_backward_hooks(tensor: Tensor) -> bool:
    """Whether somebody has hooks on the gradient of this very tensor; missing: taken to be so."""
    return bool(getattr(tensor, "_backward_hooks", True))


def can_be_renumbered(node: Any) -> bool:
    """Whether an autograd node's sequence number can be set; where not, torch's order stays."""
    return hasattr(node, "_set_sequence_nr") and hasattr(node, "_sequence_nr")


def sequence_number(node: Any) -> int:
    """When an autograd node was made: of those that can run, backward takes the highest; missing:
    see :func:`can_be_renumbered`."""
    return node._sequence_nr()


def set_sequence_number(node: Any, number: int) -> None:
    """Let backward take the node at another time; missing: see :func:`can_be_renumbered`."""
    node._set_sequence_nr(number)


def after_backward(call: Callable[[], Any]) -> None:
    """Call when this thread's backward pass ends; missing: never, what follows counts as backward's
    time."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if hasattr(engine, "queue_callback"):
        engine.queue_callback(call)


def memory_events(profiled: Any) -> list[tuple[int, int]]:
    """(nanoseconds, bytes taken or, below 0, given back) of a ``torch.profiler.profile`` with
    ``profile_memory``; missing: raises."""
    results: Any = getattr(getattr(profiled, "profiler", None), "kineto_results", None)
    if not hasattr(results, "events"):
        _missing("torch.profiler.profile.profiler.kineto_results")
    events = [event for event in results.events() if event.name() == "[memory]"]
    return [(event.start_ns(), event.nbytes()) for event in events]


# ---- torch: modules


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children by name, one that has several names under each; missing: under its first."""
    return getattr(module, "_modules", None) or dict(module.named_children())


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def looked_into(layer: nn.Module) -> str | None:
    """Who could see now that a layer is computed as a whole, or would have it compute another, in a
    few words: hooks of its parts, modes, autocast, gradients in forward mode; missing: whatever has
    another name than it had. Hooks of the layer itself run outside of it; those of parts that have
    no parameters yet make them."""
    for name in _GLOBAL_HOOKS:
        if getattr(nn.modules.module, name, None):
            return "torch has global hooks of modules, which look into it"
    for part in layer.modules():
        for name in _HOOKS:
            if getattr(part, name, None) and part is not layer and not _is_lazy(part):
                return f"{type(part).__name__} in it has a hook"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    for mode in _modes():
        if not isinstance(mode, getattr(_found(_DEVICE, ()), "DeviceContext", ())):
            return f"the mode {type(mode).__name__} looks at torch functions"
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return "forward mode gradients are computed"
    return None


def _is_lazy(part: nn.Module) -> bool:
    return any(map(nn.parameter.is_lazy, part.parameters(recurse=False)))


_modes: Any = _found("torch.overrides._get_current_function_mode_stack", list)
_DEVICE = "torch.utils._device"
"""Module of the mode behind ``torch.device`` as a context, which changes no result of a layer;
missing: it looks into layers as others do."""


NormBase: Any = _found(
    "torch.nn.modules.batchnorm._NormBase",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    + (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Class of norms with statistics over rows, for ``isinstance``; missing: torch's own seven."""


def prepare_optimizers() -> None:
    """Import what the first step of an optimizer would; missing: nothing to import."""
    with suppress(ImportError):
        importlib.import_module("torch._dynamo")


@cache
def product_buffers_freed() -> Callable[[], Any]:
    """A call that gives back what MKL keeps of matrix products for this thread; missing: nothing,
    1 MB a thread stays."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so"))
        return library.mkl_serv_thread_free_buffers
    return lambda: None


# ---- numba

_ROOM = 64 << 20  # bytes; 12 MiB is the most that was seen


def without_counting() -> dict[str, bool]:
    """``numba.njit`` options for kernels that own no memory: no counting of references to arrays;
    missing: none, they count, which is slower."""
    try:
        from numba.core.options import DefaultOptions
    except ImportError:
        return {}
    return {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}


def njit(**options: Any) -> Callable[[Callable], Any]:
    """``numba.njit`` whose ``compile`` raises ``MemoryError`` where a limit leaves no room, on
    which LLVM ends the process, and waits for a process that compiles the same; missing, as numba
    calls another name: the process ends, and all compile."""
    import numba

    def decorate(function: Callable) -> Any:
        dispatcher = numba.njit(**options)(function)
        without_check = dispatcher.compile

        def compile(signature: Any) -> Any:
            _check_room(function.__name__)
            with alone(function.__code__.co_filename):
                return without_check(signature)

        dispatcher.compile = compile
        return dispatcher

    return decorate


def _check_room(name: str) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if limit - used < _ROOM:
            raise MemoryError(
                f"{name}: {max(0, limit - used) >> 20} MiB are left to compile it, expected "
                f"{_ROOM >> 20} MiB: the limit of addresses (ulimit -v) is {limit >> 20} MiB"
            )


def llvm_tools() -> Any:
    """Numba's ``get_or_insert_function``, ``raw_memcpy``, ``for_range``; missing: raises."""
    try:
        from numba.core import cgutils
    except ImportError:
        _missing("numba.core.cgutils")
    return cgutils


# ---- numpy

NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
"""Where pickled arrays of numpy 1 and 2 name their makers; missing: numpy refuses the file."""

NUMPY_MAKERS = ("_reconstruct", "scalar")
"""Those makers, of arrays and of single numbers."""


# ---- DGL


class DglName(NamedTuple):
    """A function of DGL's own that layers call, and the modules that hold it under this name."""

    name: str
    modules: tuple[str, ...]


EDGE_SOFTMAX = DglName("edge_softmax_internal", ("dgl.ops.edge_softmax",))
"""``(graph._graph, logits, eids, norm_by)``; missing, as all that follow: not replaced, and DGL's
own code raises on a sharded graph."""
SPMM = DglName("gspmm_internal", ("dgl.ops.spmm",))
"""``(graph._graph, op, reduce_op, lhs, rhs)``."""
SDDMM = DglName("gsddmm_internal", ("dgl.ops.sddmm",))
"""``(graph._graph, op, lhs, rhs, lhs_target, rhs_target)``."""
TYPED_EDGE_SOFTMAX = DglName("edge_softmax_hetero_internal", ("dgl.ops.edge_softmax",))
"""The same three of graphs of several relations."""
TYPED_SPMM = DglName("gspmm_internal_hetero", ("dgl.ops.spmm",))
TYPED_SDDMM = DglName("gsddmm_internal_hetero", ("dgl.ops.sddmm",))
TOP_ROWS = DglName("_topk_on", ("dgl.readout",))
"""``(graph, typestr, feat, k, descending, sortby, ntype_or_etype)`` behind ``topk_nodes``."""


def width_wanted(layer: nn.Module) -> int | None:
    """Columns of the source rows that a layer of DGL reads, where it knows; missing: ``None``."""
    widths = (getattr(layer, name, None) for name in ("_in_src_feats", "_in_feats"))
    return next((width for width in widths if isinstance(width, int)), None)


def dgl_metis(graph: Any, weights: Tensor) -> tuple[Callable, Any, Any]:
    """DGL's compiled METIS, and a graph and int64 weights as it takes them; missing: raises. It
    takes (graph, number of parts, weights, ``"recursive"`` or ``"k-way"``, fewest edges cut)."""
    dgl = importlib.import_module("dgl")
    try:
        metis = dgl.partition._CAPI_DGLMetisPartition_Hetero
        return metis, graph._graph, dgl.backend.to_dgl_nd(weights)
    except AttributeError:
        _missing("dgl.partition._CAPI_DGLMetisPartition_Hetero")


def dgl_makers() -> Any:
    """DGL's makers of graphs from arrays that fit, without its checks; missing: raises."""
    try:
        from dgl import graph_index, heterograph_index, utils
        from dgl.heterograph import DGLBlock

        return SimpleNamespace(
            block=DGLBlock,
            from_csr=heterograph_index.create_unitgraph_from_csr,
            from_coo=heterograph_index.create_unitgraph_from_coo,
            from_relations=heterograph_index.create_heterograph_from_relations,
            meta_graph=graph_index.from_coo,
            to_index=utils.toindex,
        )
    except (ImportError, AttributeError):
        _missing("dgl.heterograph_index")
