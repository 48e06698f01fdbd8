"""`sar train`: full-batch training of a built-in model on a partitioned graph."""

from __future__ import annotations

import argparse
import importlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import sar
from sar._private import prepare_optimizers
from sar.cli.header import layers_told, tell_model, tell_ranks, tell_ranks_joined
from sar.cli.inputs import add_input_arguments, parts_of_rank, resolve_parts
from sar.cli.launch import (
    add_rank_arguments,
    backend_of,
    check_rank_arguments,
    joined,
    launch,
    policy_of,
    run_rank,
    threads_of,
)
from sar.cli.outputs import check_file, check_writable
from sar.cli.report import gather_layers, gather_ranks, report
from sar.cli.result_options import (
    add_result_arguments,
    callbacks_of,
    check_results,
    result_options,
    with_metric_of,
)
from sar.comm import Group
from sar.files import remove_left_over
from sar.kernels.device import reset_peak
from sar.memory.activations import ACTIVATIONS
from sar.partition.book_file import read_book
from sar.partition.load import PartitionData
from sar.train import memory
from sar.train.checkpoint import FILE_NAME
from sar.train.data import NodeData, check_fields, load_node_data
from sar.train.models import build_model, prepare_graph
from sar.train.options import (
    METRICS,
    MFGS,
    MODELS,
    SCHEDULES,
    DataOptions,
    ModelOptions,
    SampledOptions,
    TrainOptions,
)
from sar.train.sampled import Batches, check_model
from sar.train.trainer import Trainer


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "train",
        help="train a model on a partitioned graph",
        description="Train a model full-batch and exactly, one rank for each part of the graph. "
        "Starts the ranks on this machine, or is one of those that torchrun started.",
    )
    add_input_arguments(parser)
    add_model_arguments(parser.add_argument_group("model"))
    training = parser.add_argument_group("training")
    _add_loop_arguments(training)
    _add_sampling_arguments(parser.add_argument_group("mini-batches"))
    _add_data_arguments(parser.add_argument_group("data"))
    add_rank_arguments(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--checkpoint", metavar="DIR", help="folder to save the run in")
    results.add_argument(
        "--checkpoint-every", type=int, default=10, metavar="N", help="epochs, default 10"
    )
    results.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    results.add_argument(
        "--json",
        metavar="OUT.json",
        help="write epochs, ranks, configuration at the end, and a line after each epoch in "
        "OUT.jsonl",
    )
    results.add_argument(
        "--trace", metavar="OUT.json", help="write what every rank did when, in Chrome's format"
    )
    results.add_argument(
        "--explain", action="store_true", help="show first what computes each layer, and its bytes"
    )
    results.add_argument(
        "--no-progress", action="store_true", help="show no bar and no lines of epochs"
    )
    add_result_arguments(training, results)
    return parser


def add_model_arguments(group: Any) -> None:
    """What :func:`model_options` reads."""
    group.add_argument("--model", choices=MODELS, default="sage", help="default: sage")
    group.add_argument("--layers", type=int, default=3, help="default 3")
    group.add_argument("--hidden", type=int, default=256, help="width, default 256")
    group.add_argument("--heads", type=int, default=4, help="of gat, default 4")
    group.add_argument("--dropout", type=float, default=0.0, help="default 0")
    group.add_argument("--batch-norm", action="store_true", help="over the nodes of all ranks")


def _add_loop_arguments(group: Any) -> None:
    group.add_argument("--epochs", type=int, default=100, help="default 100")
    group.add_argument("--lr", type=float, default=0.01, help="Adam's, default 0.01")
    group.add_argument("--weight-decay", type=float, default=0.0, help="default 0")
    group.add_argument("--schedule", choices=SCHEDULES, default="constant", help="of --lr")
    group.add_argument("--clip-norm", type=float, metavar="X", help="largest gradient norm")
    group.add_argument("--seed", type=int, default=0, help="default 0")
    group.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default="keep",
        help="what layers do with what backward needs, default: keep",
    )
    group.add_argument(
        "--activations-directory", metavar="DIR", help="folder on a disk, for --activations offload"
    )
    group.add_argument(
        "--mfgs",
        choices=MFGS,
        default="auto",
        help="train on the rows alone that reach the loss; default auto: when that saves a fifth",
    )
    group.add_argument("--metric", choices=METRICS, help="default: accuracy; multilabel: f1-micro")
    group.add_argument(
        "--eval-every", type=int, default=1, metavar="N", help="epochs between evaluations"
    )


def _add_sampling_arguments(group: Any) -> None:
    group.add_argument(
        "--sampled", action="store_true", help="train on mini-batches, evaluate on the whole graph"
    )
    group.add_argument(
        "--fanouts",
        metavar="N,N,...",
        help="in-edges that a node draws for each layer, the seeds first, -1 for all; "
        "default 15,10,5",
    )
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="seeds of a rank and step, default 1024"
    )
    group.add_argument(
        "--sampled-epochs",
        type=int,
        metavar="N",
        help="sample the first N epochs, the others are full-batch; default all",
    )
    group.add_argument(
        "--checkpoint-steps",
        type=int,
        metavar="N",
        help="steps between checkpoints inside of an epoch, default none",
    )


def _sampled_options(args: argparse.Namespace) -> SampledOptions | None:
    """How to sample, or ``None`` for full-batch training."""
    given = {
        name: getattr(args, name)
        for name in ("fanouts", "batch_size", "sampled_epochs", "checkpoint_steps")
        if getattr(args, name) is not None
    }
    if not args.sampled:
        for name in given:
            raise ValueError(f"--{name.replace('_', '-')}: got one, expected --sampled as well")
        return None
    fanouts = SampledOptions.fanouts
    if args.fanouts is not None:
        words = args.fanouts.split(",")
        if not all(word.strip().lstrip("-").isdigit() for word in words):
            raise ValueError(f"--fanouts: got {args.fanouts!r}, expected numbers such as 15,10,5")
        fanouts = tuple(int(word) for word in words)
    size = SampledOptions.batch_size if args.batch_size is None else args.batch_size
    sampled = SampledOptions(fanouts, size, args.sampled_epochs)
    check_model(model_options(args), sampled)
    return sampled


def _add_data_arguments(group: Any) -> None:
    group.add_argument("--features", default="feat", metavar="NAME", help="default: feat")
    group.add_argument("--labels", default="label", metavar="NAME", help="default: label")
    group.add_argument("--multilabel", action="store_true", help="labels are a 0/1 matrix")
    group.add_argument("--normalize-features", action="store_true", help="rows sum to 1")


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked now, then start the ranks or be one."""
    _options(args)
    _sampled_options(args)
    check_rank_arguments(args)
    if joined():
        run_rank(args, work, _check_outputs)
        return 0
    _check_outputs(args)
    args.input, nproc = resolve_parts(args, args.nproc)
    check_fields(args.input, args.features, args.labels, ["train_mask"])
    tell_ranks(args, read_book(args.input), nproc, threads_of(args, nproc))
    launch("train", args, nproc)
    return 0


def work(args: argparse.Namespace, group: Group, device: torch.device) -> None:
    """What one rank does."""
    importlib.import_module("dgl")
    prepare_optimizers()
    baseline = memory.resident_mb()
    memory.reset_peak()
    reset_peak(device)
    model_options, data_options, options = _options(args)
    partition, graph, data = load_rank(args, data_options, group, device)
    options = with_metric_of(partition.book.graph_name, options)
    tell_ranks_joined(args, partition.book, group)
    sampled, batches = _sampled_options(args), None
    if sampled is not None:
        batches = Batches(partition, data, model_options, sampled, options.seed, group)
    del partition  # lets its arrays go
    num_edges = graph.num_edges_global()
    graph = prepare_graph(graph, model_options)
    torch.manual_seed(options.seed)  # the same first parameters whatever the number of ranks
    model = build_model(model_options, data.features.shape[1], data.num_classes).to(device)
    if args.activations_directory is not None:
        Path(args.activations_directory).mkdir(parents=True, exist_ok=True)
    sar.set_activations(model, args.activations, directory=args.activations_directory)
    config = {
        **asdict(model_options),
        **asdict(data_options),
        **_optimization(options, data.multilabel),
        "in_feats": data.features.shape[1],
        "num_classes": data.num_classes,
        "num_nodes": graph.num_nodes_global(),
        "num_edges": num_edges,
    }
    if sampled is not None:
        config |= {f"sampled_{name}": value for name, value in asdict(sampled).items()}
    trainer = Trainer(
        model, graph, data, options, checkpoint=args.checkpoint, config=config, group=group,
        batches=batches, callbacks=callbacks_of(args, _config(args, group) | config),
    )  # fmt: skip
    if args.resume:
        trainer.resume()
    tell_model(args, trainer)
    if args.explain:
        _explain(trainer)
    with layers_told(group), sar.trace(args.trace, group=group) as recorded:
        trainer.fit()
    if batches is not None:
        batches.close()
    ranks = gather_ranks(baseline, group, device)
    layers = gather_layers(recorded.summary(), group)
    if group.rank == 0:
        told = {**_config(args, group), **config, "mfgs": trainer.mfgs}
        report(args.json, trainer, ranks, told, layers)


def _explain(trainer: Trainer) -> None:
    """Print what computes the layers in full-batch training; collective."""
    given, data = trainer.blocks, trainer.data
    trainer.model.train()
    if given is None:
        explanation = sar.explain(trainer.model, trainer.graph, data.features)
    else:
        explanation = sar.explain(trainer.model, given.graphs, given.features)
    data.release()
    if trainer.group.rank == 0:
        print(explanation)


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
    graph = sar.construct_full_graph(partition, policy_of(args))
    return partition, graph, data.to(device)


def model_options(args: argparse.Namespace) -> ModelOptions:
    """The built-in model that the options name."""
    sizes = (args.layers, args.hidden, args.dropout, args.batch_norm, args.heads)
    return ModelOptions(args.model, *sizes)


def _options(args: argparse.Namespace) -> tuple[ModelOptions, DataOptions, TrainOptions]:
    model = model_options(args)
    data = DataOptions(args.features, args.labels, args.multilabel, args.normalize_features)
    train = TrainOptions(
        epochs=args.epochs,
        lr=args.lr,
        weight_decay=args.weight_decay,
        schedule=args.schedule,
        clip_norm=args.clip_norm,
        seed=args.seed,
        metric=args.metric,
        eval_every=args.eval_every,
        checkpoint_every=args.checkpoint_every,
        progress=not args.no_progress,
        mfgs="off" if args.sampled and args.sampled_epochs is None else args.mfgs,
        checkpoint_steps=args.checkpoint_steps or 0,
        **result_options(args),
    )
    return model, data, train


def _optimization(options: TrainOptions, multilabel: bool) -> dict[str, Any]:
    """The options that a resumed run has to share; not its length and its reporting."""
    names = ["lr", "weight_decay", "schedule", "clip_norm", "seed"]
    names += ["warmup"] * bool(options.warmup)  # which older checkpoints do not have
    return {name: getattr(options, name) for name in names} | {
        "metric": options.metric_for(multilabel)
    }


def _check_outputs(args: argparse.Namespace) -> None:
    check_results(args)
    if args.activations_directory is not None:
        if args.activations != "offload":
            raise ValueError("--activations-directory: expected --activations offload with it")
        check_writable(Path(args.activations_directory), "--activations-directory")
    if args.resume and args.checkpoint is None:
        raise ValueError("--resume: got no --checkpoint, expected the folder to continue from")
    if os.environ.get("RANK", "0") != "0":  # only the first rank writes
        return
    for name, path in (("--json", args.json), ("--trace", args.trace)):
        if path is not None:
            check_file(Path(path), name)
    if args.checkpoint is not None:
        check_writable(Path(args.checkpoint), "--checkpoint")
        remove_left_over(Path(args.checkpoint), [FILE_NAME])
        if (Path(args.checkpoint) / FILE_NAME).exists() and not args.resume:
            raise ValueError(
                f"--checkpoint: {args.checkpoint!r} holds a run; give --resume to continue it, or "
                "another folder"
            )


def _config(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    names = (
        "input",
        "epochs",
        "eval_every",
        "device",
        "rounds",
        "memory_budget",
        "block_bytes",
        "constant_inputs",
        "activations",
        "exchange",
        "zeros",
        "structure",
        "map_features",
    )
    return {name: getattr(args, name) for name in names} | {
        "rematerialize": not args.no_rematerialize,
        "lossy": asdict(policy_of(args).lossy),
        "num_ranks": group.size,
        "backend": backend_of(args),
        "threads": torch.get_num_threads(),
    }
