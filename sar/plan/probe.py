"""Costs of a model, measured on small graphs: bytes and seconds per node and edge, wire rows.

Memory and work are linear in nodes and edges, so three small runs give the coefficients for any
graph; a run on two ranks tells what each exchange sends per row. Run in a process of its own
(``python -m sar.plan.probe``, JSON in and out): its memory is measured.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import mean
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from sar.comm import Group, ThreadGroup
from sar.comm.group import Work as Exchange
from sar.config import ALLOCATOR
from sar.errors import SarError
from sar.train.models import build_model
from sar.train.options import ModelOptions

_NODES, _DEGREE = 32768, 8  # rows that do not fit into a cache, as those of a real graph
_EPOCHS = 3
_SECONDS = ("node_seconds", "edge_seconds", "byte_seconds")


@dataclass(frozen=True)
class Work:
    """What is trained: the model's options, its input and output widths, its activations."""

    model: ModelOptions
    features: int
    classes: int
    activations: str = "keep"


@dataclass(frozen=True)
class Costs:
    """Coefficients of one training epoch.

    Attributes:
        fixed_bytes, node_bytes, edge_bytes: of live tensors at the peak of an epoch, of which
            the first is the parameters, their gradients and the optimizer's state.
        node_seconds, edge_seconds: processor seconds of an epoch.
        pulled_bytes: bytes of a row in each exchange of source rows or their gradients.
        summed_bytes: the same for sums of copied rows, where partial sums may travel.
        byte_seconds: processor seconds to gather, send, receive and add one byte of rows.
        process_bytes: resident memory of a process that has imported everything.
        parameters: number of parameters.
    """

    fixed_bytes: float
    node_bytes: float
    edge_bytes: float
    node_seconds: float
    edge_seconds: float
    pulled_bytes: list[int]
    summed_bytes: list[int]
    byte_seconds: float
    process_bytes: float
    parameters: int


def measure_costs(work: Work, threads: int = 1, at_once: int = 1) -> Costs:
    """Run the probe in processes of its own; seconds are those of this machine.

    Args:
        at_once: probes that run side by side and share the memory's bandwidth, as ranks of a host
            do; their seconds are averaged.
    """
    request = json.dumps({"work": asdict(work), "threads": threads})
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda _: _run_probe(request, threads), range(at_once)))
    averages = {name: mean(getattr(one, name) for one in found) for name in _SECONDS}
    return replace(found[0], **averages)


def _run_probe(request: str, threads: int) -> Costs:
    own = {"OMP_NUM_THREADS": str(threads), "KINETO_LOG_LEVEL": "5"}
    done = subprocess.run(
        [sys.executable, "-m", "sar.plan.probe"],
        input=request, capture_output=True, text=True, check=False,
        env={**ALLOCATOR, **os.environ, **own},
    )  # fmt: skip
    if done.returncode:
        raise SarError(f"the probe failed: {done.stderr.strip().splitlines()[-1]}")
    return Costs(**json.loads(done.stdout.splitlines()[-1]))


class _Logged(ThreadGroup):
    """A rank whose exchanges are written down: rows sent, and bytes of one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[tuple[int, int]] = []

    def exchange(self, recv: Tensor, send: Tensor, *counts: Any) -> Exchange:
        self.log.append((len(send), send[:1].nbytes))
        return super().exchange(recv, send, *counts)


class _Run:
    """A model on a random graph, ready to train."""

    def __init__(self, work: Work, nodes: int, degree: float, group: Group, folder: str) -> None:
        import sar
        from sar.cli.train import prepare_graph

        make = _random_edges if group.size == 1 else _star_edges
        path = _written(work, nodes, make(nodes, degree), group.size, folder)
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        self.graph = prepare_graph(sar.construct_full_graph(data), work.model)
        self.x = data.node_features["_N/feat"]
        self.y = data.node_features["_N/label"].long()
        self.model = build_model(work.model, work.features, work.classes)
        sar.set_activations(self.model, work.activations)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.sar = sar

    def step(self) -> None:
        """One epoch as the trainer's."""
        self.model.train()
        loss = F.cross_entropy(self.model(self.graph, self.x), self.y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.sar.gather_grads(self.model)
        self.optimizer.step()


def _random_edges(nodes: int, degree: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    edges = int(nodes * degree)
    return (
        torch.randint(nodes, (edges,), generator=generator),
        torch.randint(nodes, (edges,), generator=generator),
    )


def _star_edges(nodes: int, degree: float) -> tuple[Tensor, Tensor]:
    """Every node of either part to one node of the other: many sources, one partial sum."""
    src = torch.arange(nodes)
    return src, (src + 1) % 2


def _written(work: Work, nodes: int, edges: tuple[Tensor, Tensor], parts: int, folder: str) -> str:
    """Partitions of a graph; even and odd nodes where there are two."""
    from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
    from sar.partition.write import write_partitions

    generator = torch.Generator().manual_seed(0)
    data = {
        "feat": torch.randn(nodes, work.features, generator=generator),
        "label": torch.randint(work.classes, (nodes,), generator=generator),
    }
    arrays = GraphArrays("probe", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: edges}, {NTYPE_HOMO: data})
    name = tempfile.mkdtemp(dir=folder)
    return write_partitions(arrays, torch.arange(nodes) % parts, f"{name}/parts", num_parts=parts)


def probe(work: Work, threads: int, nodes: int = _NODES) -> Costs:
    """See :func:`measure_costs`; in this process, on graphs of ``nodes`` and twice as many."""
    from sar.comm import current_group
    from sar.train.memory import resident_mb

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="sar-plan-") as folder:
        _Run(work, 64, 2, current_group(), folder).step()  # compiles, imports
        process = resident_mb() * 2**20
        sizes = [(nodes, _DEGREE), (2 * nodes, _DEGREE), (nodes, 2 * _DEGREE)]
        found = [_measure(_Run(work, *size, current_group(), folder)) for size in sizes]
        parameters, log = _exchanges(work, folder)
    pulled, summed = ([size for rows, size in log if (rows == 1) == one] for one in (False, True))
    (size, more_nodes, more_edges) = found
    per_edge = [(b - a) / (nodes * _DEGREE) for a, b in zip(size, more_edges, strict=True)]
    per_node = [
        (b - a) / nodes - _DEGREE * edge
        for a, b, edge in zip(size, more_nodes, per_edge, strict=True)
    ]
    fixed = size[0] - nodes * (per_node[0] + _DEGREE * per_edge[0])
    return Costs(
        fixed, per_node[0], per_edge[0], per_node[1], max(0.0, per_edge[1]),
        pulled, summed, _byte_seconds(), process, parameters,
    )  # fmt: skip


def _measure(run: _Run) -> tuple[float, float]:
    """(bytes of tensors at the peak of an epoch, its processor seconds)."""
    run.step()
    seconds = []
    for _ in range(_EPOCHS):
        begin = time.process_time()
        run.step()
        seconds.append(time.process_time() - begin)
    before = _live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        run.step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return before + peak, min(seconds)


def _live_bytes() -> int:
    """Bytes of all tensors' memory; memory that several share counts once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _exchanges(work: Work, folder: str) -> tuple[int, list[tuple[int, int]]]:
    """(number of parameters, (rows, bytes of one) of each exchange of a later epoch)."""

    def body(group: Any) -> tuple[int, list[tuple[int, int]]]:
        run = _Run(work, 64, 1, group, folder)
        for _ in range(2):  # what is constant is kept from the second on
            run.step()
        group.log.clear()
        run.step()
        return sum(p.numel() for p in run.model.parameters()), list(group.log)

    return _Logged.run(2, body)[0]


def _byte_seconds() -> float:
    """Processor seconds a byte of rows costs both ends: gathered, sent, received and added."""
    rows = torch.randn(1 << 15, 256)
    idx = torch.randperm(len(rows))
    out = torch.empty_like(rows)
    begin = time.process_time()
    torch.index_select(rows, 0, idx, out=out)
    _through_a_socket(out, rows)
    out.index_add_(0, idx, rows)
    return (time.process_time() - begin) / rows.nbytes


def _through_a_socket(rows: Tensor, into: Tensor) -> None:
    """Send ``rows`` to this process: what the system spends on both ends."""
    sent, left = (one.numpy().data.cast("B") for one in (rows, into))
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as out, server.accept()[0] as peer:
            sender = Thread(target=out.sendall, args=(sent,))
            sender.start()
            while left:
                left = left[peer.recv_into(left) :]
            sender.join()


if __name__ == "__main__":
    request = json.load(sys.stdin)
    wanted = request["work"] | {"model": ModelOptions(**request["work"]["model"])}
    sys.stdout.write(f"\n{json.dumps(asdict(probe(Work(**wanted), request['threads'])))}\n")
