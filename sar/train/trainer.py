"""The training loop: full-batch epochs over all ranks, checkpoints, evaluation."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar import registry
from sar.comm import Group, current_group
from sar.comm.seeds import digest_of_text
from sar.errors import SarError
from sar.graph import GraphView
from sar.models import Call, layers_logged, mark_layers, prepare
from sar.nn import (
    check,
    clip_grad_norm_,
    global_mean,
    overlap_gradients,
    sync_params,
)
from sar.train.blocks import Batches, MeanLoss, training_blocks
from sar.train.callbacks import Callback, Callbacks, Progress, Record, without_old_names
from sar.train.checkpoint import (
    FORMAT,
    Best,
    check_fields,
    load_checkpoint,
    load_model,
    load_optimizer,
    random_states,
    restore_random_state,
    save_checkpoint,
)
from sar.train.data import SPLITS, NodeData
from sar.train.embedding import (
    load_tables,
    remove_old_tables,
    save_tables,
    shared_optimizer_state,
    shared_state,
    tables_of,
)
from sar.train.folder import check_config, check_graph, graph_identity, own_folder
from sar.train.metrics import score
from sar.train.options import TrainOptions
from sar.train.schedule import check_validation, make_schedule

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
        scheduler: of that optimizer's learning rate, stepped once an epoch, or torch's
            ``ReduceLROnPlateau``, stepped with the validation metric; by default what
            ``options.schedule`` says.
        checkpoint: folder to save in; ``None`` saves nothing.
        config: plain values stored in the checkpoint, compared when it is resumed.
        group: the ranks; the current group by default.
        batches: what sampled epochs go through.
        callbacks: who is told of the run, on rank 0; as many on every rank.
        call: how the model is called; with (graph, features) by default.

    Attributes:
        epoch: epochs done. history: one record for each of them, see :meth:`fit`.
        best: the record with the largest validation metric, see :class:`sar.train.checkpoint.Best`.
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
        callbacks: Sequence[Callback] = (),
        call: Call | None = None,
    ) -> None:
        self.model, self.graph, self.data, self.options = model, graph, data, options
        self.group = group or current_group()
        self.config = dict(config or {})
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.epoch, self.step, self._begun = 0, 0, MeanLoss()
        self.batches, self.call = batches, call or Call()
        self.history: list[Record] = []
        self._best, self._callbacks = Best(), Callbacks(callbacks, self.group)
        if self.checkpoint is not None:
            tables_of(model)  # raises for rows that it would not find again
        registry.install()  # where the model has imported a library after the graph was made
        self.blocks, self.mfgs = training_blocks(
            model, graph, data, options.mfgs, self.group, self.call
        )
        sync_params(model, group=self.group)
        if isinstance(graph, GraphView) and batches is None:
            prepare(model, graph)
        self._overlapped = overlap_gradients(model, group=self.group)
        self.optimizer = optimizer or torch.optim.Adam(
            model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True
        )
        self.scheduler, self.plateau = make_schedule(self.optimizer, options, scheduler)
        check_validation(options, self.plateau, data.rows, self.group)
        self._seed_random()

    def fit(self) -> list[Record]:
        """Train until ``options.epochs`` epochs are done, or ``options.early_stop`` of them brought
        nothing better; collective.

        Returns a record for each epoch: ``epoch`` (from 1), ``loss`` (before the step), ``lr`` (of
        the step), the metric by its name on each split, as ``val_accuracy`` or ``test_f1-micro``
        (after the step; ``None`` where it was not evaluated or the split is empty), ``seconds`` of
        the step without the evaluation; and the metric again, whatever it is, as ``train_acc``,
        ``val_acc`` and ``test_acc``.

        Raises ``SarError`` on every rank when the loss is not finite, naming the epoch,
        ``DriftError`` when ranks no longer hold the same parameters, and what a callback raises.
        """
        with own_folder(self.checkpoint, self.group):
            try:
                self._fit()
            except BaseException as error:
                self._callbacks.give_up(error)
                raise
            self._callbacks.end(self.best and without_old_names(self.best, self.metric))
        return self.history

    def _fit(self) -> None:
        done = [without_old_names(record, self.metric) for record in self.history]
        self._callbacks.start(self._about(), done)
        with (
            Progress(self.epoch, self.options, self.group) as progress,
            mark_layers(self.model, self.group),
            layers_logged(self.model, self.group),
        ):
            while not self.is_over:
                self._fit_epoch(progress)

    def _fit_epoch(self, progress: Progress) -> None:
        lr, begin = float(self.optimizer.param_groups[0]["lr"]), time.perf_counter()
        loss = self.train_epoch()
        seconds = time.perf_counter() - begin
        self.epoch += 1
        scores = self.evaluate() if self._due(self.options.eval_every) else {}
        record: Record = {"epoch": self.epoch, "loss": loss, "lr": lr, "seconds": seconds}
        for name in (self.metric, "acc"):
            record |= {f"{split}_{name}": scores.get(split) for split in SPLITS}
        self.history.append(record)
        self._judge(record)
        self._callbacks.epoch(without_old_names(record, self.metric))
        progress.show(record)
        if self.options.check_every and self._due(self.options.check_every):
            check(self.model, self.optimizer, buffers=False, group=self.group)
        if self.checkpoint is not None:
            if self._due(self.options.checkpoint_every) or self.is_over:
                self.save()

    def _judge(self, record: Record) -> None:
        """Note the best epoch, and step the plateau's schedule, alike on all ranks."""
        keeps = self.checkpoint is not None and not tables_of(self.model)
        if self._best.see(record) and keeps and self.group.rank == 0:
            self._best.keep(self.model)
        value = record["val_acc"]
        if self.plateau is not None and value is not None and self.epoch > self.options.warmup:
            self.plateau.step(value)

    @property
    def metric(self) -> str:
        """The name of what is evaluated."""
        return self.options.metric_for(self.data.multilabel)

    @property
    def best(self) -> Record | None:
        """The record with the largest validation metric, of equals the first."""
        return self._best.record

    @property
    def stopped_early(self) -> bool:
        """Whether the last ``options.early_stop`` epochs brought nothing better."""
        wait, best = self.options.early_stop, self.best
        if not wait or best is None or self.history[-1]["val_acc"] is None:
            return False
        return self.epoch - best["epoch"] >= wait

    @property
    def is_over(self) -> bool:
        """Whether :meth:`fit` has nothing more to do."""
        return self.epoch >= self.options.epochs or self.stopped_early

    def _about(self) -> Record:
        return {
            "metric": self.metric,
            "epochs": self.options.epochs,
            "num_ranks": self.group.size,
            "num_parameters": sum(param.numel() for param in self.model.parameters()),
            "mfgs": self.mfgs,
            "config": self.config,
        }

    def train_epoch(self) -> float:
        """One full-batch step, or the steps of a sampled epoch. Collective.

        Returns the loss over all ranks' training nodes.
        """
        self.model.train()
        if self.is_sampled:
            self._sampled_steps()
            value, self.step, self._begun = self._begun.value, 0, MeanLoss()
        else:
            value = self._train_step(self._full_batch_loss())
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
        """Train the mini-batches that are left of the epoch."""
        if self.batches is None:
            return
        for batch in self.batches.epoch(self.epoch, self.step):
            logits = self.call(self.model, batch.given, batch.features)
            loss = self._loss_at(logits[: len(batch.labels)], batch.labels)
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
        rows = self.data.rows["train"]
        return self._loss_at(_pick(logits, rows), _pick(self._labels(), rows))

    def _full_batch_loss(self) -> Tensor:
        if self.blocks is None:
            return self.loss(self.call(self.model, self.graph, self.data.features))
        logits = self.call(self.model, self.blocks.graphs, self.blocks.features)
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
        logits = self.call(self.model, self.graph, self.data.features)
        self.data.release()
        return logits

    def evaluate(self, logits: Tensor | None = None) -> dict[str, float | None]:
        """The metric on each split over all ranks, ``None`` where undefined; collective."""
        logits = self.predict() if logits is None else logits
        scores: dict[str, float | None] = {}
        for split, rows in self.data.rows.items():
            picked, labels = _pick(logits, rows), _pick(self._labels(), rows)
            value = score(self.metric, picked, labels, group=self.group)
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
            "model": shared_state(self.model),
            "optimizer": shared_optimizer_state(self.optimizer),
            "tables": save_tables(self.checkpoint, self.model, self.optimizer, self.group),
            "scheduler": self.scheduler.state_dict(),
            "history": self.history,
            "config": self.config,
            "graph": graph_identity(self.graph),
        }
        if self.plateau is not None:
            content["plateau"] = self.plateau.state_dict()
        if (best := self._best.content()) is not None:
            content["best"] = best
        if self.step:
            content["begun"] = {"step": self.step, **vars(self._begun)}
        save_checkpoint(self.checkpoint, content, self.group)
        remove_old_tables(self.checkpoint, content["tables"], self.group)

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
        check_config(content["config"], self.config)
        check_graph(content.get("graph"), graph_identity(self.graph), self.group)
        load_model(self.model, content)
        load_optimizer(self.optimizer, self.scheduler, content, self.plateau)
        heads = content.get("tables", {})
        load_tables(self.checkpoint, heads, self.model, self.optimizer, self.group)
        self.epoch, self.history = content["epoch"], list(content["history"])
        self._best.restore(self.history, content.get("best") if self.group.rank == 0 else None)
        begun = content.get("begun")
        if begun:
            self.step, self._begun = begun["step"], MeanLoss(begun["loss"], begun["seeds"])
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
        return self.epoch

    def _labels(self) -> Tensor:
        if self.data.labels is None:
            raise ValueError("data: got no labels, expected some for training or evaluation")
        return self.data.labels

    def _due(self, every: int) -> bool:
        return self.epoch % every == 0 or self.epoch == self.options.epochs

    def _seed_random(self) -> None:
        """Seed torch, differently on each rank, and keyed dropout, alike on all."""
        text = f"{self.options.seed} {self.epoch} {self.group.rank}"
        torch.manual_seed(digest_of_text(text))
        self.group.seeds.restart(self.options.seed)


def _pick(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows)  # several times faster than values[rows], both ways
