"""Rows of other ranks: the plan of who sends what, its rounds, and what travels in them."""

from sar.stream.passes import (
    WINDOW,
    GradientMessages,
    GradientReturn,
    Pass,
    RowMessages,
    Shards,
    Step,
    Stream,
    Whole,
    fetch,
)
from sar.stream.plan import HaloPlan, Round, agree_on_gradients, build_halo_plan, join_plans

__all__ = [
    "WINDOW",
    "GradientMessages",
    "GradientReturn",
    "HaloPlan",
    "Pass",
    "Round",
    "RowMessages",
    "Shards",
    "Step",
    "Stream",
    "Whole",
    "agree_on_gradients",
    "build_halo_plan",
    "fetch",
    "join_plans",
]
