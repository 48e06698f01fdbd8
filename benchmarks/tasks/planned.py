"""One rank of a built-in model, trained as ``sar train`` does, watched by the planner's bench."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import measure


class Planned:
    """A rank that trains the model of a configuration on its part."""

    def __init__(
        self,
        rank: int,
        size: int,
        port: int,
        parts: str,
        model: dict[str, Any],
        rounds: int | None,
        activations: str,
    ) -> None:
        import sar
        from sar.models import build_model, prepare_graph
        from sar.train.data import load_node_data
        from sar.train.options import DataOptions, ModelOptions, TrainOptions
        from sar.train.trainer import Trainer

        self.group = sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)
        options = ModelOptions(**model)
        partition = sar.load_dgl_partition_data(parts, rank, "cpu")
        data = load_node_data(partition, DataOptions(), group=self.group)
        graph = sar.construct_full_graph(partition, sar.Policy(rounds=rounds))
        graph = prepare_graph(graph, options)
        del partition
        network = build_model(options, data.features.shape[1], data.num_classes)
        sar.set_activations(network, activations)
        loop = TrainOptions(mfgs="off")
        self.trainer = Trainer(network, graph, data, loop, group=self.group)
        for _ in range(2):  # the first epochs make what later ones use
            self.trainer.train_epoch()
        measure.settle()

    def watch(self, epochs: int) -> dict[str, float]:
        """Bytes sent, wall and processor seconds of an epoch; then the peak of resident bytes.

        Apart, for whoever reads memory a thousand times a second on each rank takes a share of the
        cores.
        """
        sent, begin = self.group.counters.sent_bytes, time.process_time()
        wall = time.perf_counter()
        for _ in range(epochs):
            self.trainer.train_epoch()
        wall, cpu = time.perf_counter() - wall, time.process_time() - begin
        sent = self.group.counters.sent_bytes - sent
        with measure.PeakMemory() as watched:
            for _ in range(epochs):
                self.trainer.train_epoch()
        files = sum(measure.status_bytes("RssFile", "RssShmem"))
        return {
            "resident": watched.peak.best + files,
            "sent": sent / epochs,
            "wall": wall / epochs,
            "cpu": cpu / epochs,
            "threads": torch.get_num_threads(),
        }
