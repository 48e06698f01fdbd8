"""The shape of the package: who may import whom, and what importing it must not do.

The source tests read syntax trees only; the import tests start a fresh interpreter, because this
one has imported dgl and torch long ago.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
    {"_public", "pyg"},
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
    {"alone", "errors", "expect", "log", "options", "splitmix", "words"},
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
ONLY_FROM = {  # others ask the registry
    "frontends": {"__init__", "_public", "compat", "pyg"},  # the first by a module's name
    "compat": {"__init__", "_public"},
}
UPWARDS = {  # names that are looked up when somebody asks for them
    "__init__.py": {"sar.cli.functions"},
    "comm/__init__.py": {"sar.nn"},
}
FOREIGN_PLACES = {"frontends", "compat", "partition", "_private"}
# What other libraries call things: modules, members of graphs, attributes and arguments of layers.
FOREIGN_NAMES = set(
    """
    dgl DGLGraph DGLBlock BuiltinMessage apply_binary update_all multi_update_all apply_edges
    apply_nodes ndata edata srcdata dstdata srcnodes dstnodes local_var local_scope to_block
    create_block batch_num_nodes batch_num_edges copy_u copy_e u_mul_e u_add_v gspmm gsddmm
    segment_reduce fc_self fc_neigh fc_src fc_dst res_fc attn_l attn_r attn_drop feat_drop
    get_attention share_weights _aggre_type _aggregator_type _in_src_feats _in_feats _out_feats
    _num_heads _allow_zero_in_degree
    torch_geometric MessagePassing HeteroData propagate message_and_aggregate edge_index
    edge_index_dict edge_attr x_dict adj_t lin_l lin_r lin_src lin_dst att_src att_dst
    """.split()
)
FOREIGN_PATH = re.compile(r"(dgl|torch_geometric)(\.\w+)+$")
SAID_TO_USERS = {  # words of options and formats, and packages that are looked for
    "__init__.py": {"dgl", "torch_geometric"},
    "words.py": {"dgl"},
    "cli/commands.py": {"dgl"},
    "cli/report.py": {"dgl"},
    "models/calling.py": {"dgl", "edge_index", "edge_index_dict", "x_dict"},
    "ops/mailbox.py": {"update_all"},
    "sampling/options.py": {"dgl"},
}
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
NODE = r"[\w.\[\]]*(?:node|grad_fn|before|maker|\bfn)"
COUNTED = {"_getframe", "getrefcount", "_use_count", "_storage_Use_Count", "currentframe"}
# Of sar.comm what has to know where tensors of a transport lie.
LOOK_AT_DEVICES = {
    f"comm/{name}.py" for name in ("environment", "failure", "group", "host_memory", "process")
}

Found = Iterator[tuple[int, str]]  # lines and what is wrong there


def place_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """`graph` for sar/graph/view.py, `config` for sar/config.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


unparse = cache(ast.unparse)  # as rules ask for the same


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    return {module_name(path): (path, tree) for path, tree in sources()}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, relative imports resolved."""
    package = ["sar", *path.relative_to(PACKAGE).parent.parts]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def modules_by_name(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of the package's modules that are named in strings, as for ``importlib``."""
    for node in nodes(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [unparse(part) for part in node.values]
            text = "".join(part[1:-1] for part in parts).replace("__name__", module_name(path))
            text = text.replace("{", "").replace("}", "")
        else:
            text = node.value if isinstance(node, ast.Constant) else ""
        if isinstance(text, str) and text.startswith("sar.") and text in modules():
            yield node.lineno, text


def part_named(name: str) -> str:
    """The part that holds what ``sar.x.y`` names; the package's own where it is a name of that."""
    part = [*name.split("."), ""][1]
    return part if part in BELOW else "__init__"


def test_every_part_has_its_place() -> None:
    here = {part_of(path) for path in PACKAGE.rglob("*.py")}
    assert here - set(BELOW) == set(), "a part that LADDER does not know"
    assert len(BELOW) == sum(map(len, LADDER)), "a part that LADDER names twice"


# -- rules that each file keeps -------------------------------------------------------------------


def climbs(path: Path, tree: ast.Module) -> Found:
    """Imports point downwards, those by a module's name and those for type checkers, too."""
    home, allowed = part_of(path), UPWARDS.get(place_of(path), set())
    for line, name in [*imports(path, tree), *modules_by_name(path, tree)]:
        part = part_named(name)
        if name.split(".")[0] != "sar" or part == home or name in allowed:
            continue
        if part not in BELOW[home] or home not in ONLY_FROM.get(part, {home}):
            yield line, f"{home} imports {name}"


def siblings(path: Path, tree: ast.Module) -> Found:
    """Front ends do not know each other."""
    home = path.relative_to(PACKAGE).parts[:2]
    for line, name in [*imports(path, tree), *modules_by_name(path, tree)]:
        other = tuple(name.split(".")[1:3])
        if home[0] == other[:1] == "frontends" or (home[0], *other[:1]) == ("frontends",) * 2:
            if len(other) == 2 and other != home:
                yield line, f"{home[1]} imports {name}"


def foreign(path: Path, tree: ast.Module) -> Found:
    """Names of DGL and PyG stand where graphs, models and files of theirs are read."""
    if part_of(path) in FOREIGN_PLACES:
        return
    said = SAID_TO_USERS.get(place_of(path), set())
    for node in nodes(tree):
        for name in names_in(node):
            is_foreign = name in FOREIGN_NAMES or FOREIGN_PATH.match(name)
            if is_foreign and not (isinstance(node, ast.Constant) and name in said):
                yield getattr(node, "lineno", 0), name


def names_in(node: ast.AST) -> list[str]:
    """What a node of a syntax tree names itself; a string may go to ``getattr``."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        of = getattr(node, "module", None) or ""
        if of.startswith("sar"):
            return [alias.asname or alias.name for alias in node.names]
        return [part for alias in node.names for part in (f"{of}.{alias.name}", of, alias.name)]
    for kind, field in _NAMED.items():
        if isinstance(node, kind):
            return [name] if isinstance(name := getattr(node, field), str) else []
    return []


_NAMED: dict[type[ast.AST], str] = {
    ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg",
    ast.Constant: "value", ast.FunctionDef: "name", ast.ClassDef: "name",
}  # fmt: skip


def undocumented(path: Path, tree: ast.Module) -> Found:
    """Names that torch, numba, numpy or DGL do not document are all in `sar/_private.py`."""
    if path.name == "_private.py":
        return
    known = names_of_others(tree)
    for line, name in imports(path, tree):
        if name.split(".")[0] in FOREIGN:
            hidden = any(UNDERSCORED.match(part) for part in name.split("."))
            if hidden or any(f"{name}.".startswith(f"{one}.") for one in INTERNAL):
                yield line, name
    own = {n.attr for n in nodes(tree) if isinstance(n, ast.Attribute) and of_self(n.value)}
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and HIDDEN.match(str(node.value)):
            yield node.lineno, str(node.value)
        if not isinstance(node, ast.Attribute):
            continue
        base, *rest = unparse(node).split(".")
        full = ".".join([known.get(base, ""), *rest])
        if base in known and any(f"{full}.".startswith(f"{one}.") for one in INTERNAL):
            yield node.lineno, full
        elif UNDERSCORED.match(node.attr) and not of_self(node.value):
            if base in known or (node.attr in TENSORS_OWN and node.attr not in own):
                yield node.lineno, unparse(node)


def names_of_others(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports from torch and the others stand for."""
    known = {"np": "numpy"} | {name: name for name in FOREIGN}  # also where a function gives them
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                known[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: full for name, full in known.items() if full.split(".")[0] in FOREIGN}


def of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def guesses(path: Path, tree: ast.Module) -> Found:
    """Nothing is found out that was not told."""
    attributes = [n for n in nodes(tree) if isinstance(n, ast.Attribute)]
    names = {n.attr for n in attributes}
    words = names | {n.value for n in nodes(tree) if isinstance(n, ast.Constant)}
    imported = {name for _, name in imports(path, tree)}
    if words & COUNTED or {"inspect.stack", "inspect.currentframe"} & imported:
        yield 1, "frames and counts"
    elif any(unparse(n) == "inspect.stack" for n in attributes):
        yield 1, "frames and counts"
    if {"grad_fn", "next_functions"} & names and any(map(names_a_type, attributes)):
        yield 1, "names of nodes"
    if part_of(path) != "tracing" and makes_a_mode(tree):
        yield 1, "function modes"


def names_a_type(node: ast.Attribute) -> bool:
    """``x.name``, ``type(x).__name__`` or ``x.__class__.__name__`` of what seems a node."""
    of_type = rf"type\({NODE}\)|{NODE}\.__class__"
    whole = of_type if node.attr == "__name__" else NODE if node.attr == "name" else "(?!)"
    return re.fullmatch(whole, unparse(node.value)) is not None


def makes_a_mode(tree: ast.Module) -> bool:
    return any(
        unparse(base).endswith("TorchFunctionMode")
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    )


def dgl_at_once(path: Path, tree: ast.Module) -> Found:
    """Whoever needs dgl imports it inside the function that does."""
    lines = {getattr(node, "lineno", 0) for node in module_level(tree)}
    for line, name in imports(path, tree):
        if name.split(".")[0] == "dgl" and line in lines:
            yield line, f"imports {name}"


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported; not function bodies, not type hints."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in unparse(child.test):
            continue
        yield child
        yield from module_level(child)


def distributed(path: Path, tree: ast.Module) -> Found:
    """Only sar/comm talks to other ranks, by collectives that all backends have; the command line
    may start processes."""
    outside, aliases = part_of(path) != "comm", {"torch.distributed"}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    for line, name in imports(path, tree):
        if outside and name.startswith("torch.distributed") and not name.startswith(LAUNCHER):
            yield line, name
        elif re.match(r"torch\.distributed\.\w+$", name) and not outside:
            if name.rsplit(".", 1)[1] not in COLLECTIVES | STILL:
                yield line, name
    for node in nodes(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = unparse(node.value)
        if outside and unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"
        elif not outside and owner in aliases and node.attr not in COLLECTIVES | STILL:
            yield node.lineno, f"{owner}.{node.attr}"
        elif owner.endswith("ReduceOp") and node.attr not in REDUCTIONS:
            yield node.lineno, f"{owner}.{node.attr}"


def functions_of_autograd(path: Path, tree: ast.Module) -> Found:
    """They live in ops, layers and memory."""
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef) and part_of(path) not in ("ops", "layers", "memory"):
            for base in map(unparse, node.bases):
                if base.endswith("autograd.Function") or base == "Function":
                    yield node.lineno, node.name


def statements(path: Path, tree: ast.Module) -> Found:
    """No assert as validation (python -O drops it), no bare except, no global, no stray print."""
    for node in nodes(tree):
        if isinstance(node, (ast.Assert, ast.Global)):
            yield node.lineno, type(node).__name__.lower()
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        elif isinstance(node, ast.Call) and unparse(node.func) == "print":
            if part_of(path) not in {"cli", "__main__"}:
                yield node.lineno, "print"


def unpickles(path: Path, tree: ast.Module) -> Found:
    """Every torch.load says weights_only=True; numpy never gets allow_pickle.

    The exception reads what processes of the same launch wrote into a folder of their own."""
    for node in nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg: unparse(word.value) for word in node.keywords}
        called = unparse(node.func)
        if called == "torch.load" and words.get("weights_only") != "True":
            yield node.lineno, "torch.load"
        pickled = called.startswith("pickle.load") and place_of(path) != "cli/call_files.py"
        if words.get("allow_pickle") == "True" or pickled:
            yield node.lineno, called


def device_types(path: Path, tree: ast.Module) -> Found:
    """Whoever chooses by the device asks :func:`sar.kernels.has` or ``sar.kernels.device``; handing
    its type on as ``device_type=`` decides nothing."""
    if part_of(path) == "kernels" or place_of(path) in LOOK_AT_DEVICES:
        return
    handed = {
        id(node.value)
        for node in nodes(tree)
        if isinstance(node, ast.keyword) and node.arg == "device_type"
    }
    for node in nodes(tree):
        if not isinstance(node, ast.Attribute) or id(node) in handed:
            continue
        of = node.value
        name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
        if node.attr in ("is_cpu", "is_cuda") or (node.attr == "type" and "device" in name):
            yield node.lineno, node.attr


def lengths(path: Path, tree: ast.Module) -> Found:
    """One reads a file and a function in one go: 400 lines and 60, with their docstrings."""
    if len(path.read_text().splitlines()) > 400:
        yield 1, "a long file"
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if (node.end_lineno or 0) - node.lineno >= 60:
                yield node.lineno, node.name


RULES: tuple[Callable[[Path, ast.Module], Found], ...] = (
    climbs, siblings, foreign, undocumented, guesses, dgl_at_once, distributed,
    functions_of_autograd, statements, unpickles, device_types, lengths,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_all_files_keep(rule: Callable[[Path, ast.Module], Found]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path, tree in sources()
        for line, what in rule(path, tree)
    ]
    assert not wrong, "\n".join([rule.__doc__ or "", *wrong])


@pytest.mark.parametrize(
    "rule, code, found",
    [
        (climbs, "from sar.graph import GraphView", ["ops imports sar.graph.GraphView"]),
        (climbs, "from ..nn import loss", ["ops imports sar.nn.loss"]),
        (climbs, "import sar.edges", []),
        (climbs, "if TYPE_CHECKING:\n  from sar import ShardedGraph",
         ["ops imports sar.ShardedGraph"]),
        (climbs, "importlib.import_module('sar.graph.view')", ["ops imports sar.graph.view"]),
        (foreign, "x = layer.fc_self.weight", ["fc_self"]),
        (foreign, "own = getattr(layer, 'attn_drop', None)", ["attn_drop"]),
        (foreign, "def f(edge_index): pass", ["edge_index"]),
        (foreign, "f(edge_attr=x)", ["edge_attr"]),
        (foreign, "from dgl.nn import GATConv", ["dgl.nn.GATConv", "dgl.nn"]),
        (foreign, "kind = find('dgl.nn.pytorch.conv.GATConv')", ["dgl.nn.pytorch.conv.GATConv"]),
        (foreign, "from torch_geometric import data", ["torch_geometric.data", "torch_geometric"]),
        (foreign, "from sar.tracing.calls import apply_binary", ["apply_binary"]),
        (foreign, "'''As DGL's edata.'''\nraise ValueError('edata: got ..')", []),
        (guesses, "import sys\nx = sys._getframe(1)", ["frames and counts"]),
        (guesses, "count = getattr(sys, 'getrefcount', None)", ["frames and counts"]),
        (guesses, "x = torch._C._storage_Use_Count(y)", ["frames and counts"]),
        (guesses, "kind = type(x.grad_fn).__name__", ["names of nodes"]),
        (guesses, "node = x.grad_fn\nkind = node.name()", ["names of nodes"]),
        (guesses, "class Mode(torch.overrides.TorchFunctionMode): pass", ["function modes"]),
        (guesses, "kind = type(x).__name__", []),
        (guesses, "node = x.grad_fn\nnode.register_prehook(f)", []),
        (undocumented, "from torch import _C", ["torch._C"]),
        (undocumented, "from numba.core import x", ["numba.core.x"]),
        (undocumented, "import torch.utils._pytree as a", ["torch.utils._pytree"]),
        (undocumented, "def f(x): return x._version", ["x._version"]),
        (undocumented, "dgl = load()\ndgl.partition._CAPI", ["dgl.partition._CAPI"]),
        (undocumented, "import_module('torch._dynamo')", ["torch._dynamo"]),
        (undocumented, "import dgl\nx = dgl.heterograph(y)", []),
        (undocumented, "import torch\ntorch.__version__\nx._mine", []),
        (undocumented, "class A:\n  def f(self, other): return self._base is other._base", []),
        (dgl_at_once, "import dgl", ["imports dgl"]),
        (dgl_at_once, "def f():\n  import dgl", []),
        (distributed, "import torch.distributed as dist", ["torch.distributed"]),
        (distributed, "torch.distributed.barrier()", ["torch.distributed"]),
        (distributed, "op = ReduceOp.AVG", ["ReduceOp.AVG"]),
        (statements, "assert x\nprint(x)", ["assert", "print"]),
        (unpickles, "torch.load(f)\npickle.load(f)", ["torch.load", "pickle.load"]),
        (device_types, "x.device.type\nx.is_cpu\nf(device_type=device.type)", ["type", "is_cpu"]),
    ],
)  # fmt: skip
def test_each_rule_finds(
    rule: Callable[[Path, ast.Module], Found], code: str, found: list[str]
) -> None:
    assert [what for _, what in rule(PACKAGE / "ops" / "new.py", ast.parse(code))] == found


def test_front_ends_that_know_each_other_are_found() -> None:
    path, code = PACKAGE / "frontends" / "pyg" / "new.py", "from sar.frontends.dgl import store"
    assert [what for _, what in siblings(path, ast.parse(code))] == [
        "pyg imports sar.frontends.dgl.store"
    ]


# -- circles --------------------------------------------------------------------------------------


def imported_modules() -> dict[str, set[str]]:
    """Of each module, those of the package that it imports, be it in a function."""
    found: dict[str, set[str]] = {}
    for module, (path, tree) in modules().items():
        found[module] = set()
        statements = [n for n in when_run(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        for _, name in imports(path, ast.Module(statements, [])):
            while name and name not in modules():
                name = name.rpartition(".")[0]
            found[module] |= {name} - {"", module}
    return found


def when_run(node: ast.AST) -> Iterator[ast.AST]:
    """All that can run, functions' bodies as well; not what is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in unparse(child.test):
            child = ast.Module(child.orelse, [])
        yield child
        yield from when_run(child)


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that reach each other."""
    reach = {module: set(names) for module, names in graph.items()}
    for middle in reach:
        for names in reach.values():
            if middle in names:
                names |= reach[middle]
    both = {m: frozenset(n for n in reach[m] if m in reach[n]) for m in reach}
    return {ring for ring in both.values() if ring}


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count, too: they hide a circle and do not open it."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {frozenset("abc")}
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == set()
    wrong = [" and ".join(sorted(ring)) for ring in circles(imported_modules())]
    assert not wrong, "\n".join(wrong)


# -- what importing does --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A JSON of 60 nodes in two parts."""
    import torch

    from sar.partition.sources.generate import community_graph
    from sar.partition.write import write_partitions

    where = tmp_path_factory.mktemp("parts") / "small"
    return write_partitions(community_graph(60, 240), torch.arange(60) % 2, where)


FRESH = """
import importlib.abc, json, logging, os, pkgutil, signal, sys, threading, warnings
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
sar.comm, sar.nn, sar.sampling, sar.plan.predict, sar.train.Trainer, sar.train.score
from sar import *
after = state()
found = {"nothing": hasattr(sar, "nothing"), "dgl": "dgl" in sys.modules}
found["changed"] = [key for key in before if before[key] != after[key]]

class NoDGL(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dgl":
            raise ModuleNotFoundError("No module named 'dgl'", name="dgl")
sys.meta_path.insert(0, NoDGL())

from sar.comm import ThreadGroup
def case(group):
    data = sar.load_dgl_partition_data(sys.argv[1], group.rank)
    graph = sar.construct_full_graph(data)
    x = data.node_features["_N/feat"].requires_grad_()
    sar.global_mean(graph.aggregate(x, "mean")).backward()
    blocks = sar.construct_mfgs(data, torch.arange(*data.node_ranges[group.rank]), 2)
    return x.grad.shape[0] + len(blocks)
found["core"] = ThreadGroup.run(2, case)
from sar.train import ModelOptions, build_model
build_model(ModelOptions(), 4, 4)
try:
    sar.RelGraphConv
except ImportError as error:
    found["told"] = isinstance(error, sar.SarError), str(error)

names = [m.name for m in pkgutil.walk_packages(sar.__path__, "sar.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
found["modules"] = len(names), "dgl" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh(small_parts: str) -> dict[str, Any]:
    """What an interpreter of its own finds, which imports the package, then goes without dgl."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH, small_parts],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_does_nothing(fresh: dict[str, Any]) -> None:
    """No thread, environment, handler, patch, process group or import of dgl; documented modules
    are there."""
    assert fresh["changed"] == [] and not fresh["dgl"] and not fresh["nothing"]


def test_core_runs_without_dgl_and_names_calls_that_need_it(fresh: dict[str, Any]) -> None:
    assert fresh["core"] == [32, 32]
    assert fresh["told"][0] and "dgl==1.1.3" in fresh["told"][1]


def test_every_module_imports_without_dgl(fresh: dict[str, Any]) -> None:
    count, loaded = fresh["modules"]
    assert count == len(list(PACKAGE.rglob("*.py"))) - 1, "a folder without __init__.py?"
    assert not loaded


def test_version_and_requirements_agree() -> None:
    """setup.py names the version that the package reports; what `make` installs is pinned."""
    import sar

    assert f'version="{sar.__version__}"' in (ROOT / "setup.py").read_text()
    names = re.compile(r"^([a-z_-]+)", re.M)
    pinned = names.findall((ROOT / "constraints.txt").read_text())
    assert set(names.findall((ROOT / "requirements.txt").read_text())) <= set(pinned)
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


# Lines and files, which work that adds an ability raises by what that is worth.
CEILINGS = {
    "sar": (60_577, 347),
    "sar/partition": (10_040, 52),
    "tests": (46_284, 209),
    "benchmarks": (7_645, 67),
}


@pytest.mark.parametrize("folder", CEILINGS)
def test_the_house_stays_light(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    lines = sum(len(path.read_text().splitlines()) for path in files)
    most_lines, most_files = CEILINGS[folder]
    assert lines <= most_lines and len(files) <= most_files, (lines, len(files))
