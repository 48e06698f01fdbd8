"""The model whose memory and traffic `sar partition` and `sar inspect` predict."""

from __future__ import annotations

import argparse

from sar.cli.values import positive

_MODELS = ("sage", "gcn", "gin", "gat")


def add_cut_model(parser: argparse.ArgumentParser) -> None:
    """What is predicted, of which model."""
    model = parser.add_argument_group(
        "model", "Any of these predicts memory and traffic of each rank; takes some seconds."
    )
    model.add_argument("--model", choices=_MODELS, help="sage where another option is given")
    model.add_argument("--layers", type=positive, help="graph layers; default: 3")
    model.add_argument("--hidden", type=positive, help="width of layers; default: 256")
