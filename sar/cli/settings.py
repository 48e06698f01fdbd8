"""What the options of `sar train` ask for, as the library's own dataclasses and plain values."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from sar.cli.launch import backend_of
from sar.comm import Group
from sar.options import take
from sar.run_options import DataOptions, ModelOptions, SampledOptions, TrainOptions

_TOLD = (
    "input", "epochs", "eval_every", "device", "rounds", "memory_budget", "block_bytes",
    "constant_inputs", "activations", "exchange", "zeros", "structure", "map_features",
)  # fmt: skip


def options_of(args: argparse.Namespace) -> tuple[ModelOptions, DataOptions, TrainOptions]:
    """The model, its data and the loop."""
    mfgs = "off" if args.sampled and args.sampled_epochs is None else args.mfgs
    train = take(TrainOptions, args, progress=not args.no_progress, mfgs=mfgs)
    return take(ModelOptions, args), take(DataOptions, args), train


def sampled_options(args: argparse.Namespace) -> SampledOptions | None:
    """How to sample, or ``None`` for full-batch training."""
    return take(SampledOptions, args) if args.sampled else None


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


def told_config(
    args: argparse.Namespace, kept: dict[str, Any], group: Group, **more: Any
) -> dict[str, Any]:
    """What a report says: that, and what else there is to say of the model that ran."""
    told = {name: getattr(args, name) for name in _TOLD} | {
        "rematerialize": not args.no_rematerialize,
        "num_ranks": group.size,
        "backend": backend_of(args),
        "threads": torch.get_num_threads(),
    }
    unused = take(ModelOptions, args).unused
    return {name: value for name, value in (told | kept | more).items() if name not in unused}
