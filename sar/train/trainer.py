"""The training loop: full-batch epochs over all ranks, checkpoints, evaluation."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar.comm import Group, current_group
from sar.errors import SarError
from sar.frontends.dgl import ShardedGraph
from sar.layers import layers_logged, parts_of_fused, prepare
from sar.nn import (
    check,
    clip_grad_norm_,
    global_mean,
    mark_layers,
    overlap_gradients,
    sync_params,
)
from sar.train import tables
from sar.train.blocks import training_blocks
from sar.train.checkpoint import (
    FORMAT,
    check_fields,
    load_checkpoint,
    load_model,
    load_optimizer,
    noise_states,
    random_states,
    restore_noise,
    restore_random_state,
    save_checkpoint,
)
from sar.train.data import SPLITS, NodeData
from sar.train.metrics import score
from sar.train.options import TrainOptions
from sar.train.sampled import Batches

Record = dict[str, Any]
Scheduler = torch.optim.lr_scheduler.LRScheduler


class Trainer:
    """Trains ``model`` on the whole graph; every rank makes one and calls the same methods.

    Args:
        model: called as ``model(graph, features)``, gives logits [n, C] of its nodes; prepared
            for full-batch epochs. One with ``num_blocks`` is also called with a list of as many
            blocks and the rows that the first reads, and gives logits of the last's destinations.
        graph: this rank's view of the graph, or whatever the model takes.
        data: this rank's features, labels and splits, on the model's device.
        options: the loop.
        optimizer: torch's fused Adam over the model's parameters by default.
        scheduler: of that optimizer's learning rate, stepped once an epoch; by default what
            ``options.schedule`` says.
        checkpoint: folder to save in; ``None`` saves nothing.
        config: plain values stored in the checkpoint, compared when it is resumed.
        group: the ranks; the current group by default.
        batches: what sampled epochs go through.

    Attributes:
        epoch: epochs done. history: one record for each of them, see :meth:`fit`.
        step: steps done of a sampled epoch that has begun.
        blocks: what training runs on instead of the whole graph, or ``None``; ``mfgs`` says why.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Any,
        data: NodeData,
        options: TrainOptions,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Scheduler | None = None,
        checkpoint: str | os.PathLike | None = None,
        config: dict[str, Any] | None = None,
        group: Group | None = None,
        batches: Batches | None = None,
    ) -> None:
        self.model, self.graph, self.data, self.options = model, graph, data, options
        self.group = group or current_group()
        self.config = dict(config or {})
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.epoch, self.step, self._begun = 0, 0, _Mean()
        self.batches = batches
        self.history: list[Record] = []
        if self.checkpoint is not None:
            tables.tables_of(model)  # raises for rows that it would not find again
        self.blocks, self.mfgs = training_blocks(model, graph, data, options.mfgs, self.group)
        sync_params(model, group=self.group)
        if isinstance(graph, ShardedGraph) and batches is None:
            prepare(model, graph)
        self._overlapped = overlap_gradients(model, group=self.group)
        self.optimizer = optimizer or torch.optim.Adam(
            model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True
        )
        self.scheduler = scheduler or self._default_scheduler()
        self._seed_random()

    def fit(self) -> list[Record]:
        """Train until ``options.epochs`` epochs are done; collective.

        Returns a record for each epoch: ``epoch`` (from 1), ``loss`` (before the step), the metric
        as ``train_acc``, ``val_acc`` and ``test_acc`` (after the step; ``None`` where it was not
        evaluated or the split is empty) and ``seconds`` of the step without the evaluation.

        Raises ``SarError`` on every rank when the loss is not finite, naming the epoch, and
        ``DriftError`` when ranks no longer hold the same parameters.
        """
        with (
            _Progress(self.epoch, self.options, self.group) as bar,
            mark_layers(self.model, self.group, without=parts_of_fused(self.model)),
            layers_logged(self.model, self.group),
        ):
            while self.epoch < self.options.epochs:
                begin = time.perf_counter()
                loss = self.train_epoch()
                seconds = time.perf_counter() - begin
                self.epoch += 1
                scores = self.evaluate() if self._due(self.options.eval_every) else {}
                record: Record = {"epoch": self.epoch, "loss": loss}
                record |= {f"{split}_acc": scores.get(split) for split in SPLITS}
                self.history.append(record | {"seconds": seconds})
                bar.show(self.history[-1])
                if self.options.check_every and self._due(self.options.check_every):
                    check(self.model, self.optimizer, buffers=False, group=self.group)
                if self.checkpoint is not None and self._due(self.options.checkpoint_every):
                    self.save()
        return self.history

    def train_epoch(self) -> float:
        """One full-batch step, or the steps of a sampled epoch. Collective.

        Returns the loss over all ranks' training nodes.
        """
        self.model.train()
        if self.is_sampled:
            self._sampled_steps()
            value, self.step, self._begun = self._begun.value, 0, _Mean()
        else:
            value = self._train_step(self._training_loss())
        self.scheduler.step()
        return value

    @property
    def is_sampled(self) -> bool:
        """Whether the epoch to come goes through mini-batches."""
        if self.batches is None:
            return False
        last = self.batches.options.epochs
        return last is None or self.epoch < last

    def _sampled_steps(self) -> None:
        """From where the epoch stands to its end."""
        if self.batches is None:
            return
        for batch in self.batches.epoch(self.epoch, self.step):
            loss = self._loss_at(self.model(batch.blocks, batch.features), batch.labels)
            seeds = self.group.all_reduce(torch.tensor(len(batch.labels)))
            self._begun.add(self._train_step(loss), int(seeds))
            self.step += 1
            every = self.options.checkpoint_steps
            if self.checkpoint is not None and every and self.step % every == 0:
                self.save()

    def _train_step(self, loss: Tensor) -> float:
        """Change the parameters by the gradients of a loss; returns its value. Collective."""
        value = float(loss.detach())
        if not math.isfinite(value):  # equal on every rank, so every rank raises
            raise SarError(f"epoch {self.epoch + 1}: the loss is {value}; training stopped")
        self.optimizer.zero_grad(set_to_none=True)
        self.data.release()  # the peak of memory comes now
        self._overlapped.backward(loss)
        self.data.release()
        if self.options.clip_norm is not None:
            clip_grad_norm_(self.model, self.options.clip_norm, group=self.group)
        self.optimizer.step()
        return value

    def loss(self, logits: Tensor) -> Tensor:
        """Mean cross entropy over the training nodes of all ranks; binary for multilabel."""
        return self._loss_of(_pick(logits, self.data.rows["train"]))

    def _training_loss(self) -> Tensor:
        if self.blocks is None:
            return self.loss(self.model(self.graph, self.data.features))
        return self._loss_of(self.model(self.blocks.graphs, self.blocks.features))

    def _loss_of(self, logits: Tensor) -> Tensor:
        """Of the logits of the training rows alone."""
        return self._loss_at(logits, _pick(self._labels(), self.data.rows["train"]))

    def _loss_at(self, logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.data.multilabel:
            values = F.cross_entropy(wide, labels, reduction="none")
            return global_mean(values, group=self.group)
        known, truth = ~labels.isnan(), labels.nan_to_num(0.0).to(wide.dtype)
        values = F.binary_cross_entropy_with_logits(wide, truth, reduction="none")
        return global_mean(values, known, group=self.group)

    @torch.no_grad()
    def predict(self) -> Tensor:
        """Logits [n, C] of this rank's nodes in evaluation mode; collective."""
        self.model.eval()
        logits = self.model(self.graph, self.data.features)
        self.data.release()
        return logits

    def evaluate(self, logits: Tensor | None = None) -> dict[str, float | None]:
        """The metric on each split over all ranks, ``None`` where undefined; collective."""
        logits = self.predict() if logits is None else logits
        metric = self.options.metric_for(self.data.multilabel)
        scores: dict[str, float | None] = {}
        for split, rows in self.data.rows.items():
            picked, labels = _pick(logits, rows), _pick(self._labels(), rows)
            value = score(metric, picked, labels, group=self.group)
            scores[split] = None if math.isnan(value) else value
        return scores

    def save(self) -> None:
        """Write the checkpoint; collective."""
        if self.checkpoint is None:
            raise ValueError("checkpoint: got None, expected the folder to save in")
        content: dict[str, Any] = {
            "format": FORMAT,
            "epoch": self.epoch,
            "num_ranks": self.group.size,
            "random": random_states(self.group),
            "dropout_seeds": self.group.seeds.state(),
            "noise": noise_states(self.group),
            "model": tables.shared_state(self.model),
            "optimizer": tables.shared_optimizer_state(self.optimizer),
            "tables": tables.save_tables(self.checkpoint, self.model, self.optimizer, self.group),
            "scheduler": self.scheduler.state_dict(),
            "history": self.history,
            "config": self.config,
            "graph": self._graph_identity(),
        }
        if self.step:
            content["begun"] = {"step": self.step, **vars(self._begun)}
        save_checkpoint(self.checkpoint, content, self.group)
        tables.remove_old_tables(self.checkpoint, content["tables"], self.group)

    def resume(self) -> int:
        """Continue from the checkpoint; returns the epochs it had done. Collective.

        On as many ranks as saved it the run goes on bit for bit; on another number it goes on with
        fresh random states and a warning. Raises ``ValueError`` on every rank when there is no
        checkpoint, or it is of another model, graph or options.
        """
        if self.checkpoint is None:
            raise ValueError("checkpoint: got None, expected the folder to resume from")
        content = load_checkpoint(self.checkpoint, self.group)
        check_fields(content)  # the same bytes on all ranks, so all raise
        _check_config(content["config"], self.config)
        self._check_graph(content.get("graph"))
        load_model(self.model, content)
        load_optimizer(self.optimizer, self.scheduler, content)
        heads = content.get("tables", {})
        tables.load_tables(self.checkpoint, heads, self.model, self.optimizer, self.group)
        self.epoch, self.history = content["epoch"], list(content["history"])
        begun = content.get("begun")
        if begun:
            self.step, self._begun = begun["step"], _Mean(begun["loss"], begun["seeds"])
        same = content["num_ranks"] == self.group.size
        if same:
            restore_random_state(content["random"], self.group)
        else:
            self._seed_random()
            if self.group.rank == 0:
                warnings.warn(
                    f"the checkpoint was written by {content['num_ranks']} ranks and is resumed "
                    f"by {self.group.size}: the run continues, but not bit for bit",
                    stacklevel=2,
                )
        self.group.seeds.restart(*content["dropout_seeds"])
        if same and "noise" in content:
            restore_noise(content["noise"], self.group)
        return self.epoch

    def _graph_identity(self) -> dict[str, Any]:
        """What tells the graph and its cut from others; empty for no graph of the library's."""
        if not isinstance(self.graph, ShardedGraph):
            return {}
        book = self.graph.partition_book
        return {"graph": book.graph_digest, "cut": book.digest(), "num_parts": book.num_parts}

    def _check_graph(self, saved: dict[str, Any] | None) -> None:
        """Refuse to go on with another graph, where partitions tell it; the same on all ranks."""
        mine = self._graph_identity()
        if not mine or not saved:
            return
        same_cut = saved["cut"] == mine["cut"]
        known = saved["graph"] is not None and mine["graph"] is not None
        same_graph = saved["graph"] == mine["graph"] if known else same_cut
        if same_graph or same_cut:
            return
        if known or saved["num_parts"] == mine["num_parts"]:
            raise ValueError(
                "the checkpoint was made with another graph, or another cut of partitions that do "
                "not tell what they are cuts of; train on the same one, or start anew"
            )
        if self.group.rank == 0:
            warnings.warn(
                "the checkpoint was made with another number of parts, and the partitions hold no "
                "digest of the graph: that it is the same one cannot be told",
                stacklevel=3,
            )

    def _labels(self) -> Tensor:
        if self.data.labels is None:
            raise ValueError("data: got no labels, expected some for training or evaluation")
        return self.data.labels

    def _due(self, every: int) -> bool:
        return self.epoch % every == 0 or self.epoch == self.options.epochs

    def _default_scheduler(self) -> Scheduler:
        if self.options.schedule == "cosine":
            return torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.options.epochs)
        return torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)

    def _seed_random(self) -> None:
        """What torch draws differs between ranks; keyed dropout does not."""
        text = f"{self.options.seed} {self.epoch} {self.group.rank}"
        digest = hashlib.sha256(text.encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        self.group.seeds.restart(self.options.seed)


@dataclass
class _Mean:
    """Of the losses of an epoch's steps, each seed counting alike."""

    loss: float = 0.0
    seeds: int = 0

    def add(self, loss: float, seeds: int) -> None:
        self.loss += loss * seeds
        self.seeds += seeds

    @property
    def value(self) -> float:
        return self.loss / max(1, self.seeds)


def _pick(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows)  # several times faster than values[rows], both ways


def _check_config(saved: dict[str, Any], mine: dict[str, Any]) -> None:
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    if names:
        parts = [f"{name} {saved.get(name)!r}, now {mine.get(name)!r}" for name in names]
        raise ValueError(
            f"the checkpoint was made with other options: {'; '.join(parts)}. Give the same ones, "
            "or start anew in another folder"
        )


class _Progress:
    """A progress bar on rank 0, or nothing."""

    def __init__(self, done: int, options: TrainOptions, group: Group) -> None:
        self.bar = None
        if options.progress and group.rank == 0:
            from tqdm import tqdm

            self.bar = tqdm(initial=done, total=options.epochs, unit="epoch", mininterval=0.5)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, record: Record) -> None:
        if self.bar is not None:
            shown = {name: record[name] for name in ("loss", "val_acc", "test_acc")}
            text = {name: "-" if v is None else f"{v:.4f}" for name, v in shown.items()}
            self.bar.set_postfix(text, refresh=False)
            self.bar.update()
