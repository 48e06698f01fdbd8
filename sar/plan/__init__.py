"""Predicting memory, traffic and time of a training run before machines are rented."""

from sar.plan.predict import (
    CLASSES,
    Hardware,
    Predicted,
    Prediction,
    Setting,
    numbers,
    predict,
    predict_training,
    settings_of,
)
from sar.plan.probe import Costs, Work, measure_costs
from sar.plan.statistics import (
    KNOWN,
    Dataset,
    GraphStatistics,
    RankStatistics,
    estimate,
    from_book,
    from_parts,
    from_quality,
    from_summary,
    other_number,
)
from sar.plan.turns import Turns, predict_turns

__all__ = [
    "CLASSES",
    "KNOWN",
    "Costs",
    "Dataset",
    "GraphStatistics",
    "Hardware",
    "Predicted",
    "Prediction",
    "RankStatistics",
    "Setting",
    "Turns",
    "Work",
    "estimate",
    "from_book",
    "from_parts",
    "from_quality",
    "from_summary",
    "measure_costs",
    "numbers",
    "other_number",
    "predict",
    "predict_training",
    "predict_turns",
    "settings_of",
]
