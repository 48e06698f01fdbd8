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
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
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
from sar.nn.params import replicated
from sar.partition.book import EType
from sar.plan.graphs import ACROSS, INSIDE, random_graph, star_graph, written
from sar.plan.types import RowCounts, SetBytes, Types, by_set, likely_sets, tell_rows
from sar.tracing.edge_rows import EdgeRows
from sar.train.memory import resident_mb

_NODES, _FEW_NODES = 32768, 4096  # rows that fit into no cache, as a real graph's; enough for bytes
_DEGREE, _DENSE, _EPOCHS = 8, 32, 3  # the second degree tells what an edge costs
_SEEDS, _MANY = 20, 5  # stars to try until rows tell what they are; ranks of nearly nothing
Log = list[tuple[int, int]]  # rows sent in an exchange, and bytes of one


@dataclass(frozen=True)
class Work:
    """What is trained: the model's options, its input and output widths, its activations, where
    the policy keeps constant inputs, and the columns that edges have, by name.

    ``types`` are those of the graph; by default one. With several, ``features`` is not looked at,
    and columns are by relation and name, as ``"user:follows:user/weight"``."""

    model: ModelOptions
    features: int
    classes: int
    activations: str = "keep"
    constant_inputs: str = "memory"
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    types: Types | None = None

    @property
    def graph(self) -> Types:
        """The types of the graph."""
        return self.types or Types.of_one(self.features)


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
        parameters: number of parameters that all ranks have.
        sets: of a graph of several types, in place of the three lists of bytes.
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
    sets: list[SetBytes] = field(default_factory=list)

    @property
    def exchanges(self) -> list[SetBytes]:
        """The bytes of rows by the relations that they are of; none named where there is one."""
        return self.sets or [SetBytes([], self.pulled_bytes, self.summed_bytes, self.turned_bytes)]


def measure_costs(work: Work, threads: int = 1, *, seconds: bool = True) -> Costs:
    """Run the probe in a process of its own; seconds are those of this machine.

    Without ``seconds`` all coefficients of time are NaN, and a few seconds are enough.
    """
    found = apart("sar.plan.probe", work, threads, seconds=seconds)
    sets = [SetBytes(**one) for one in found.pop("sets")]
    for one in sets:
        one.relations[:] = [(src, name, dst) for src, name, dst in one.relations]
    return Costs(**found, sets=sets)


def apart(module: str, work: Work, threads: int, **more: Any) -> Any:
    """What ``python -m module`` prints as JSON in a process of its own, of :func:`asked`."""
    own = {"OMP_NUM_THREADS": str(threads), "KINETO_LOG_LEVEL": "5"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps({"work": asdict(work), "threads": threads} | more), capture_output=True,
        text=True, check=False, env={**allocator_environment(), **os.environ, **own},
    )  # fmt: skip
    if done.returncode:
        raise SarError(f"the probe failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def asked() -> dict[str, Any]:
    """The arguments of :func:`apart`, from standard input."""
    request = json.load(sys.stdin)
    wanted = request["work"] | {"model": ModelOptions(**request["work"]["model"])}
    if (given := wanted["types"]) is not None:
        given["relations"] = [(src, name, dst) for src, name, dst in given["relations"]]
        wanted["types"] = Types(**given)
    return request | {"work": Work(**wanted)}


class _Logged(ThreadGroup):
    """A rank that logs its exchanges: rows sent, and bytes of one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: Log = []

    def exchange(self, recv: Tensor, send: Tensor, *counts: Any) -> Exchange:
        self.log.append((len(send), send[:1].nbytes))
        return super().exchange(recv, send, *counts)


class Probed:
    """A model on a random graph, ready to train."""

    def __init__(self, work: Work, path: str, group: Group, **policy: Any) -> None:
        data = sar.load_partition_data(path, group.rank, "cpu")
        whole = Policy(constant_inputs=work.constant_inputs, **policy)
        self.graph = prepare_graph(sar.construct_full_graph(data, whole), work.model)
        types, target = work.graph, work.graph.target
        features = {ntype: data.node_features[f"{ntype}/feat"] for ntype in types.features}
        self.x = features[target] if types.is_homogeneous else features
        self.y = torch.arange(data.num_nodes(target)) % work.classes
        self.model = build_model(
            work.model, types.width, work.classes, graph=self.graph, target_type=target
        )
        self.call = call_of(work.model, self.model)
        for etype, name, about in columns_of(self.call, work):
            shape, dtype = [self.graph.num_edges(etype), *about["shape"]], about["dtype"]
            self.graph[etype].put_edge_column(name, torch.zeros(shape, dtype=getattr(torch, dtype)))
        sar.sync_params(self.model, group=group)
        sar.set_activations(self.model, work.activations)
        self.graph = self.graph.with_policy(whole)  # a new one knows the layers imported since
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)

    def step(self) -> None:
        """Train an epoch as the trainer does."""
        self.model.train()
        out = self.call(self.model, self.graph, self.x)
        loss = sar.global_mean(F.cross_entropy(out, self.y, reduction="none"))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.update()

    def update(self) -> None:
        """Change the parameters."""
        sar.gather_grads(self.model)
        self.optimizer.step()

    def settle(self, log: Log | None = None) -> None:
        """Train two epochs, as constant sums are kept from the second on, and clear ``log``."""
        self.step()
        self.step()
        if log is not None:
            log.clear()


def columns_of(call: Call, work: Work) -> Iterator[tuple[EType, str, dict[str, Any]]]:
    """(relation, name, dtype and shape) of the columns of edges that a model gets."""
    for etype in work.graph.relations:
        prefix = "" if work.graph.is_homogeneous else ":".join(etype) + "/"
        known = {key.removeprefix(prefix): one for key, one in work.columns.items()}
        for name in call.columns:
            found = call.stored_name(bare(name), known)
            if found is not None and prefix + found in work.columns:
                yield etype, found, known[found]


def probe(work: Work, threads: int, nodes: int = _NODES) -> Costs:
    """:func:`measure_costs` in this process, on graphs of ``nodes`` and twice as many."""
    costs = probe_bytes(work, threads, nodes)
    with scratch_folder() as folder:

        def graph(parts: int, *size: Any) -> str:
            return written(random_graph(work.graph, *size), folder, parts)

        rounds = _round_seconds(work, graph(_MANY, 64, 2))
        wanted = [(_DEGREE, INSIDE), (_DENSE, INSIDE), (_DEGREE, ACROSS)]
        graphs = [graph(2, 64, 2, INSIDE), *(graph(2, 2 * nodes, *one) for one in wanted)]
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
            return written(random_graph(work.graph, nodes, degree), folder, 1)

        Probed(work, graph(64, 2), current_group()).step()  # compiles, imports
        process = resident_mb() * 2**20
        sizes = [(nodes, _DEGREE), (2 * nodes, _DEGREE), (nodes, 2 * _DEGREE)]
        fixed, per_node, per_edge = _linear([_peak_bytes(work, graph(*s)) for s in sizes], nodes)
        parameters, others, sets = _bytes_of_rows(work, folder)
    none = math.nan
    whole = sets[0] if work.types is None else SetBytes([], [], [], [])
    return Costs(
        fixed, per_node, per_edge, none, none, none, whole.pulled_bytes, whole.summed_bytes,
        whole.turned_bytes, none, none, none, others, process, parameters,
        [] if work.types is None else sets,
    )  # fmt: skip


def _bytes_of_rows(work: Work, folder: Path) -> tuple[int, int, list[SetBytes]]:
    """Number of parameters, of small collectives, and bytes of rows, from epochs on a star and on
    one where only source rows travel."""
    types = work.graph
    for seed in range(_SEEDS):
        graph = star_graph(types, seed)
        path = written(graph, folder, 2)
        halves = {ntype: [count // 2] * 2 for ntype, count in graph.num_nodes.items()}
        counts, likely = RowCounts(path, 2, halves), likely_sets(types.relations)
        if tell_rows([], counts, likely) is None:
            continue
        parameters, log, others, joined = _exchanges(work, path)
        as_rows, more = _exchanges(work, path, exchange="pull")[1::2]
        sets = [*likely, *joined, *more]
        told, instead = (tell_rows(one, counts, sets) for one in (log, as_rows))
        if told is not None and instead is not None:
            return parameters, others, by_set(types.relations, told, instead)
    raise SarError("the model's exchanges were not told apart: so many relations are not planned")


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
        run, found = Probed(work, path, group), []
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
    run = Probed(work, path, current_group())
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
    # The type is asked: a lazy edge tensor would be computed. First what most objects are not.
    for thing in [one for one in gc.get_objects() if issubclass(type(one), Tensor)]:
        lazy = issubclass(type(thing), EdgeRows) or hasattr(type(thing), "is_structure")
        if not lazy and is_host(thing.device):
            storage = thing.untyped_storage()
            if is_host(storage.device):  # of stand-ins for the compiler there is none
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


Sets = list[tuple[EType, ...]]


def _exchanges(work: Work, path: str, **policy: Any) -> tuple[int, Log, int, Sets]:
    """Number of parameters; exchanges of a later epoch, and its number of other collectives; the
    relations that were joined to one."""

    def body(group: Any) -> tuple[int, Log, int, Sets]:
        run = Probed(work, path, group, **policy)
        run.settle(group.log)
        before = group.counters.collectives
        run.step()
        others = group.counters.collectives - before - len(group.log)
        store = run.graph._store
        names = {id(relation): etype for etype, relation in store.relations.items()}
        joined = [tuple(names[id(one)] for one in some) for some in store.joined]
        count = sum(p.numel() for p in replicated(run.model).values())
        return count, list(group.log), others, joined

    return _Logged.run(2, body)[0]


def _round_seconds(work: Work, path: str) -> float:
    """Seconds that a round of nearly no rows costs a rank: strict epochs less one-shot ones."""

    def body(group: Any) -> tuple[float, int]:
        runs = [Probed(work, path, group, rounds=number) for number in (1, None)]
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
    todo = asked()
    measured = (probe if todo["seconds"] else probe_bytes)(todo["work"], todo["threads"])
    sys.stdout.write(f"\n{json.dumps(asdict(measured))}\n")
