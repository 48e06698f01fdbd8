"""The options of a run, where they are documented."""

from sar.run_options import DataOptions, ModelOptions, SampledOptions, TrainOptions

__all__ = ["DataOptions", "ModelOptions", "SampledOptions", "TrainOptions"]
