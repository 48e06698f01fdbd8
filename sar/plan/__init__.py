"""Predicting memory, traffic and time of a training run before machines are rented."""

from sar.plan.known import KNOWN, Dataset
from sar.plan.predict import Hardware, Prediction, Setting, predict
from sar.plan.probe import Costs, Work, measure_costs
from sar.plan.statistics import GraphStatistics, RankStatistics, estimate, from_parts

__all__ = [
    "KNOWN",
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
    "measure_costs",
    "predict",
]
