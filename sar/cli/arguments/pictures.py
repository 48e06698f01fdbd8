"""Options of commands that draw."""

from __future__ import annotations

from typing import Any


def add_plot_arguments(group: Any, what: str) -> None:
    """``--plot FILE`` and ``--dark``; ``what`` says what is drawn."""
    group.add_argument("--plot", metavar="FILE", help=f"draw {what}, .png or .svg")
    group.add_argument("--dark", action="store_true", help="draw --plot on a dark ground")


def add_run_arguments(group: Any) -> None:
    """Pictures of a training run."""
    add_plot_arguments(group, "curves, memory and traffic")
    group.add_argument("--report", metavar="FILE", help="write all of it as one page, .html")
