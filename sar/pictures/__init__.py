"""Pictures and reports of runs, cuts, plans and measurements, in one look."""

from sar.pictures.cut import draw_cut
from sar.pictures.plan import Plan, draw_plan
from sar.pictures.report import write_report
from sar.pictures.run import Run, draw_run, read_run
from sar.pictures.style import DARK, LIGHT, SUFFIXES, Palette, save

__all__ = [
    "DARK",
    "LIGHT",
    "SUFFIXES",
    "Palette",
    "Plan",
    "Run",
    "draw_cut",
    "draw_plan",
    "draw_run",
    "read_run",
    "save",
    "write_report",
]
