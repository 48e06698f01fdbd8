"""Options of a training run: frozen dataclasses, passed down and stored in checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sar import expect
from sar.options import (
    ABOVE_ZERO,
    COUNT,
    FANOUTS,
    KEY_VALUE,
    POSITIVE,
    PROBABILITY,
    TEXT,
    ZERO_OR_MORE,
    Kind,
    check_options,
    one_of,
    option,
)
from sar.words import METRICS, MFGS, MODELS, SCHEDULES

_MODEL = Kind(
    "NAME",
    f"one of {', '.join(MODELS)}, or your own as module:Class or file.py:Class",
    fits=lambda name: name in MODELS or all(name.rpartition(":")),
    words=MODELS,
)

_COLUMN = re.compile(r"([A-Za-z_]\w*=)?[^=\s]+")


def _are_columns(given: Any) -> bool:
    words = [given] if isinstance(given, str) else given
    return all(isinstance(word, str) and _COLUMN.fullmatch(word) is not None for word in words)


_COLUMNS = Kind(
    "NAME", "names of columns of edges, or PARAMETER=NAME", type=(str, tuple), fits=_are_columns
)


@dataclass(frozen=True)
class ModelOptions:
    """A built-in stack of graph layers, or a model of the user's own.

    Args:
        model: ``sage`` (mean), ``gcn`` (symmetric norm), ``gin`` (sum) or ``gat`` (attention);
            ``gcn`` and ``gat`` give each node one self loop. ``rgcn`` is for several node types.
            One's own is ``module:Class`` or ``file.py:Class``; only ``args`` counts for it.
        layers: number of graph layers; hidden: width between them.
        dropout: probability on every layer's input.
        batch_norm: normalize every hidden layer over the nodes of all ranks.
        heads: of ``gat``; a hidden layer's lie side by side, the last one's are averaged.
        args: what the constructor of one's own model gets, plain values by name.
        call: what its ``forward`` gets, see :func:`sar.models.read_call`; ``None``: read there.
        front_end: whose kind of graph and mini-batches that is; ``None`` as by that function.
        edge_features: columns of edges that one's own model gets, see that function.
    """

    model: str = option(
        "sage",
        f"{', '.join(MODELS)} (for several node types), or your own: module:Class, file.py:Class",
        _MODEL,
    )
    layers: int = option(3, "graph layers", POSITIVE)
    hidden: int = option(256, "width of layers", POSITIVE)
    dropout: float = option(0.0, "on each layer's input", PROBABILITY)
    batch_norm: bool = option(False, "over the nodes of all ranks")
    heads: int = option(4, "of gat", POSITIVE, expert=True)
    args: dict[str, Any] = option(
        {},
        "argument of your own model; give it once for each",
        KEY_VALUE,
        name="model_args",
        many="each",
    )

    call: str | None = option(
        None,
        "what your own model's forward gets, such as graph,x or x,edge_index; default: its "
        "signature says it",
        TEXT,
        metavar="NAMES",
        expert=True,
    )
    front_end: str | None = option(
        None,
        "whose graphs and mini-batches it gets: dgl, pyg, sar; default: by --call, and dgl where "
        "it is installed",
        TEXT,
        expert=True,
    )
    edge_features: None | tuple[str, ...] = option(
        None,
        "columns of edges that your own model gets, as its signature says, or in graph.edata; "
        "PARAMETER=NAME says which is which",
        _COLUMNS,
        many="+",
    )

    @property
    def is_own(self) -> bool:
        """Whether it is a model of the user's own."""
        return ":" in self.model

    @property
    def unused(self) -> set[str]:
        """Options that do not count for this model."""
        if self.is_own:
            return {"layers", "hidden", "dropout", "batch_norm", "heads"}
        return {"args", "call", "front_end", "edge_features"} | (
            {"heads"} if self.model != "gat" else set()
        )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("args", "call", "front_end", "edge_features") if not self.is_own else ():
            if value := getattr(self, name):
                raise ValueError(f"{name}: got {value}, expected none for {self.model!r}")
        if self.model == "gat" and self.hidden % self.heads:
            raise ValueError(
                f"heads: got {self.heads}, expected a divisor of hidden, which is {self.hidden}"
            )


@dataclass(frozen=True)
class DataOptions:
    """Which node fields are features and labels.

    Args:
        features: name of the feature matrix; labels: name of the labels.
        multilabel: labels are a 0/1 matrix, NaN where unknown.
        normalize_features: divide each row by the sum of its magnitudes.
        target_type: the node type that has the labels; ``None``: the only one that has any.
    """

    features: str = option("feat", "field of the input rows", TEXT)
    labels: str = option("label", "field of the labels", TEXT)
    multilabel: bool = option(False, "labels are a 0/1 matrix", expert=True)
    normalize_features: bool = option(False, "rows sum to 1", expert=True)
    target_type: str | None = option(
        None, "node type to predict; default: the one with labels", TEXT, metavar="TYPE"
    )


@dataclass(frozen=True)
class SampledOptions:
    """Training on mini-batches, by neighbor sampling.

    Args:
        fanouts: in-edges that a node draws at each hop, the seeds first; -1: all.
        batch_size: seeds of a rank and step.
        epochs: how many of the first epochs are sampled; ``None``: all.
    """

    fanouts: tuple[int, ...] = option(
        (15, 10, 5), "in-edges drawn a layer, seeds' first", FANOUTS, needs="sampled"
    )
    batch_size: int = option(
        1024, "seeds of a rank and step", POSITIVE, needs="sampled", expert=True
    )
    epochs: int | None = option(
        None,
        "sample the first N epochs, the others are full-batch; default: all",
        POSITIVE,
        name="sampled_epochs",
        needs="sampled",
        expert=True,
    )

    def __post_init__(self) -> None:
        if not self.fanouts:
            raise ValueError("fanouts: got none, expected one for each layer")
        check_options(self)


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

    epochs: int = option(100, "in all, also when resumed", POSITIVE)
    lr: float = option(0.01, "learning rate, Adam's", ABOVE_ZERO)
    weight_decay: float = option(0.0, "Adam's", ZERO_OR_MORE, expert=True)
    schedule: str = option("constant", "of --lr", one_of(SCHEDULES), expert=True)
    clip_norm: float | None = option(None, "largest gradient norm", ABOVE_ZERO, expert=True)
    seed: int = option(0, "of parameters and dropout", COUNT)
    metric: str | None = option(
        None,
        "what is evaluated; default: accuracy, or f1-micro with --multilabel",
        one_of(METRICS),
        expert=True,
    )
    eval_every: int = option(1, "epochs between evaluations", POSITIVE, expert=True)
    checkpoint_every: int = option(10, "epochs between checkpoints", POSITIVE, expert=True)
    checkpoint_steps: int = option(
        0,
        "steps between checkpoints inside of an epoch; default: none",
        COUNT,
        needs="sampled",
        expert=True,
    )
    check_every: int = 25
    progress: bool = False
    mfgs: str = option(
        "auto",
        "train on the rows alone that reach the loss; auto: when that saves a fifth",
        one_of(MFGS),
        expert=True,
    )
    warmup: int = option(0, "epochs in which the learning rate rises first", COUNT, expert=True)
    early_stop: int = option(0, "end after N epochs that brought nothing better, 0: never", COUNT)
    log_every: int = option(
        1, "epochs from one line to the next where there is no terminal", POSITIVE, expert=True
    )

    def __post_init__(self) -> None:
        check_options(self)
        expect.integer(self.check_every, "check_every", at_least=0)

    def metric_for(self, multilabel: bool) -> str:
        """The metric's name with the default filled in."""
        return self.metric or ("f1-micro" if multilabel else "accuracy")
