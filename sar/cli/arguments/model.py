"""Which model: a built-in one and its sizes, or one of the user's own and its arguments."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sar.cli.parser import closest
from sar.cli.values import KeyValue, Value, positive, probability
from sar.words import MODELS

_SIZES = {"layers": 3, "hidden": 256, "heads": 4, "dropout": 0.0, "batch_norm": False}


def _model(text: str) -> str:
    if text not in MODELS and not all(text.rpartition(":")):
        raise ValueError(
            f"got {text!r}, expected one of {', '.join(MODELS)}, or your own as module:Class or "
            f"file.py:Class{closest(text, MODELS)}"
        )
    return text


def add_model_arguments(group: Any) -> None:
    """What :func:`sar.cli.models.model_options` reads."""
    group.add_argument(
        "--model", type=Value("NAME", _model, MODELS), default="sage",
        help=f"{', '.join(MODELS)} (for several node types), or your own: module:Class, "
        "file.py:Class",
    )  # fmt: skip
    group.add_argument(
        "--model-args", action=KeyValue, default={}, metavar="KEY=VALUE",
        help="argument of your own model; give it once for each",
    )  # fmt: skip
    group.add_argument(
        "--call", metavar="NAMES",
        help="what your own model's forward gets, such as graph,x or x,edge_index; default: its "
        "signature says it",
    )  # fmt: skip
    group.add_argument(
        "--front-end", metavar="NAME",
        help="whose graphs and mini-batches it gets: dgl, pyg, sar; default: by --call, and dgl "
        "where it is installed",
    )  # fmt: skip
    group.add_argument("--layers", type=positive, default=_SIZES["layers"], help="graph layers")
    group.add_argument("--hidden", type=positive, default=_SIZES["hidden"], help="width of layers")
    group.add_argument("--heads", type=positive, default=_SIZES["heads"], help="of gat")
    group.add_argument(
        "--dropout", type=probability, default=_SIZES["dropout"], help="on each layer's input"
    )
    group.add_argument("--batch-norm", action="store_true", help="over the nodes of all ranks")


def check_model(args: argparse.Namespace) -> Iterator[str]:
    """What these options say together, and whether a model of the user's own is there."""
    if args.model in MODELS:
        if args.model == "gat" and args.hidden % args.heads:
            expected = f"a divisor of --hidden, which is {args.hidden}"
            yield f"--heads: got {args.heads}, expected {expected}"
        for key in args.model_args:
            yield f"--model-args: got {key}, which is for a model of your own, not {args.model}"
        for name in ("call", "front_end"):
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                yield f"{option}: got one, which is for a model of your own, not {args.model}"
        return
    for name, default in _SIZES.items():
        if getattr(args, name) != default:
            yield (
                f"--{name.replace('_', '-')}: is for the built-in models; give arguments of "
                f"{args.model} as --model-args KEY=VALUE"
            )
    yield from check_own(args.model)


def check_own(text: str) -> Iterator[str]:
    """Why ``module:Class`` will not be found, without running its code."""
    place, _, name = text.rpartition(":")
    path = _source(place)
    if path is None:
        yield (
            f"--model: got {text!r}, but there is no module {place!r} in {Path.cwd()} or installed"
            if not place.endswith(".py")
            else f"--model: got {text!r}, but there is no file {place!r}"
        )
    elif path.suffix == ".py":
        names = _names(path)
        if names is not None and name not in names:
            yield f"--model: {str(path)!r} has no class {name!r}{closest(name, names)}"


def _source(place: str) -> Path | None:
    """The file of a module; ``None`` where there is none."""
    if place.endswith(".py"):
        return Path(place) if Path(place).is_file() else None
    here = str(Path.cwd())
    if here not in sys.path:  # of the command `sar`, which is started from elsewhere
        sys.path.insert(0, here)
    first, *rest = place.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if rest:  # inside of a package: finding more would run its code
        for folder in spec.submodule_search_locations or ():
            inside = Path(folder, *rest)
            if inside.with_suffix(".py").is_file():
                return inside.with_suffix(".py")
            if inside.is_dir():
                return inside
        return None
    return Path(spec.origin or ".")


def _names(path: Path) -> list[str] | None:
    """Names that a file binds; ``None`` where that cannot be read from its text."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, UnicodeDecodeError, SyntaxError):
        return None  # told with its line when it is imported
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found += [one.asname or one.name for one in node.names]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return None if "*" in found or "__getattr__" in found else found
