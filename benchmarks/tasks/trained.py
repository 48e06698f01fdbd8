"""A rank that trains a built-in model as ``sar train`` does, and all that it keeps in memory."""

from __future__ import annotations

import gc
import time
import types
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure


class Trained:
    """Nothing is loaded before a method is called.

    Args:
        parts: the partitions' JSON.
        model: of :class:`sar.train.ModelOptions`.
        activations: what ``sar.set_activations`` takes.
        mfgs: of :class:`sar.train.TrainOptions`.
        policy: of the graph.
    """

    def __init__(
        self,
        parts: str,
        model: dict[str, Any],
        activations: str = "keep",
        mfgs: str = "auto",
        **policy: Any,
    ) -> None:
        import sar

        self.sar, self.parts, self.options = sar, parts, model
        self.group = sar.initialize_comms()
        self.activations, self.mfgs, self.policy = activations, mfgs, sar.Policy(**policy)

    def kinds(self, epochs: int) -> dict[str, Any]:
        """Bytes by kind, the largest resident and anonymous memory of training."""
        import dgl.nn  # noqa: F401  imported by the first model otherwise
        import torch._dynamo  # noqa: F401  imported by the first optimizer step otherwise

        measure.settle()
        imported = measure.anonymous_bytes()
        trainer = self._prepare()
        trainer.graph.create_formats_()
        measure.settle()
        prepared = measure.anonymous_bytes()
        trainer.loss = _Watched(trainer.loss)
        with measure.PeakMemory() as training:
            for _ in range(epochs):
                trainer.train_epoch()
        found = {"kept for backward": trainer.loss.after - prepared, "imported": imported}
        found |= {"resident": sum(measure.status_bytes("VmHWM")), "peak": training.peak.sampled}
        return {**found, **self._kinds(trainer)}

    def watch(self, epochs: int) -> dict[str, float]:
        """Bytes sent and wall seconds of an epoch; then the peak of resident bytes.

        Apart, for whoever reads memory a thousand times a second on each rank takes a share of the
        cores.
        """
        trainer = self._prepare()
        for _ in range(2):  # the first epochs make what later ones use
            trainer.train_epoch()
        measure.settle()
        sent, wall = self.group.counters.sent_bytes, time.perf_counter()
        for _ in range(epochs):
            trainer.train_epoch()
        wall = time.perf_counter() - wall
        sent = self.group.counters.sent_bytes - sent
        with measure.PeakMemory() as watched:
            for _ in range(epochs):
                trainer.train_epoch()
        resident = watched.peak.best + sum(measure.status_bytes("RssFile", "RssShmem"))
        return {"resident": resident, "sent": sent / epochs, "wall": wall / epochs}

    def _prepare(self) -> Any:
        from sar.models import build_model, prepare_graph
        from sar.train import DataOptions, ModelOptions, Trainer, TrainOptions, load_node_data

        options = ModelOptions(**self.options)
        partition = self.sar.load_dgl_partition_data(self.parts, self.group.rank, "cpu")
        data = load_node_data(partition, DataOptions(), group=self.group)
        graph = prepare_graph(self.sar.construct_full_graph(partition, self.policy), options)
        del partition
        torch.manual_seed(0)
        model = build_model(options, data.features.shape[1], data.num_classes)
        self.sar.set_activations(model, self.activations)
        return Trainer(model, graph, data, TrainOptions(mfgs=self.mfgs), group=self.group)

    def _kinds(self, trainer: Any) -> dict[str, int]:
        """Bytes of tensors that stay between epochs, each storage under the first kind."""
        from sar.edges.constant import Constants

        relation = trainer.graph.scope().relation
        seen: set[int] = set()
        state = [v for entry in trainer.optimizer.state.values() for v in entry.values()]
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        return {
            "nodes": trainer.data.features.shape[0],
            "edges": relation.num_edges,
            "features": _bytes([trainer.data.features], seen),
            "labels and splits": _bytes([trainer.data.labels, trainer.data.rows], seen),
            "edge arrays": _bytes([relation.store], seen, but=(relation.plan,)),
            "halo plan": _bytes([relation.plan], seen),
            "kept input sums": _bytes([relation.known.get(Constants)], seen),
            "degrees and ids": _bytes([trainer.graph], seen),
            "idle buffers": self.group.pool.idle_bytes,
            "model and optimizer": _bytes([trainer.model, grads, state], seen),
        }


class _Watched:
    """A loss function that notes the anonymous memory when it is called: after the forward pass."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.after = loss, 0

    def __call__(self, logits: Tensor) -> Tensor:
        self.after = measure.anonymous_bytes()
        return self.loss(logits)


def _bytes(roots: list[Any], seen: set[int], but: tuple[Any, ...] = ()) -> int:
    """Bytes of the storages that are reachable and not in ``seen`` yet."""
    from sar.comm import Group

    world = (type, types.ModuleType, types.FrameType, Group)
    visited = {id(thing) for thing in but}
    left, total = list(roots), 0
    while left:
        thing = left.pop()
        if id(thing) in visited or isinstance(thing, world):
            continue
        visited.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        elif isinstance(thing, types.FunctionType):
            left += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            left += gc.get_referents(thing)
    return total
