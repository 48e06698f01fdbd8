"""Rows of other ranks: the plan of who sends what, its rounds, and what travels in them."""

from sar.stream.passes import WINDOW, Pass, Shards, Step, Stream, fetch
from sar.stream.plan import HaloPlan, Round, agree_wanted, build_halo_plan, join_plans
from sar.stream.returns import GradientReturn

__all__ = [
    "WINDOW",
    "GradientReturn",
    "HaloPlan",
    "Pass",
    "Round",
    "Shards",
    "Step",
    "Stream",
    "agree_wanted",
    "build_halo_plan",
    "fetch",
    "join_plans",
]
