"""The model that a command's options name."""

from __future__ import annotations

import argparse

from sar.models import ModelOptions


def model_options(args: argparse.Namespace) -> ModelOptions:
    """What :func:`sar.cli.arguments.model.add_model_arguments` took."""
    sizes = (args.layers, args.hidden, args.dropout, args.batch_norm, args.heads)
    given = {"args": dict(args.model_args), "call": args.call, "front_end": args.front_end}
    return ModelOptions(args.model, *sizes, **given)
