"""What a training run is asked to do: frozen dataclasses, passed down and stored in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from sar.models import ModelOptions
from sar.words import METRICS, MFGS, SCHEDULES

__all__ = ["DataOptions", "ModelOptions", "SampledOptions", "TrainOptions"]


@dataclass(frozen=True)
class DataOptions:
    """Which node fields are features and labels.

    Args:
        features: name of the feature matrix; labels: name of the labels.
        multilabel: labels are a 0/1 matrix, NaN where unknown.
        normalize_features: divide each row by the sum of its magnitudes.
        target_type: the node type that has the labels; ``None``: the only one that has any.
    """

    features: str = "feat"
    labels: str = "label"
    multilabel: bool = False
    normalize_features: bool = False
    target_type: str | None = None


@dataclass(frozen=True)
class SampledOptions:
    """Training on mini-batches, by neighbor sampling.

    Args:
        fanouts: in-edges that a node draws at each hop, the seeds first; -1: all.
        batch_size: seeds of a rank and step.
        epochs: how many of the first epochs are sampled; ``None``: all.
    """

    fanouts: tuple[int, ...] = (15, 10, 5)
    batch_size: int = 1024
    epochs: int | None = None

    def __post_init__(self) -> None:
        if not self.fanouts:
            raise ValueError("fanouts: got none, expected one for each layer")
        for fanout in self.fanouts:
            _at_least("fanouts", fanout, -1)
        _at_least("batch_size", self.batch_size, 1)
        if self.epochs is not None:
            _at_least("sampled_epochs", self.epochs, 1)


@dataclass(frozen=True)
class TrainOptions:
    """The loop.

    Args:
        epochs: in all, also when resumed. lr, weight_decay: Adam's.
        schedule: of the learning rate; ``cosine`` falls to 0 over ``epochs``; ``plateau`` halves
            when the validation metric has not grown for more than ten evaluations.
        warmup: epochs in which the learning rate rises first.
        clip_norm: largest norm of all gradients together; ``None`` does not clip.
        seed: of initial parameters and dropout.
        metric: what is evaluated; ``None`` is accuracy, or f1-micro for multilabel.
        eval_every, checkpoint_every: epochs between evaluations and checkpoints; the last epoch
            always has both.
        checkpoint_steps: steps of a sampled epoch between checkpoints; 0 for none.
        check_every: epochs between comparisons of the parameters over ranks; 0 for none.
        early_stop: end when so many epochs have brought no better validation metric; 0: never.
        progress: show a bar on rank 0; where there is no terminal, a line each ``log_every``
            epochs.
        mfgs: train on blocks (message flow graphs) of the training nodes: ``on``, ``off``, or
            ``auto``: when they save a fifth of the work and give the same result. Evaluation always
            runs on the whole graph.
    """

    epochs: int = 100
    lr: float = 0.01
    weight_decay: float = 0.0
    schedule: str = "constant"
    clip_norm: float | None = None
    seed: int = 0
    metric: str | None = None
    eval_every: int = 1
    checkpoint_every: int = 10
    checkpoint_steps: int = 0
    check_every: int = 25
    progress: bool = False
    mfgs: str = "auto"
    warmup: int = 0
    early_stop: int = 0
    log_every: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "eval_every", "checkpoint_every", "log_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "early_stop"):
            _at_least(name, getattr(self, name), 0)
        _at_least("seed", self.seed, 0)
        _at_least("check_every", self.check_every, 0)
        _at_least("checkpoint_steps", self.checkpoint_steps, 0)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("mfgs", self.mfgs, MFGS)
        if self.metric is not None:
            _one_of("metric", self.metric, METRICS)
        if not self.lr > 0:
            raise ValueError(f"lr: got {self.lr}, expected more than 0")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay: got {self.weight_decay}, expected 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm: got {self.clip_norm}, expected more than 0")

    def metric_for(self, multilabel: bool) -> str:
        """The metric's name with the default filled in."""
        return self.metric or ("f1-micro" if multilabel else "accuracy")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if value < least:
        raise ValueError(f"{name}: got {value}, expected at least {least}")
