"""The shape of the package: who may import whom, and what importing it must not do.

The source tests read syntax trees only; the import tests start a fresh interpreter, because this
one has imported dgl and torch long ago.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sar"

# Every package and module of the top level, from above to below: what stands on a line may import
# what stands on lines below it, besides itself. `__init__` is the package's own.
LADDER = (
    {"__main__"},
    {"cli"},
    {"pictures"},
    {"plan"},
    {"__init__"},
    {"_public"},
    {"train", "compat"},
    {"frontends"},
    {"models"},
    {"sampling"},
    {"layers"},
    {"nn"},
    {"tracing"},
    {"memory"},
    {"graph"},
    {"ops"},
    {"edges"},
    {"stream"},
    {"allocator"},
    {"kernels", "partition", "comm"},
    {"config", "files", "_private", "registry", "run_options"},
    {"errors", "expect", "options", "splitmix", "words"},
)
LEAVES = {
    "config", "errors", "expect", "files", "options", "registry", "run_options", "splitmix",
    "words", "_private",
}  # fmt: skip
NARROWER = {  # what may import less
    "config": {"errors", "expect", "options", "words"},
    "errors": set(),
    "expect": set(),
    "options": set(),
    "files": set(),
    "registry": set(),
    "run_options": {"expect", "options", "words"},
    "sampling": LEAVES | {"comm", "kernels", "partition"},
}
BELOW = {
    part: NARROWER.get(part, {below for later in LADDER[i + 1 :] for below in later})
    for i, step in enumerate(LADDER)
    for part in step
}
WITHOUT_DGL = {
    "config", "errors", "expect", "files", "options", "run_options", "splitmix", "words", "comm",
    "kernels", "stream", "edges", "ops", "graph", "memory", "nn", "tracing", "layers",
}  # fmt: skip
LAUNCHER = ("torch.distributed.run", "torch.distributed.launcher", "torch.distributed.elastic")

# The collectives that every backend has (oneCCL on CPU has no others that work), and the names
# of torch.distributed that move nothing.
COLLECTIVES = {
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all_single", "new_group",
}  # fmt: skip
STILL = {
    "init_process_group", "destroy_process_group", "is_initialized", "is_available",
    "is_gloo_available", "is_nccl_available", "is_mpi_available", "is_ucc_available",
    "is_backend_available", "get_rank", "get_world_size", "get_backend", "ProcessGroup", "Work",
    "Backend", "ReduceOp", "Store", "FileStore", "TCPStore", "PrefixStore", "HashStore",
    "GroupMember", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError",
    "default_pg_timeout", "group", "distributed_c10d", "rendezvous", "ProcessGroupGloo",
    "_get_default_group",
}  # fmt: skip
REDUCTIONS = {"SUM", "MAX", "MIN"}


def part_of(path: Path) -> str:
    """`graph` for sar/graph/view.py, `config` for sar/config.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, relative imports resolved."""
    package = ["sar", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def at(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def test_every_part_has_its_place() -> None:
    here = {part_of(path) for path in PACKAGE.rglob("*.py")}
    assert here - set(BELOW) == set(), "a part that LADDER does not know"
    assert len(BELOW) == sum(map(len, LADDER)), "a part that LADDER names twice"


def part_named(name: str) -> str:
    """The part that holds what ``sar.x.y`` names; the package's own where it is a name of that."""
    part = [*name.split("."), ""][1]
    return part if part in BELOW else "__init__"


def test_imports_point_downwards() -> None:
    wrong = []
    for path, tree in sources():
        home = part_of(path)
        for line, name in imports(path, tree):
            if name.split(".")[0] != "sar":
                continue
            part = part_named(name)
            if part != home and part not in BELOW[home]:
                wrong.append(at(path, line, f"{home} imports {name}"))
    assert not wrong, "\n".join(wrong)


def when_run(node: ast.AST) -> Iterator[ast.AST]:
    """All that can run, functions' bodies as well; not what is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            child = ast.Module(child.orelse, [])
        yield child
        yield from when_run(child)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules() -> dict[str, set[str]]:
    """Of each module, those of the package that it names in an import."""
    trees = {module_name(path): (path, tree) for path, tree in sources()}
    found: dict[str, set[str]] = {}
    for module, (path, tree) in trees.items():
        found[module] = set()
        statements = [n for n in when_run(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        for _, name in imports(path, ast.Module(statements, [])):
            while name and name not in trees:
                name = name.rpartition(".")[0]
            found[module] |= {name} - {"", module}
    return found


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that reach each other: what is left when those without imports, or that
    nobody imports, are taken away, and again."""
    reach = {module: set(names) for module, names in graph.items()}
    for middle in reach:
        for names in reach.values():
            if middle in names:
                names |= reach[middle]
    both = {m: frozenset(n for n in reach[m] if m in reach[n]) for m in reach}
    return {ring for ring in both.values() if ring}


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {frozenset("abc")}
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == set()


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count, too: they hide a circle and do not open it."""
    wrong = [" and ".join(sorted(ring)) for ring in circles(imported_modules())]
    assert not wrong, "\n".join(wrong)


FOREIGN = ("torch", "numba", "numpy", "dgl")
# What only tensors, storages, autograd's nodes and torch's modules have.
TENSORS_OWN = {
    "_base", "_is_view", "_version", "_cdata", "_backward_hooks", "_make_wrapper_subclass",
    "_use_count", "_buffers", "_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks",
    "_grad", "_sequence_nr", "_set_sequence_nr", "_execution_engine", "_forward_cls",
}  # fmt: skip
UNDERSCORED = re.compile(r"_(?!_)\w+$")  # also numpy._core, but no __version__
HIDDEN = re.compile(rf"(?:{'|'.join(FOREIGN)})(?:\.\w+)*\._(?!_)\w+$")  # as a string
INTERNAL = (
    "torch.utils._pytree", "torch.multiprocessing.reductions", "numba.core", "numpy.core",
    "dgl.heterograph_index", "dgl.graph_index", "dgl.heterograph.DGLBlock",
)  # fmt: skip


def names_of_others(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports from torch and the others stand for."""
    known = {"np": "numpy"} | {name: name for name in FOREIGN}  # also where a function gives them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                known[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: full for name, full in known.items() if full.split(".")[0] in FOREIGN}


def undocumented(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of what is imported or read and not public."""
    known = names_of_others(tree)
    for line, name in imports(path, tree):
        if name.split(".")[0] in FOREIGN:
            hidden = any(UNDERSCORED.match(part) for part in name.split("."))
            if hidden or any(f"{name}.".startswith(f"{one}.") for one in INTERNAL):
                yield line, name
    own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and of_self(n.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and HIDDEN.match(str(node.value)):
            yield node.lineno, str(node.value)
        if not isinstance(node, ast.Attribute):
            continue
        base, *rest = ast.unparse(node).split(".")
        full = ".".join([known.get(base, ""), *rest])
        if base in known and any(f"{full}.".startswith(f"{one}.") for one in INTERNAL):
            yield node.lineno, full
        elif UNDERSCORED.match(node.attr) and not of_self(node.value):
            if base in known or (node.attr in TENSORS_OWN and node.attr not in own):
                yield node.lineno, ast.unparse(node)


def of_self(node: ast.AST) -> bool:
    return ast.unparse(node) in ("self", "cls")


def test_undocumented_names_are_private() -> None:
    """`sar/_private.py` holds them all."""
    found = {
        path: [at(path, line, name) for line, name in undocumented(path, tree)]
        for path, tree in sources()
        if path.name != "_private.py"
    }
    wrong = [line for lines in found.values() for line in lines]
    assert not wrong, "\n".join(wrong)


NODE = r"[\w.\[\]]*(?:node|grad_fn|before|maker|\bfn)"
COUNTED = {"_getframe", "getrefcount", "_use_count", "_storage_Use_Count", "currentframe"}


def test_nothing_is_guessed() -> None:
    wrong = [at(path, 1, kind) for path, tree in sources() for kind in guesses(path, tree)]
    assert not wrong, "\n".join(wrong)


def guesses(path: Path, tree: ast.Module) -> Iterator[str]:
    """How a file finds out what it was not told."""
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    names = {n.attr for n in attributes}
    words = names | {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    imported = {name for _, name in imports(path, tree)}
    if words & COUNTED or {"inspect.stack", "inspect.currentframe"} & imported:
        yield "frames and counts"
    elif any(ast.unparse(n) == "inspect.stack" for n in attributes):
        yield "frames and counts"
    if {"grad_fn", "next_functions"} & names and any(map(names_a_type, attributes)):
        yield "names of nodes"
    if part_of(path) != "tracing" and makes_a_mode(tree):
        yield "function modes"


def names_a_type(node: ast.Attribute) -> bool:
    """``x.name``, ``type(x).__name__`` or ``x.__class__.__name__`` of what seems a node."""
    of_type = rf"type\({NODE}\)|{NODE}\.__class__"
    whole = of_type if node.attr == "__name__" else NODE if node.attr == "name" else "(?!)"
    return re.fullmatch(whole, ast.unparse(node.value)) is not None


def makes_a_mode(tree: ast.Module) -> bool:
    return any(
        ast.unparse(base).endswith("TorchFunctionMode")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    )


@pytest.mark.parametrize(
    "code, kind",
    [
        ("import sys\nx = sys._getframe(1)", "frames and counts"),
        ("count = getattr(sys, 'getrefcount', None)", "frames and counts"),
        ("from inspect import stack", "frames and counts"),
        ("import inspect\nx = inspect.stack()", "frames and counts"),
        ("x = torch._C._storage_Use_Count(y)", "frames and counts"),
        ("kind = type(x.grad_fn).__name__", "names of nodes"),
        ("node = x.grad_fn\nkind = node.name()", "names of nodes"),
        ("class Mode(torch.overrides.TorchFunctionMode): pass", "function modes"),
        ("kind = type(x).__name__", None),
        ("node = x.grad_fn\nnode.register_prehook(f)", None),
    ],
)
def test_guesses_are_found(code: str, kind: str | None) -> None:
    found = list(guesses(PACKAGE / "ops" / "new.py", ast.parse(code)))
    assert found == ([] if kind is None else [kind])


@pytest.mark.parametrize(
    "code, names",
    [
        ("import torch\ntorch._C.x()", ["torch._C"]),
        ("from torch import _C", ["torch._C"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("from numba.core import cgutils", ["numba.core.cgutils"]),
        ("import numpy as np\nnp._core", ["np._core"]),
        ("def f(x): return x._version", ["x._version"]),
        ("dgl = load()\ndgl.partition._CAPI", ["dgl.partition._CAPI"]),
        ("import_module('torch._dynamo')", ["torch._dynamo"]),
        ("import dgl\nx = dgl.heterograph(y)", []),
        ("import torch\ntorch.__version__\nx._mine", []),
        ("import torch\nclass A:\n  def f(self, other): return self._base is other._base", []),
    ],
)
def test_undocumented_names_are_found(code: str, names: list[str]) -> None:
    found = [name for _, name in undocumented(PACKAGE / "ops" / "new.py", ast.parse(code))]
    assert found == names


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported; not function bodies, not type hints."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from module_level(child)


def test_dgl_stays_at_the_edge() -> None:
    """The core never names dgl; the parts above import it inside the functions that need it."""
    wrong = []
    for path, tree in sources():
        lines = {getattr(node, "lineno", 0) for node in module_level(tree)}
        for line, name in imports(path, tree):
            if name.split(".")[0] == "dgl" and (part_of(path) in WITHOUT_DGL or line in lines):
                wrong.append(at(path, line, f"{part_of(path)} imports {name}"))
    assert not wrong, "\n".join(wrong)


def test_torch_distributed_stays_in_comm() -> None:
    """Only sar/comm talks to other ranks; the command line may start them."""
    wrong = []
    for path, tree in sources():
        home = part_of(path)
        for line, name in imports(path, tree) if home != "comm" else ():
            if name.startswith("torch.distributed") and not name.startswith(LAUNCHER):
                wrong.append(at(path, line, name))
        for node in ast.walk(tree) if home != "comm" else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                wrong.append(at(path, node.lineno, "torch.distributed"))
    assert not wrong, "\n".join(wrong)


def test_only_portable_collectives() -> None:
    wrong = []
    for path, tree in sources():
        aliases = {"torch.distributed"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {
                    a.asname for a in node.names if a.name == "torch.distributed" and a.asname
                }
            elif isinstance(node, ast.ImportFrom) and node.module == "torch":
                aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        for line, name in imports(path, tree):
            if re.match(r"torch\.distributed\.\w+$", name) and part_of(path) == "comm":
                if name.rsplit(".", 1)[1] not in COLLECTIVES | STILL:
                    wrong.append(at(path, line, name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner in aliases and node.attr not in COLLECTIVES | STILL:
                    if part_of(path) == "comm":
                        wrong.append(at(path, node.lineno, f"{owner}.{node.attr}"))
                elif owner.endswith("ReduceOp") and node.attr not in REDUCTIONS:
                    wrong.append(at(path, node.lineno, f"{owner}.{node.attr}"))
    assert not wrong, "\n".join(wrong)


def test_autograd_functions_live_in_ops_and_layers() -> None:
    wrong = [
        at(path, node.lineno, node.name)
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and part_of(path) not in ("ops", "layers", "memory")
        for base in node.bases
        if ast.unparse(base).endswith("autograd.Function") or ast.unparse(base) == "Function"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_forbidden_statements() -> None:
    """No assert as validation (python -O drops it), no bare except, no global, no stray print."""
    wrong = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assert, ast.Global)):
                wrong.append(at(path, node.lineno, type(node).__name__.lower()))
            elif isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(at(path, node.lineno, "bare except"))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                if part_of(path) not in {"cli", "__main__"}:
                    wrong.append(at(path, node.lineno, "print"))
    assert not wrong, "\n".join(wrong)


def test_no_unpickling() -> None:
    """Every torch.load says weights_only=True; numpy never gets allow_pickle.

    The exception reads what processes of the same launch wrote into a folder of their own."""
    wrong = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and words.get("weights_only") != "True":
                wrong.append(at(path, node.lineno, "torch.load without weights_only=True"))
            of_launch = path.relative_to(PACKAGE).as_posix() == "cli/call_files.py"
            unpickles = called.startswith("pickle.load") and not of_launch
            if words.get("allow_pickle") == "True" or unpickles:
                wrong.append(at(path, node.lineno, called))
    assert not wrong, "\n".join(wrong)


def run_fresh(code: str) -> str:
    """What `code` prints in an interpreter of its own that finds the package in this tree."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK_DGL = """
    import importlib.abc, sys
    class NoDGL(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "dgl":
                raise ModuleNotFoundError("No module named 'dgl'", name="dgl")
    sys.meta_path.insert(0, NoDGL())
"""


def test_every_module_imports_without_dgl() -> None:
    out = run_fresh(
        BLOCK_DGL
        + """
    import importlib, pkgutil, sar
    names = [m.name for m in pkgutil.walk_packages(sar.__path__, "sar.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(len(names), "dgl" in sys.modules)
    """
    )
    count, loaded = out.split()
    assert int(count) == len(list(PACKAGE.rglob("*.py"))) - 1, "a folder without __init__.py?"
    assert loaded == "False"


@pytest.fixture(scope="module")
def small_parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A JSON of 60 nodes in two parts."""
    import torch

    from sar.partition.sources.generate import community_graph
    from sar.partition.write import write_partitions

    where = tmp_path_factory.mktemp("parts") / "small"
    return write_partitions(community_graph(60, 240), torch.arange(60) % 2, where)


def test_core_runs_without_dgl_and_names_calls_that_need_it(
    small_parts: str, tmp_path: Path
) -> None:
    out = run_fresh(
        BLOCK_DGL
        + f"""
    import torch, sar
    from sar.comm import ThreadGroup
    def case(group):
        data = sar.load_dgl_partition_data({small_parts!r}, group.rank)
        graph = sar.construct_full_graph(data)
        x = data.node_features["_N/feat"].requires_grad_()
        sar.global_mean(graph.aggregate(x, "mean")).backward()
        blocks = sar.construct_mfgs(data, torch.arange(*data.node_ranges[group.rank]), 2)
        return x.grad.shape[0] + len(blocks)
    print(ThreadGroup.run(2, case))
    from sar.train import ModelOptions, build_model
    build_model(ModelOptions(), 4, 4)
    try:
        sar.RelGraphConv
    except ImportError as error:
        print(isinstance(error, sar.SarError), "dgl==1.1.3" in str(error), error)
    """
    )
    lines = out.splitlines()
    assert lines[0] == "[32, 32]"
    assert [line.split()[:2] for line in lines[1:]] == [["True", "True"]], out


def test_importing_does_nothing() -> None:
    """No thread, environment, handler, patch, process group or import of dgl."""
    out = run_fresh(
        """
    import logging, os, signal, sys, threading, warnings
    import numpy, torch, torch.distributed
    def state():
        signals = [signal.getsignal(s) for s in signal.valid_signals()]
        return {
            "tasks": len(os.listdir("/proc/self/task")),
            "threads": threading.enumerate(),
            "environment": dict(os.environ),
            "signals": signals,
            "excepthook": sys.excepthook,
            "handlers": list(logging.getLogger().handlers),
            "level": logging.getLogger().level,
            "warnings": [f for f in warnings.filters if f[0] != "default"],
            "group": torch.distributed.is_initialized(),
            "num_threads": torch.get_num_threads(),
            "dtype": torch.get_default_dtype(),
        }
    before = state()
    import sar
    from sar import *
    after = state()
    print([key for key in before if before[key] != after[key]], "dgl" in sys.modules)
    """
    )
    assert out.split("]") == ["[", " False\n"], out


def test_version_and_requirements_agree() -> None:
    """setup.py names the version that the package reports; what `make` installs is pinned."""
    import sar

    assert f'version="{sar.__version__}"' in (ROOT / "setup.py").read_text()
    names = re.compile(r"^([a-z_-]+)", re.M)
    pinned = names.findall((ROOT / "constraints.txt").read_text())
    assert set(names.findall((ROOT / "requirements.txt").read_text())) <= set(pinned)
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


# Of sar.comm what has to know where tensors of a transport lie.
LOOK_AT_DEVICES = {
    f"comm/{name}.py" for name in ("environment", "failure", "group", "host_memory", "process")
}


def device_types(tree: ast.AST) -> Iterator[int]:
    """Lines that ask for a type of device; handing it on as ``device_type=`` decides nothing."""
    handed = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "device_type"
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in handed:
            continue
        of = node.value
        name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
        if node.attr in ("is_cpu", "is_cuda") or (node.attr == "type" and "device" in name):
            yield node.lineno


def test_only_kernels_and_transports_look_at_devices() -> None:
    """Whoever else chooses by the device asks :func:`sar.kernels.has` or ``sar.kernels.device``."""
    bad = [
        at(path, line, "a type of device")
        for path, tree in sources()
        if part_of(path) != "kernels"
        and path.relative_to(PACKAGE).as_posix() not in LOOK_AT_DEVICES
        for line in device_types(tree)
    ]
    assert not bad, "\n".join(bad)
    found = list(device_types(ast.parse("x.device.type\nx.is_cpu\nf(device_type=device.type)")))
    assert sorted(found) == [1, 2]


def test_one_reads_a_file_and_a_function_in_one_go() -> None:
    """400 lines and 60, with their docstrings."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = [path.name for path, _ in sources() if len(path.read_text().splitlines()) > 400]
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, functions) and node.end_lineno - node.lineno >= 60:
                long.append(f"{path.name}:{node.lineno}: {node.name}")
    assert not long
