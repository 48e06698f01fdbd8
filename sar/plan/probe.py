"""Costs of a model, measured on small graphs: bytes and seconds per node and edge, wire rows.

Memory and work are linear in nodes and edges, so a few small runs give the coefficients for any
graph: one rank for memory, two side by side for seconds, as what a rank waits for (its peer, the
memory they share) is part of them. Run in a process of its own (``python -m sar.plan.probe``, JSON
in and out): its memory is measured.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sar
from sar._private import memory_events
from sar.allocator import allocator_environment
from sar.comm import Group, ThreadGroup, current_group, network
from sar.comm.meter import Work as Exchange
from sar.config import Policy
from sar.errors import SarError
from sar.files import scratch_folder
from sar.kernels.device import is_host
from sar.models import Call, ModelOptions, build_model, call_of, prepare_graph
from sar.models.edge_columns import bare
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.write import write_partitions
from sar.tracing.edge_rows import EdgeRows
from sar.train.memory import resident_mb

_NODES, _DEGREE = 32768, 8  # rows that do not fit into a cache, as those of a real graph
_FEW_NODES = 4096  # enough for bytes
_DENSE = 32  # degree of the graph that tells what an edge costs
_EPOCHS = 3
_STAR, _ENDS = 64, 6  # nodes of the graph that tells what travels, and ends of edges of a part
_MANY = 5  # ranks of a graph of nearly nothing, to tell what rounds cost
Log = list[tuple[int, int]]  # rows sent in an exchange, and bytes of one
ANY, INSIDE, ACROSS = "any", "inside", "across"  # which ends edges have: of two parts


@dataclass(frozen=True)
class Work:
    """What is trained: the model's options, its input and output widths, its activations, where
    the policy keeps constant inputs, and the columns that edges have, by name."""

    model: ModelOptions
    features: int
    classes: int
    activations: str = "keep"
    constant_inputs: str = "memory"
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Costs:
    """Coefficients of one training epoch.

    Attributes:
        fixed_bytes, node_bytes, edge_bytes: of live tensors at the peak of an epoch, of which
            the first is the parameters, their gradients and the optimizer's state.
        fixed_seconds, node_seconds, edge_seconds: of an epoch, of which the first is what an epoch
            of a graph of nearly no nodes takes.
        pulled_bytes: bytes of a row in each exchange of source rows or their gradients.
        summed_bytes: the same for sums of copied rows, where partial sums may travel.
        turned_bytes: of each backward pass that goes where edges start if that sends less: bytes of
            a row in each of its exchanges, if it goes where edges end, and if it does not.
        byte_seconds: to gather, send, receive and add one byte of rows.
        round_seconds: of another round of an exchange without any rows, but for its messages.
        message_seconds: of an exchange or reduction for each other rank, whatever it carries.
        reductions: small collectives of an epoch.
        process_bytes: resident memory of a process that has imported everything.
        parameters: number of parameters.
    """

    fixed_bytes: float
    node_bytes: float
    edge_bytes: float
    fixed_seconds: float
    node_seconds: float
    edge_seconds: float
    pulled_bytes: list[int]
    summed_bytes: list[int]
    turned_bytes: list[tuple[list[int], list[int]]]
    byte_seconds: float
    round_seconds: float
    message_seconds: float
    reductions: int
    process_bytes: float
    parameters: int


def measure_costs(work: Work, threads: int = 1, *, seconds: bool = True) -> Costs:
    """Run the probe in a process of its own; seconds are those of this machine.

    Without ``seconds`` all coefficients of time are NaN, and a few seconds are enough.
    """
    own = {"OMP_NUM_THREADS": str(threads), "KINETO_LOG_LEVEL": "5"}
    done = subprocess.run(
        [sys.executable, "-m", "sar.plan.probe"],
        input=json.dumps({"work": asdict(work), "threads": threads, "seconds": seconds}),
        capture_output=True, text=True, check=False,
        env={**allocator_environment(), **os.environ, **own},
    )  # fmt: skip
    if done.returncode:
        raise SarError(f"the probe failed: {done.stderr.strip().splitlines()[-1]}")
    return Costs(**json.loads(done.stdout.splitlines()[-1]))


class _Logged(ThreadGroup):
    """A rank that logs its exchanges: rows sent, and bytes of one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: Log = []

    def exchange(self, recv: Tensor, send: Tensor, *counts: Any) -> Exchange:
        self.log.append((len(send), send[:1].nbytes))
        return super().exchange(recv, send, *counts)


class _Run:
    """A model on a random graph, ready to train."""

    def __init__(self, work: Work, path: str, group: Group, **policy: Any) -> None:
        data = sar.load_partition_data(path, group.rank, "cpu")
        whole = Policy(constant_inputs=work.constant_inputs, **policy)
        self.graph = prepare_graph(sar.construct_full_graph(data, whole), work.model)
        self.x = data.node_features["_N/feat"]
        self.y = data.node_features["_N/label"].long()
        self.model = build_model(work.model, work.features, work.classes, graph=self.graph)
        self.call = call_of(work.model, self.model)
        for name in self.call.columns:
            self.graph.put_edge_column(*_column(self.call, name, work, self.graph.num_edges()))
        sar.sync_params(self.model, group=group)
        sar.set_activations(self.model, work.activations)
        self.graph = self.graph.with_policy(whole)  # a new one knows the layers imported since
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)

    def step(self) -> None:
        """Train an epoch as the trainer does."""
        self.model.train()
        loss = F.cross_entropy(self.call(self.model, self.graph, self.x), self.y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        sar.gather_grads(self.model)
        self.optimizer.step()

    def settle(self, log: Log | None = None) -> None:
        """Train two epochs, as constant sums are kept from the second on, and clear ``log``."""
        self.step()
        self.step()
        if log is not None:
            log.clear()


def _column(call: Call, name: str, work: Work, edges: int) -> tuple[str, Tensor]:
    """The name of a column that a model gets of edges, and zeros in its place."""
    found = call.stored_name(bare(name), work.columns)
    if found is None:
        known = ", ".join(work.columns) or "none"
        raise ValueError(f"call: got {name!r}, expected a column of the edges: {known}")
    about = work.columns[found]
    return found, torch.zeros([edges, *about["shape"]], dtype=getattr(torch, about["dtype"]))


def _random_edges(nodes: int, degree: int, ends: str) -> tuple[Tensor, Tensor]:
    """Edges between any nodes, inside the parts of even and odd nodes, or across them."""
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(nodes, (2, nodes * degree), generator=generator)
    if ends == ANY:
        return src, dst
    return src // 2 * 2 + (dst + int(ends == ACROSS)) % 2, dst


def _star_edges(nodes: int) -> tuple[Tensor, Tensor]:
    """Edges from every node to one node of the other part, and from one node to :data:`_ENDS`. So
    the number of rows that travel tells their kind: half of the nodes are sources, two rows make
    all sums, the row of one source and the sum for one node."""
    src, more = torch.arange(nodes), torch.arange(2, 2 * _ENDS)
    return torch.cat([src, (more + 1) % 2]), torch.cat([(src + 1) % 2, more])


def _written(work: Work, folder: Path, nodes: int, edges: tuple[Tensor, Tensor], parts: int) -> str:
    """Write partitions of a graph, two of even and odd nodes; returns their JSON's path."""
    generator = torch.Generator().manual_seed(0)
    data = {
        "feat": torch.randn(nodes, work.features, generator=generator),
        "label": torch.randint(work.classes, (nodes,), generator=generator),
    }
    arrays = GraphArrays("probe", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: edges}, {NTYPE_HOMO: data})
    name = tempfile.mkdtemp(dir=folder)
    return write_partitions(arrays, torch.arange(nodes) % parts, f"{name}/parts", num_parts=parts)


def probe(work: Work, threads: int, nodes: int = _NODES) -> Costs:
    """:func:`measure_costs` in this process, on graphs of ``nodes`` and twice as many."""
    costs = probe_bytes(work, threads, nodes)
    with scratch_folder() as folder:
        graph = partial(_written, work, folder)
        tiny = _random_edges(64, 2, ANY)
        rounds = _round_seconds(work, graph(64, tiny, _MANY))
        wanted = [(_DEGREE, INSIDE), (_DENSE, INSIDE), (_DEGREE, ACROSS)]
        graphs = [graph(64, _random_edges(64, 2, INSIDE), 2)]
        graphs += [graph(2 * nodes, _random_edges(2 * nodes, *one), 2) for one in wanted]
        fixed, per_node, per_edge, per_byte = _seconds(work, graphs, nodes)
    return replace(
        costs, fixed_seconds=fixed, node_seconds=per_node, edge_seconds=per_edge,
        byte_seconds=per_byte, round_seconds=rounds, message_seconds=network.message_seconds(),
    )  # fmt: skip


def probe_bytes(work: Work, threads: int, nodes: int = _FEW_NODES) -> Costs:
    """:func:`probe` without seconds, which are NaN."""
    torch.set_num_threads(threads)
    with scratch_folder() as folder:

        def graph(nodes: int, degree: int) -> str:
            return _written(work, folder, nodes, _random_edges(nodes, degree, ANY), 1)

        _Run(work, graph(64, 2), current_group()).step()  # compiles, imports
        process = resident_mb() * 2**20
        sizes = [(nodes, _DEGREE), (2 * nodes, _DEGREE), (nodes, 2 * _DEGREE)]
        fixed, per_node, per_edge = _linear([_peak_bytes(work, graph(*s)) for s in sizes], nodes)
        star = _written(work, folder, _STAR, _star_edges(_STAR), 2)
        parameters, log, others = _exchanges(work, star)
        _, as_rows, _ = _exchanges(work, star, exchange="pull")
    pulled, summed, turned = _by_kind(log, as_rows)
    none = math.nan
    return Costs(
        fixed, per_node, per_edge, none, none, none, pulled, summed, turned, none, none, none,
        others, process, parameters,
    )  # fmt: skip


def _by_kind(
    log: Log, as_rows: Log
) -> tuple[list[int], list[int], list[tuple[list[int], list[int]]]]:
    """Bytes of rows, pulled, summed and turned as in :class:`Costs`, from the exchanges of an epoch
    of the star (``log``), and of one where only source rows travel (``as_rows``)."""
    pulled, summed, ended = (
        [size for rows, size in log if rows == count] for count in (_STAR // 2, 2, _ENDS)
    )
    instead = [size for rows, size in as_rows]
    for size in (*pulled, *summed):
        instead.remove(size)  # the first, which is of the forward pass
    there_and_back = (
        [sizes[start : start + 2] for start in range(0, len(sizes), 2)]
        for sizes in (instead, ended)
    )
    return pulled, summed, list(zip(*there_and_back, strict=True))


def _linear(found: list[float], nodes: int) -> tuple[float, float, float]:
    """(constant, per node, per edge) of what was found with n nodes, 2 n nodes, and 2 n edges."""
    size, more_nodes, more_edges = found
    per_edge = (more_edges - size) / (nodes * _DEGREE)
    per_node = (more_nodes - size) / nodes - _DEGREE * per_edge
    return size - nodes * (per_node + _DEGREE * per_edge), per_node, per_edge


def _seconds(work: Work, graphs: list[str], nodes: int) -> tuple[float, float, float, float]:
    """Seconds of an epoch of one of two ranks: fixed, per node, per edge and per byte of rows.
    ``graphs`` have nearly nothing, few local edges, many, and few remote ones; ``nodes``: of a
    rank."""
    runs = [_timed(work, path) for path in graphs]
    fixed, few, many, remote = (seconds for seconds, _ in runs)
    per_edge = max(0.0, many - few) / (nodes * (_DENSE - _DEGREE))
    per_node = (few - fixed) / nodes - _DEGREE * per_edge
    per_byte = max(0.0, remote - few) / max(1.0, runs[-1][1])
    return fixed, max(0.0, per_node), per_edge, per_byte + network.byte_seconds()


def _timed(work: Work, path: str) -> tuple[float, float]:
    """(seconds of an epoch of two ranks side by side, bytes of rows that one of them sends)."""
    cores = len(os.sched_getaffinity(0)) // torch.get_num_threads()

    def body(group: Any) -> tuple[float, float]:
        run, found = _Run(work, path, group), []
        run.settle(group.log)
        for _ in range(_EPOCHS):
            begin = time.perf_counter()
            run.step()
            found.append(time.perf_counter() - begin)
        return min(found), sum(rows * size for rows, size in group.log) / _EPOCHS

    ranks = _Logged.run(2, body)
    turns = 1 if cores > 1 else 2  # they took turns on one core
    return mean(seconds for seconds, _ in ranks) / turns, mean(sent for _, sent in ranks)


def _peak_bytes(work: Work, path: str) -> float:
    """Bytes of tensors at the peak of an epoch of one rank."""
    run = _Run(work, path, current_group())
    run.settle()
    gc.collect()  # what runs before left in cycles is not this one's
    before = _live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        run.step()
    now = peak = 0
    for _, nbytes in sorted(memory_events(prof), key=lambda event: event[0]):
        now += nbytes
        peak = max(peak, now)
    return before + peak


def _live_bytes() -> int:
    """Bytes of all tensors' memory; memory that several share counts once."""
    storages = {}
    for thing in gc.get_objects():
        kind = type(thing)  # asked of the type: a lazy edge tensor would be computed
        lazy = issubclass(kind, EdgeRows) or hasattr(kind, "is_structure")
        if issubclass(kind, Tensor) and not lazy and is_host(thing.device):
            storage = thing.untyped_storage()
            if is_host(storage.device):  # of stand-ins for the compiler there is none
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _exchanges(work: Work, path: str, **policy: Any) -> tuple[int, Log, int]:
    """Number of parameters; exchanges of a later epoch, and its number of other collectives."""

    def body(group: Any) -> tuple[int, Log, int]:
        run = _Run(work, path, group, **policy)
        run.settle(group.log)
        before = group.counters.collectives
        run.step()
        others = group.counters.collectives - before - len(group.log)
        return sum(p.numel() for p in run.model.parameters()), list(group.log), others

    return _Logged.run(2, body)[0]


def _round_seconds(work: Work, path: str) -> float:
    """Seconds that a round of nearly no rows costs a rank: strict epochs less one-shot ones."""

    def body(group: Any) -> tuple[float, int]:
        runs = [_Run(work, path, group, rounds=number) for number in (1, None)]
        found, rounds = [], []
        for _ in range(2 * _EPOCHS):
            group.log.clear()
            found.append([_spent(run.step, group) for run in runs])
            rounds.append(len(group.log))
        one_shot, strict = map(min, zip(*found))
        return strict - one_shot, rounds[-1]

    more, rounds = _Logged.run(_MANY, body)[0]  # of an exchange one round and _MANY - 1
    return max(0.0, more) / _MANY / max(1, rounds * (_MANY - 2) // _MANY)


def _spent(step: Callable[[], None], group: Group) -> float:
    """Processor seconds of a step on all ranks, which are threads of this process."""
    group.all_reduce(torch.zeros(1))
    begin = time.process_time()
    step()
    group.all_reduce(torch.zeros(1))
    return time.process_time() - begin


if __name__ == "__main__":
    request = json.load(sys.stdin)
    wanted = request["work"] | {"model": ModelOptions(**request["work"]["model"])}
    make = probe if request["seconds"] else probe_bytes
    sys.stdout.write(f"\n{json.dumps(asdict(make(Work(**wanted), request['threads'])))}\n")
