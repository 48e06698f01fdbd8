"""What the options of `sar train` ask for, as the library's own dataclasses and plain values."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from sar.cli.launch import backend_of
from sar.cli.models import model_options
from sar.cli.result_options import result_options
from sar.comm import Group
from sar.train.options import DataOptions, ModelOptions, SampledOptions, TrainOptions

_TOLD = (
    "input", "epochs", "eval_every", "device", "rounds", "memory_budget", "block_bytes",
    "constant_inputs", "activations", "exchange", "zeros", "structure", "map_features",
)  # fmt: skip


def options_of(args: argparse.Namespace) -> tuple[ModelOptions, DataOptions, TrainOptions]:
    """The model, its data and the loop."""
    data = DataOptions(
        args.features, args.labels, args.multilabel, args.normalize_features, args.target_type
    )
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
    return model_options(args), data, train


def sampled_options(args: argparse.Namespace) -> SampledOptions | None:
    """How to sample, or ``None`` for full-batch training."""
    if not args.sampled:
        return None
    fanouts = SampledOptions.fanouts if args.fanouts is None else tuple(args.fanouts)
    size = SampledOptions.batch_size if args.batch_size is None else args.batch_size
    return SampledOptions(fanouts, size, args.sampled_epochs)


def kept_config(
    model: ModelOptions,
    data: DataOptions,
    train: TrainOptions,
    sampled: SampledOptions | None,
    multilabel: bool,
) -> dict[str, Any]:
    """The options that a resumed run has to share; not its length and its reporting."""
    names = ["lr", "weight_decay", "schedule", "clip_norm", "seed"]
    names += ["warmup"] * bool(train.warmup)  # which older checkpoints do not have
    made = {name: value for name, value in asdict(model).items() if name != "args" or value}
    found = {**made, **asdict(data)} | {name: getattr(train, name) for name in names}
    found["metric"] = train.metric_for(multilabel)
    if sampled is not None:
        found |= {f"sampled_{name}": value for name, value in asdict(sampled).items()}
    return found


def told_config(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """What a report says beside that."""
    return {name: getattr(args, name) for name in _TOLD} | {
        "rematerialize": not args.no_rematerialize,
        "num_ranks": group.size,
        "backend": backend_of(args),
        "threads": torch.get_num_threads(),
    }
