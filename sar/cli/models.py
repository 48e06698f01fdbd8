"""The model that a command's options name."""

from __future__ import annotations

import argparse

from sar.train.options import ModelOptions


def model_options(args: argparse.Namespace) -> ModelOptions:
    """What :func:`sar.cli.arguments.model.add_model_arguments` took."""
    sizes = (args.layers, args.hidden, args.dropout, args.batch_norm, args.heads)
    return ModelOptions(args.model, *sizes, args=dict(args.model_args))
