"""Everything that a rank keeps in memory while it trains, by kind."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure


class Resident:
    """One rank of training as ``sar train`` does it; nothing is loaded before :meth:`run`.

    Args:
        parts: the partitions' JSON.
        options: of :class:`sar.train.ModelOptions`.
        activations: what ``sar.set_activations`` takes.
        rounds, structure: of the policy.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        port: int,
        parts: str,
        options: dict[str, Any],
        activations: str = "keep",
        rounds: int | None = None,
        structure: str = "both",
    ) -> None:
        import dgl.nn  # noqa: F401  imported by the first model otherwise
        import torch._dynamo  # noqa: F401  imported by the first optimizer step otherwise

        import sar

        self.sar, self.parts, self.options = sar, parts, options
        self.group = sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)
        self.activations = activations
        self.policy = sar.Policy(rounds=rounds, structure=structure)

    def run(self, epochs: int) -> dict[str, Any]:
        """Bytes by kind, the largest resident and anonymous memory of training, and losses."""
        measure.settle()
        imported = measure.anonymous_bytes()
        trainer = self._prepare()
        measure.settle()
        prepared = measure.anonymous_bytes()
        trainer.loss = _Watched(trainer.loss)
        with measure.PeakMemory() as training:
            losses = [trainer.train_epoch() for _ in range(epochs)]
        found = {"kept for backward": trainer.loss.after - prepared}
        found |= {"resident": sum(measure.status_bytes("VmHWM"))}
        found |= {"imported": imported, "prepared": prepared - imported}
        found |= {"peak": training.peak.sampled}
        return {**found, **self._kinds(trainer), "losses": losses}

    def _prepare(self) -> Any:
        from sar.train import (
            DataOptions,
            ModelOptions,
            Trainer,
            TrainOptions,
            build_model,
            load_node_data,
        )

        partition = self.sar.load_dgl_partition_data(self.parts, self.group.rank, "cpu")
        data = load_node_data(partition, DataOptions())
        graph = self.sar.construct_full_graph(partition, self.policy)
        del partition
        graph.create_formats_()
        torch.manual_seed(0)
        options = ModelOptions(**self.options)
        model = build_model(options, data.features.shape[1], data.num_classes)
        if self.activations != "keep":
            self.sar.set_activations(model, self.activations)
        return Trainer(model, graph, data, TrainOptions())

    def _kinds(self, trainer: Any) -> dict[str, int]:
        """Bytes of tensors that stay between epochs, each storage under the first kind."""
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
            "kept input sums": _bytes([relation.constants], seen),
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
    import types

    world = (type, types.ModuleType, types.FrameType)
    from sar.comm import Group

    visited = {id(thing) for thing in but}
    left, total = list(roots), 0
    while left:
        thing = left.pop()
        if id(thing) in visited or isinstance(thing, (*world, Group)):
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
