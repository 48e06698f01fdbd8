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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sar"

# What each part may import, besides itself. Parts not named here (train, cli, compat and the
# top level) stand above all of these.
LEAVES = {"config", "errors", "files"}
_ROWS = LEAVES | {"comm", "kernels", "partition"}
BELOW = {
    "config": set(),
    "errors": set(),
    "files": set(),
    "allocator": {"comm", "errors"},
    "comm": LEAVES,
    "kernels": LEAVES,
    "partition": LEAVES,
    "stream": _ROWS,
    "edges": _ROWS | {"stream"},
    "ops": _ROWS | {"stream", "edges"},
    "layers": LEAVES | {"comm", "stream", "edges", "ops"},
    "graph": _ROWS | {"stream", "edges", "ops"},
    "memory": _ROWS | {"stream", "edges", "ops", "graph"},
    "tracing": _ROWS | {"stream", "edges", "ops", "graph"},
    "nn": _ROWS | {"stream", "edges", "ops", "graph", "memory", "tracing"},
    "sampling": _ROWS,
}
WITHOUT_DGL = {
    "config", "errors", "files", "comm", "kernels", "stream", "edges", "ops", "graph", "memory",
    "tracing", "layers",
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


def test_imports_point_downwards() -> None:
    wrong = []
    for path, tree in sources():
        home = part_of(path)
        for line, name in imports(path, tree) if home in BELOW else ():
            names = name.split(".")
            if names[0] == "sar" and names[1] != home and names[1] not in BELOW[home]:
                wrong.append(at(path, line, f"{home} imports {name}"))
    assert not wrong, "\n".join(wrong)


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
    """Every torch.load says weights_only=True; numpy never gets allow_pickle."""
    wrong = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and words.get("weights_only") != "True":
                wrong.append(at(path, node.lineno, "torch.load without weights_only=True"))
            if words.get("allow_pickle") == "True" or called.startswith("pickle.load"):
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
    from sar.partition.sources.generate import community_graph
    from sar.partition.write import write_partitions
    write_partitions(community_graph(60, 240), [0] * 60, {str(tmp_path / "b")!r})
    for call in (lambda: sar.RelGraphConv, lambda: build_model(ModelOptions(), 4, 4)):
        try:
            call()
        except ImportError as error:
            print(isinstance(error, sar.SarError), "dgl==1.1.3" in str(error), error)
    """
    )
    lines = out.splitlines()
    assert lines[0] == "[32, 32]"
    assert [line.split()[:2] for line in lines[1:]] == [["True", "True"]] * 2, out


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
    after = state()
    print([key for key in before if before[key] != after[key]], "dgl" in sys.modules)
    """
    )
    assert out.split("]") == ["[", " False\n"], out


@pytest.mark.parametrize("name", ["setup.py", "requirements.txt"])
def test_version_and_requirements_agree(name: str) -> None:
    """setup.py names the version that the package reports; torch and dgl stay pinned."""
    text = (ROOT / name).read_text()
    if name == "setup.py":
        import sar

        assert f'version="{sar.__version__}"' in text
    else:
        assert "torch==2.13.0" in text and "dgl==1.1.3" in text
