"""Draws the pictures of docs/pictures.md anew, in light and dark: python docs/img/make.py.

Takes some minutes: a graph is cut and trained on, and the planner measures a model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from sar.__main__ import main
from sar.cli.plan import draw
from sar.plan import KNOWN, Hardware, Work, estimate, measure_costs
from sar.train.options import ModelOptions

HERE = Path(__file__).resolve().parent
TONES = {"light": [], "dark": ["--dark"]}


def sar(*words: object) -> None:
    """A command of `sar`; ends the script where it fails."""
    if main([str(word) for word in words]):
        sys.exit(1)


def of_training() -> None:
    """A cut, and GraphSAGE on it."""
    sar("partition", "synthetic:nodes=20000,edges=200000,seed=0", "--parts", 4, "--out", "parts")
    words = ["--hidden", 64, "--dropout", 0.3, "--epochs", 40, "--no-progress"]
    sar("train", "parts/synthetic.json", *words, "--json", "run.json")
    for tone, dark in TONES.items():
        sar("report", "run.json", "--out", HERE / f"run-{tone}.svg", *dark)
        sar("inspect", "parts/synthetic.json", "--plot", HERE / f"cut-{tone}.svg", *dark)


def of_planning() -> None:
    """ogbn-products on 8 hosts of 32 GiB."""
    data, model = KNOWN["ogbn-products"], ModelOptions()
    graph = estimate("ogbn-products", data.nodes, data.edges, 8)
    costs = {"keep": measure_costs(Work(model, data.features, data.classes))}
    for tone, dark in TONES.items():
        hardware = Hardware(memory=32 * 2**30)
        name = "ogbn-products, 3-layer sage, hidden 256"
        draw(HERE / f"plan-{tone}.svg", bool(dark), name, graph, costs, hardware)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        of_training()
        of_planning()
