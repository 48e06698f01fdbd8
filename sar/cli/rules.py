"""Checks of a command's options together, and of a user's own model."""

from __future__ import annotations

import ast
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from sar import registry
from sar.options import closest, options_of
from sar.run_options import ModelOptions, SampledOptions, TrainOptions
from sar.words import MODELS

_OF_OWN = ("model", "model_args", "call", "front_end", "edge_features")


def model(args: Namespace) -> Iterator[str]:
    if args.model in MODELS:
        if args.model == "gat" and args.hidden % args.heads:
            expected = f"a divisor of --hidden, which is {args.hidden}"
            yield f"--heads: got {args.heads}, expected {expected}"
        for key in args.model_args:
            yield f"--model-args: got {key}, which is for a model of your own, not {args.model}"
        for name in ("call", "front-end", "edge-features"):
            if getattr(args, name.replace("-", "_")):
                yield f"--{name}: got one, which is for a model of your own, not {args.model}"
        return
    for one in options_of(ModelOptions):
        if one.name not in _OF_OWN and getattr(args, one.name) != one.default:
            yield (
                f"{one.title}: is for the built-in models; give arguments of {args.model} as "
                "--model-args KEY=VALUE"
            )
    if args.call and args.edge_features:
        yield "--edge-features: got some and --call, which names columns of edges; expected one"
    yield from check_own(args.model)


def ranks(args: Namespace) -> Iterator[str]:
    if args.rounds is not None and args.memory_budget is not None:
        yield "--rounds and --memory-budget: got both, expected at most one of them"
    if args.backend == "nccl" and args.device == "cpu":
        yield "--backend: got nccl, which needs --device cuda"


def out_of_core(args: Namespace) -> Iterator[str]:
    if args.out_of_core is None:
        if args.memory is not None:
            yield "--memory: got some, expected --out-of-core DIR as well"
        return
    if args.nproc is not None:
        yield f"--nproc: got {args.nproc} and --out-of-core, which has one process; expected none"
    if args.device != "cpu":
        yield f"--device: got {args.device} and --out-of-core, expected cpu"
    if args.backend is not None:
        yield f"--backend: got {args.backend} and --out-of-core, which sends nothing; expected none"
    if args.allocator != "system":
        yield f"--allocator: got {args.allocator} and --out-of-core, expected system"
    if args.map_features is not False:
        yield "--map-features: got it and --out-of-core, where features lie in a file anyway"
    if vars(args).get("sampled"):
        yield "--sampled: got it and --out-of-core, expected full-batch training"
    if vars(args).get("activations", "keep") != "keep":
        yield f"--activations: got {args.activations} and --out-of-core, expected keep"


def plan(args: Namespace) -> Iterator[str]:
    if not args.out_of_core:
        if args.disk is not None:
            yield "--disk: got a rate, expected --out-of-core as well"
        return
    if args.hosts is not None:
        yield f"--hosts: got {args.hosts} and --out-of-core, which is one machine; expected none"
    if args.plot is not None:
        yield "--plot: got one and --out-of-core, which knows one number of ranks; expected none"


def sampling(args: Namespace) -> Iterator[str]:
    if not args.sampled:
        for one in (*options_of(TrainOptions), *options_of(SampledOptions)):
            if one.needs and getattr(args, one.name) is not None:
                yield f"{one.title}: got one, expected --{one.needs} as well"
        return
    count = len(SampledOptions.fanouts if args.fanouts is None else args.fanouts)
    if args.model in MODELS and count != args.layers:
        yield f"--fanouts: got {count}, expected one for each of {args.layers} layers"
    if args.model == "gcn":
        yield (
            "--model: got 'gcn', which normalizes by degrees of the whole graph, and mini-batches "
            "do not hold them; expected sage, gin or gat"
        )


def train(args: Namespace) -> Iterator[str]:
    if args.resume and args.checkpoint is None:
        yield "--resume: got no --checkpoint, expected the folder to continue from"
    if args.activations_directory is not None and args.activations != "offload":
        yield "--activations-directory: expected --activations offload with it"


def evaluate(args: Namespace) -> Iterator[str]:
    if args.model is not None:
        yield from check_own(args.model)


def partition(args: Namespace) -> Iterator[str]:
    missing = [f"--{name}" for name in ("parts", "out") if getattr(args, name) is None]
    if args.add_digests and len(missing) < 2:
        yield "--add-digests: expected INPUT alone, without --parts and --out"
    elif missing and not args.add_digests:
        yield f"the following arguments are required: {', '.join(missing)}"
    if args.method is not None and args.assignment is not None:
        yield f"--method {args.method} and --assignment: expected one of them"


def bench(args: Namespace) -> Iterator[str]:
    if args.scale > 26:
        yield f"--scale: got {args.scale}, expected 8 to 26"
    if args.sar_path is not None and not (args.sar_path / "sar").is_dir():
        yield f"--sar-path: {args.sar_path} holds no folder 'sar', expected a checkout"
    if args.out.exists() and not args.out.is_dir():
        yield f"--out: {args.out} is a file, expected a folder"


def check_own(text: str) -> Iterator[str]:
    """Why ``module:Class`` or ``file.py:Class`` will not be found."""
    place, _, name = text.rpartition(":")
    path = _source(place)
    if path is None:
        first = place.split(".")[0]
        front_end = registry.front_end_of(first)
        yield (
            f"--model: got {text!r}, but there is no module {place!r} in {Path.cwd()} or installed"
            + (f"; install {first}, which front end {front_end} is for" if front_end else "")
            if not place.endswith(".py")
            else f"--model: got {text!r}, but there is no file {place!r}"
        )
    elif path.suffix == ".py":
        names = _names(path)
        if names is not None and name not in names:
            yield f"--model: {str(path)!r} has no class {name!r}{closest(name, names)}"


def _source(place: str) -> Path | None:
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
