"""Predicting memory, traffic and time of a training run before machines are rented."""

from sar.plan.predict import Bytes, Hardware, Prediction, Setting, predict, predict_bytes
from sar.plan.probe import Costs, Work, measure_costs
from sar.plan.statistics import (
    KNOWN,
    Dataset,
    GraphStatistics,
    RankStatistics,
    estimate,
    from_parts,
    from_quality,
    from_summary,
    random_share,
)

__all__ = [
    "KNOWN",
    "Bytes",
    "Costs",
    "Dataset",
    "GraphStatistics",
    "Hardware",
    "Prediction",
    "RankStatistics",
    "Setting",
    "Work",
    "estimate",
    "from_parts",
    "from_quality",
    "from_summary",
    "measure_costs",
    "predict",
    "predict_bytes",
    "random_share",
]
