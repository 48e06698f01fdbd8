"""`sar train`: training of a built-in model, or of the user's own, on a partitioned graph."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import sar
from sar._private import prepare_optimizers
from sar.cli.inputs import (
    check_columns,
    forget_columns,
    load_rank,
    resolve_parts,
    stored_columns,
)
from sar.cli.launch import (
    backend_of,
    check_rank_arguments,
    launch,
    run_rank,
    threads_of,
)
from sar.cli.outputs import check_file, check_writable
from sar.cli.pictures import check_pictures, draw_result
from sar.cli.plan_turns import check_room
from sar.cli.rank_environment import joined
from sar.cli.report import (
    gather_layers,
    gather_ranks,
    log_layers,
    print_model,
    print_ranks,
    print_ranks_joined,
    report,
)
from sar.cli.turns import check_out_of_core
from sar.comm import Group
from sar.kernels.device import reset_peak
from sar.models import (
    ModelOptions,
    build_model,
    call_of,
    for_several_types,
    prepare_graph,
    try_own,
)
from sar.models.tracing import Trace
from sar.options import take
from sar.partition.book import PartitionBook
from sar.partition.load import read_features
from sar.run_options import DataOptions, SampledOptions, TrainOptions
from sar.train import memory
from sar.train.blocks import Batches, check_takes_blocks
from sar.train.checkpoint import FILE_NAME, saved_until
from sar.train.data import check_fields
from sar.train.folder import check_free
from sar.train.loggers import JsonLines, LineFile, TensorBoard, make_logger
from sar.train.metrics import metric_of_dataset
from sar.train.trainer import Trainer

_TOLD = (
    "input", "epochs", "eval_every", "device", "rounds", "memory_budget", "block_bytes",
    "constant_inputs", "activations", "exchange", "zeros", "structure", "map_features",
)  # fmt: skip
_NEW = ("args", "edge_features")  # of models, which older checkpoints do not have


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"sar train: {_saved(args)}", file=sys.stderr)
        raise


def _saved(args: argparse.Namespace) -> str:
    if args.checkpoint is None:
        return "nothing was saved, as there was no --checkpoint"
    saved = saved_until(args.checkpoint)
    if saved is None:
        return f"nothing is saved in {args.checkpoint!r} yet"
    return f"{saved} is saved in {args.checkpoint!r}; the same command with --resume goes on there"


def _run(args: argparse.Namespace) -> int:
    model, data, _ = options_of(args)
    check_rank_arguments(args)
    if joined():
        run_rank(args, work, _check_outputs)
        return 0
    _check_outputs(args)
    args.input, nproc = resolve_parts(args, args.nproc)
    book = _check_graph(args, model, data)
    if args.out_of_core is not None:
        check_room(args, model)
    print_ranks(args, book, nproc, threads_of(args, nproc))
    launch("train", args, nproc)
    return 0


def _check_graph(args: argparse.Namespace, model: ModelOptions, data: DataOptions) -> PartitionBook:
    """Raise now for fields and types that the ranks would not find."""
    book, having = check_fields(args.input, data, ["train_mask"])
    sampled = sampled_options(args)
    if model.is_own:
        made = try_own(model.model, model.args, book, [] if book.is_homogeneous else having)
        if not book.is_foreign:  # of such a folder whole files are read
            stored = read_features(book, 0, "edge_feats")
            check_columns(model, made, book.canonical_etypes, stored)
        if made is not None and sampled is not None:
            check_takes_blocks(made, sampled, call_of(model, made))
    if model.is_own or book.is_homogeneous:
        return book
    if model.model != "rgcn":
        raise ValueError(for_several_types(model.model))
    lacking = [ntype for ntype in book.ntypes if ntype not in having]
    if lacking and args.sampled:
        raise ValueError(
            f"--sampled: {', '.join(lacking)} have no {data.features!r}, and learned rows of other "
            "ranks' nodes are not fetched; expected features of all node types, or no --sampled"
        )
    return book


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise now for unknown loggers, absent packages, files that cannot be written, a folder that
    another run saves in."""
    loggers, lines = [make_logger(text) for text in args.logger], _lines_of(args)
    if lines is not None and lines == Path(args.json):
        raise ValueError(
            f"--json: got {args.json!r}, expected another ending than .jsonl: the epochs are "
            "written to that file, line by line"
        )
    check_out_of_core(args)
    if args.activations_directory is not None:
        check_writable(Path(args.activations_directory), "--activations-directory")
    if os.environ.get("RANK", "0") != "0":  # only the first rank writes
        return
    files = [("--json", lines), ("--json", args.json), ("--trace", args.trace)]
    files += [("--logger", one.path) for one in loggers if isinstance(one, LineFile)]
    for option, path in files:
        if path is not None:
            check_file(Path(path), option)
    for one in loggers:
        if isinstance(one, TensorBoard):
            check_writable(one.folder, "--logger")
    check_pictures(args)
    if args.checkpoint is not None:
        check_free(Path(args.checkpoint))
        check_writable(Path(args.checkpoint), "--checkpoint")
        if (Path(args.checkpoint) / FILE_NAME).exists() and not args.resume:
            raise ValueError(
                f"--checkpoint: {args.checkpoint!r} holds a run; give --resume to continue it, or "
                "another folder"
            )


def _lines_of(args: argparse.Namespace) -> Path | None:
    return None if args.json is None else Path(args.json).with_suffix(".jsonl")


def work(args: argparse.Namespace, group: Group, device: torch.device) -> None:
    importlib.import_module("numba")  # the first epoch would, and count its time and memory
    prepare_optimizers()
    baseline = memory.resident_mb()
    memory.reset_peak()
    reset_peak(device)
    trainer = make_trainer(args, group, device)
    if args.resume:
        trainer.resume()
    print_model(args, trainer)
    if args.explain:
        _explain(trainer)
    with log_layers(group), sar.trace(args.trace, group=group) as recorded:
        trainer.fit()
    if trainer.batches is not None:
        trainer.batches.close()
    ranks = gather_ranks(baseline, group, device)
    layers = gather_layers((trainer.later or recorded).summary(), group)
    timed = max(1, trainer.begun - 1)
    if group.rank == 0:
        told = told_config(args, trainer.config, group, mfgs=trainer.mfgs)
        draw_result(args, report(args, trainer, ranks, told, layers, timed))


class TimedTrainer(Trainer):
    """A trainer that traces epochs after the first apart, as that one compiles kernels and opens
    files.

    ``begun``: epochs of this run. ``later``: the trace of those after the first, if there are any.
    """

    begun = 0
    later: Trace | None = None

    def train_epoch(self) -> float:
        if self.begun == 1:
            self.later = Trace(self.group)
        self.begun += 1
        return super().train_epoch()


def make_trainer(args: argparse.Namespace, group: Group, device: torch.device) -> TimedTrainer:
    """This rank's data, model and loop; collective."""
    model_options, data_options, options = options_of(args)
    partition, graph, data = load_rank(args, data_options, group, device)
    metric = options.metric or metric_of_dataset(partition.book.graph_name)
    options = replace(options, metric=metric)
    print_ranks_joined(args, partition.book, group)
    sampled, batches = sampled_options(args), None
    num_edges = graph.num_edges_global()
    if not model_options.is_own:
        forget_columns(graph)
    graph = prepare_graph(graph, model_options)
    torch.manual_seed(options.seed)  # the same first parameters whatever the number of ranks
    model = build_model(
        model_options, data.widths, data.num_classes, graph=graph, target_type=data.ntype
    ).to(device)
    call = call_of(model_options, model)
    columns = stored_columns(partition, call)
    call.arguments(graph, data.features)  # raises where whole graphs have them not
    if sampled is not None:
        check_takes_blocks(model, sampled, call)
        made = model_options, sampled, options.seed
        batches = Batches(partition, data, *made, group, call, columns)
    del partition  # lets its arrays go
    if args.activations_directory is not None:
        Path(args.activations_directory).mkdir(parents=True, exist_ok=True)
    sar.set_activations(model, args.activations, directory=args.activations_directory)
    config = kept_config(model_options, data_options, options, sampled, data.multilabel) | {
        "in_feats": data.widths,
        "num_classes": data.num_classes,
        "num_nodes": graph.num_nodes_global(),
        "num_edges": num_edges,
    }
    callbacks, lines = [make_logger(text) for text in args.logger], _lines_of(args)
    if lines is not None:
        callbacks.append(JsonLines(lines, {"config": told_config(args, config, group)}))
    return TimedTrainer(
        model, graph, data, options, checkpoint=args.checkpoint, config=config, group=group,
        batches=batches, callbacks=callbacks, call=call,
    )  # fmt: skip


def options_of(args: argparse.Namespace) -> tuple[ModelOptions, DataOptions, TrainOptions]:
    mfgs = "off" if args.sampled and args.sampled_epochs is None else args.mfgs
    train = take(TrainOptions, args, progress=not args.no_progress, mfgs=mfgs)
    return take(ModelOptions, args), take(DataOptions, args), train


def sampled_options(args: argparse.Namespace) -> SampledOptions | None:
    return take(SampledOptions, args) if args.sampled else None


def kept_config(
    model: ModelOptions,
    data: DataOptions,
    train: TrainOptions,
    sampled: SampledOptions | None,
    multilabel: bool,
) -> dict[str, Any]:
    """The options that a resumed run has to share, not its length and its reporting."""
    names = ["lr", "weight_decay", "schedule", "clip_norm", "seed"]
    names += ["warmup"] * bool(train.warmup)  # which older checkpoints do not have
    made = {name: value for name, value in asdict(model).items() if name not in _NEW or value}
    found = {**made, **asdict(data)} | {name: getattr(train, name) for name in names}
    found["metric"] = train.metric_for(multilabel)
    if sampled is not None:
        found |= {f"sampled_{name}": value for name, value in asdict(sampled).items()}
    return found


def told_config(
    args: argparse.Namespace, kept: dict[str, Any], group: Group, **more: Any
) -> dict[str, Any]:
    """The options in a report: ``kept`` ones, and others that count for the model that ran."""
    told = {name: getattr(args, name) for name in _TOLD} | {
        "rematerialize": not args.no_rematerialize,
        "num_ranks": group.size,
        "backend": backend_of(args),
        "threads": torch.get_num_threads(),
    }
    unused = take(ModelOptions, args).unused
    return {name: value for name, value in (told | kept | more).items() if name not in unused}


def _explain(trainer: Trainer) -> None:
    given, data = trainer.blocks, trainer.data
    trainer.model.train()
    whole = (trainer.graph, data.features) if given is None else (given.graphs, given.features)
    args, named = trainer.call.arguments(*whole)
    explanation = sar.explain(trainer.model, *args, **named)
    data.release()
    if trainer.group.rank == 0:
        print(explanation)
