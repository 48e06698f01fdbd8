"""INPUT of the commands that run on ranks: partitions, or a graph that is cut first."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

import sar
from sar.cli.partition import WARNING
from sar.comm import Group
from sar.errors import NotSupportedError, SarError
from sar.files import remove_left_over, scratch_folder
from sar.models import Call, ModelOptions, call_of
from sar.models.edge_columns import bare
from sar.options import closest, take
from sar.partition import child
from sar.partition.book import EType
from sar.partition.load import PartitionData, read_book
from sar.partition.sources.open import reads_other_files
from sar.run_options import DataOptions
from sar.train.data import NodeData, load_node_data

DEFAULT_PARTS = 2


def resolve_parts(args: argparse.Namespace, num_ranks: int | None) -> tuple[str, int]:
    """The partitions' JSON or folder, cut now if it must be, and the number of parts. Raises
    ``ValueError`` when there are not as many parts as ranks."""
    if not args.input.endswith(".json") and not os.path.isdir(args.input):
        parts = num_ranks or DEFAULT_PARTS
        if reads_other_files(args.input):
            raise ValueError(
                f"{args.input}: got a graph of several files, expected partitions; cut it first: "
                f"sar partition {args.input} --parts {parts} --out DIR"
            )
        return str(cut_into_cache(args.input, parts, args.method, args.cut_seed)), parts
    parts = read_book(args.input).num_parts
    if num_ranks is not None and parts != num_ranks:
        raise ValueError(
            f"{args.input}: got a graph of {parts} parts for {num_ranks} ranks, expected one part "
            f"per rank; start {parts} ranks, or cut the graph again with --parts {num_ranks}"
        )
    return args.input, parts


def parts_of_rank(args: argparse.Namespace, group: Group) -> str:
    """The partitions' JSON or folder; the first rank of each host cuts INPUT. Collective."""
    path, error = "", None
    for first in (True, False):
        if first == (os.environ.get("LOCAL_RANK", "0") == "0"):
            try:
                path, _ = resolve_parts(args, group.size)
            except Exception as problem:  # any, too little memory as well: the others would wait
                error = problem
        group.agree(error)
    return path


def load_rank(
    args: argparse.Namespace,
    options: DataOptions,
    group: Group,
    device: torch.device,
    need_labels: bool = True,
) -> tuple[PartitionData, sar.ShardedGraph, NodeData]:
    """This rank's partition, its view of the graph, and its data; collective."""
    path = parts_of_rank(args, group)
    partition = sar.load_partition_data(path, group.rank, device, verify=args.verify)
    data = load_node_data(
        partition,
        options,
        need_labels=need_labels,
        map_features=args.map_features,
        group=group,
    )
    graph = sar.construct_full_graph(partition, take(sar.Policy, args))
    return partition, graph, data.to(device)


def columns_of(
    call: Call, etypes: Sequence[EType], stored: Collection[str]
) -> dict[EType, list[str]]:
    """Names in the partitions of the columns of edges that a model gets, by relation. Raises
    ``ValueError`` where there is none of the name."""
    names = dict[EType, list[str]]()
    for name in call.columns:
        by_type = name.endswith("_dict") or name in call.read or call.takes_data
        if len(etypes) > 1 and not by_type:
            raise ValueError(
                f"call: got {name!r}, a column of edges of one relation, for several; expected "
                f"{name}_dict"
            )
        found = dict(_columns_called(call, name, etypes, stored))
        if not found:
            known = list(dict.fromkeys(key.rpartition("/")[2] for key in stored))
            others, near = ", ".join(known) or "none", closest(bare(name), known, quoted=True)
            raise ValueError(f"call: got {name!r}, expected a column of the edges: {others}{near}")
        for etype, one in found.items():
            names.setdefault(etype, []).append(one)
    return names


def _columns_called(
    call: Call, name: str, etypes: Sequence[EType], stored: Collection[str]
) -> Iterator[tuple[EType, str]]:
    owner = name.rpartition("/")[0]
    for etype in etypes:
        prefix = ":".join(etype)
        if owner in ("", prefix, etype[1]):
            mine = [key.rpartition("/")[2] for key in stored if key.startswith(f"{prefix}/")]
            if (one := call.stored_name(bare(name), mine)) is not None:
                yield etype, one


def check_columns(
    options: ModelOptions, made: nn.Module | None, etypes: Sequence[EType], stored: Collection[str]
) -> None:
    """Raise ``ValueError`` for columns of edges that one's own model gets and that there are not;
    where it could not be ``made`` before ranks start, for those that were named."""
    call = Call(read=tuple(word.rpartition("=")[2] for word in options.edge_features or ()))
    if made is not None:
        call = call_of(options, made)
    columns_of(call, etypes, stored)


def forget_columns(graph: sar.ShardedGraph) -> None:
    """Let go of the columns of the partitions, which a built-in model does not read."""
    frames = [graph.nodes[ntype].data for ntype in graph.ntypes]
    for frame in (*frames, *(graph.edges[etype].data for etype in graph.canonical_etypes)):
        for name in list(frame):
            del frame[name]


def stored_columns(partition: PartitionData, call: Call) -> dict[EType, list[str]]:
    """:func:`columns_of` a rank's part; raises, alike on every rank."""
    ntypes, etypes = partition.book.ntypes, partition.book.canonical_etypes
    several = [ntype for ntype in ntypes if f"{ntype}/batch" in partition.node_features]
    if several and (call.has("batch") or call.takes_data):
        raise NotSupportedError(f"call: got batch, and nodes of {several} are of several graphs")
    return columns_of(call, etypes, partition.edge_features)


def cut_into_cache(source: str, parts: int, method: str, seed: int) -> Path:
    """The JSON of ``source`` cut in ``parts``, made at most once; the folder appears when it is
    whole. A process of its own cuts, so that its memory is given back before training."""
    folder = cache_folder() / cache_name(source, parts, method, seed)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(folder.parent)
        with scratch_folder(folder.parent) as scratch:
            made = scratch / "parts"
            _cut(source, parts, method, seed, made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster; its result is the same
                if not folder.is_dir():
                    raise
    found = sorted(folder.glob("*.json"))
    if len(found) != 1:
        raise SarError(f"{folder}: expected one JSON in this cache folder; remove the folder")
    return found[0]


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sar"


def cache_name(source: str, parts: int, method: str, seed: int) -> str:
    """A readable name with a digest of all that the cut depends on, also a file's age and size."""
    about = [source, parts, method, seed, sar.__version__]
    path = Path(source)
    if path.is_file():
        status = path.stat()
        about += [str(path.resolve()), status.st_size, status.st_mtime_ns]
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    words = "".join(c if c.isalnum() else "-" for c in path.stem)[:40]
    return f"{words}-{parts}-{digest}"


def _cut(source: str, parts: int, method: str, seed: int, out: Path) -> None:
    words = ["partition", source, "--parts", parts, "--out", out, "--method", method]
    command = [sys.executable, "-m", "sar", *map(str, [*words, "--seed", seed])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [child.death(done.returncode)]
        raise SarError(lines[-1].removeprefix("sar partition: error: "))
    for line in done.stderr.splitlines():
        if line.startswith(WARNING):
            print(line, file=sys.stderr)
