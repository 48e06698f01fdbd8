"""Sampled mini-batches beside those of DistDGL and of DGL in one process."""

from __future__ import annotations

import os
import shutil
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import graphs, hosts
from benchmarks.cluster import APART, LAUNCH, Cluster, free_port
from benchmarks.registry import Figure, Options, Report, Table, benchmark

NODES, EDGES, BLOCKS, INSIDE = 100_000, 1_190_000, 10, 0.88
CUT = ("metis", 2)
TASKS = "benchmarks.tasks.sampling"
TURNS = 3
DISTDGL, ONE = "DistDGL", "dgl.dataloading, 1 process"
Turns = dict[str, list[dict[str, float]]]


def _graph() -> Any:
    """Ten communities; degrees are those of random edges, and a tenth of the edges is cut."""
    from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

    rng = np.random.default_rng(0)
    block = rng.integers(0, BLOCKS, NODES)
    order = np.argsort(block, kind="stable")
    starts = np.searchsorted(block[order], np.arange(BLOCKS + 1))
    dst = rng.integers(0, NODES, EDGES)
    first, sizes = starts[block[dst]], np.diff(starts)[block[dst]]
    near = order[first + (rng.random(EDGES) * sizes).astype(np.int64)]
    src = np.where(rng.random(EDGES) < INSIDE, near, rng.integers(0, NODES, EDGES))
    drawn = torch.Generator().manual_seed(0)
    data = {
        "feat": torch.randn(NODES, 100, generator=drawn),
        "label": torch.randint(47, (NODES,), generator=drawn),
    }
    edges = {ETYPE_HOMO: (torch.from_numpy(src), torch.from_numpy(dst))}
    return GraphArrays(
        "sampling", {NTYPE_HOMO: NODES}, edges, {NTYPE_HOMO: data}, {}
    ).with_orig_ids()


def _prepared(options: Options) -> graphs.Prepared:
    return graphs.prepare(options, f"sampling-{NODES}-{EDGES}", _graph, [CUT])


class OwnMemory:
    """Ranks that are alone in their shared memory, as on a host of their own: DistDGL's have to
    be, whose names there do not tell machines apart."""

    def command(self, rank: int) -> list[str]:
        """What comes before a command that shall run so."""
        script = 'mount -t tmpfs none /dev/shm && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh"]

    def environment(self) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1"}


def missing() -> str | None:
    """Why DistDGL cannot be measured here, or ``None`` when it can."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return "needs root and unshare: DistDGL's ranks get a /dev/shm of their own"
    return None


def _turns(clusters: dict[str, Cluster], turns: int, **given: Any) -> Turns:
    """Of each turn: batches a second of a rank, milliseconds of processors a batch, nodes."""
    for one in clusters.values():
        one.call("epoch", **given)
    found: Turns = {name: [] for name in clusters}
    for _ in range(turns):
        for name, one in clusters.items():
            ranks = one.call("epoch", **given)
            batches = sum(rank["batches"] for rank in ranks)
            wall = max(rank["wall"] for rank in ranks)
            cpu = sum(rank["cpu"] for rank in ranks)
            nodes = sum(rank["nodes"] for rank in ranks) / len(ranks)
            rate = batches / len(ranks) / wall
            found[name].append({"rate": rate, "cpu": 1e3 * cpu / batches, "nodes": nodes})
    return found


def _over(turns: Turns, name: str, key: str, peer: str = DISTDGL) -> float:
    """The ratio of two contenders, turn by turn: a machine that gets slower slows both."""
    return median(a[key] / b[key] for a, b in zip(turns[name], turns[peer], strict=True))


def _table(title: str, turns: Turns) -> Table:
    rows = [
        [name, *(median(turn[key] for turn in own) for key in ("rate", "cpu", "nodes")),
         _over(turns, name, "rate"), _over(turns, name, "cpu")]
        for name, own in turns.items()
    ]  # fmt: skip
    columns = ["", "batches/s a rank", "CPU ms a batch", "nodes", "rate x", "CPU x"]
    return Table(title, columns, rows)


@benchmark("sampling", "mini-batches")
def sampling(options: Options) -> Report:
    """Mini-batches of 1024 seeds, 10 and 15 neighbors: batches a second and processor time.

    100,000 nodes, 1.19 M edges, 2 METIS parts, 100 floats a node; blocks, edge ids and rows, one
    thread a rank. Contenders take turns.
    """
    if (reason := missing()) is not None:
        return Report(skipped=reason)
    ready = _prepared(options)
    parts, fan = str(ready.parts[CUT]), [10, 15]
    ours = partial(Cluster, f"{TASKS}:Ours", 2, parts=parts, fanouts=fan)
    peer = partial(Cluster, f"{TASKS}:DistDgl", 2, environment=LAUNCH, hosts=OwnMemory())
    with (
        peer(parts=parts, fanouts=fan, servers=free_port()) as theirs,
        Cluster(f"{TASKS}:OneDgl", environment=LAUNCH, file=str(ready.file), fanouts=fan) as one,
        ours(environment=LAUNCH) as plain,
        ours(environment=LAUNCH, bulk=1, prefetch=0) as single,
        ours(environment=APART) as sockets,
    ):
        clusters = {
            DISTDGL: theirs, ONE: one, "sar": plain,
            "sar, bulk=1, prefetch=0": single, "sar, sockets": sockets,
        }  # fmt: skip
        turns = _turns(clusters, TURNS)
    figures = [
        Figure("batches/s over DistDGL's", _over(turns, "sar", "rate"), at_least=2.7),
        Figure("processor time over DistDGL's", _over(turns, "sar", "cpu"), at_most=0.35),
        Figure("sockets: batches/s", _over(turns, "sar, sockets", "rate"), at_least=1.75),
        Figure("sockets: processor time", _over(turns, "sar, sockets", "cpu"), at_most=0.46),
        Figure("batches/s over one DGL process'", _over(turns, "sar", "rate", ONE), at_least=1.25),
        Figure("processor time over that", _over(turns, "sar", "cpu", ONE), at_most=0.7),
    ]
    return Report(figures, [_table("2 hops", turns)])


@benchmark("sampling-training", "mini-batches")
def training(options: Options) -> Report:
    """Three hops, 15, 10 and 5 neighbors: sampling alone, and training GraphSAGE-256."""
    if (reason := missing()) is not None:
        return Report(skipped=reason)
    parts, fan = str(_prepared(options).parts[CUT]), [15, 10, 5]
    given: dict[str, Any] = {"parts": parts, "fanouts": fan}
    peer = partial(Cluster, f"{TASKS}:DistDgl", 2, environment=LAUNCH, hosts=OwnMemory())
    mine = partial(Cluster, f"{TASKS}:Ours", 2)
    with (
        peer(servers=free_port(), **given) as theirs,
        mine(environment=LAUNCH, **given) as ours,
        mine(environment=APART, **given) as sockets,
    ):
        clusters = {DISTDGL: theirs, "sar": ours, "sar, sockets": sockets}
        sampled = _turns(clusters, TURNS)
        for cluster in clusters.values():
            cluster.call("begin", layers=3)
        trained = _turns(clusters, TURNS, trains=True)
    figures = [
        Figure("3 hops: batches/s over DistDGL's", _over(sampled, "sar", "rate"), at_least=3.3),
        Figure("3 hops: processor time", _over(sampled, "sar", "cpu"), at_most=0.29),
        Figure("training: batches/s over DistDGL's", _over(trained, "sar", "rate"), at_least=1.1),
        Figure("training: processor time", _over(trained, "sar", "cpu"), at_most=0.91),
    ]
    return Report(figures, [_table("Sampling", sampled), _table("Training", trained)])


@benchmark("sampling-cache", "mini-batches")
def cache(options: Options) -> Report:
    """Rows of other ranks that a cache of a fifth of all nodes spares."""
    figures, rows = [], []
    scale = 17
    prepared = {"test graph": (_prepared(options), NODES, 100, 0.55, "feat")}
    prepared["R-MAT"] = (graphs.rmat(options, [CUT], scale), 2**scale, 128, 0.85, "feat")
    for name, (ready, nodes, width, bound, _) in prepared.items():
        budget = nodes // 5 * (width + 2) * 4  # the label's 8 bytes too
        given = {"parts": str(ready.parts[CUT]), "fanouts": [10, 15], "environment": LAUNCH}
        with Cluster(f"{TASKS}:Ours", 2, cache=budget, **given) as ours:  # type: ignore[arg-type]
            ours.call("epoch")
            ranks = ours.call("spared")
        needed, had = (sum(rank[key] for rank in ranks) for key in ("needed", "had"))
        figures.append(Figure(f"{name}: rows spared", had / needed, at_least=bound))
        rows.append([name, needed, needed - had])
    return Report(figures, [Table("An epoch", ["", "rows of others", "fetched"], rows)])


@benchmark("sampling-wire", "mini-batches")
def wire(options: Options) -> Report:
    """Two hosts at 1 Gbit/s: what prefetching hides, and the exchange beside torch's own."""
    if (reason := hosts.missing()) is not None:
        return Report(skipped=reason)
    given: dict[str, Any] = {"parts": str(_prepared(options).parts[CUT]), "fanouts": [10, 15]}
    with hosts.Hosts(2, "1gbit") as two:
        start = partial(Cluster, f"{TASKS}:Wire", 2, environment=APART, hosts=two, **given)
        with start(prefetch=0, plain=True) as plain, start(prefetch=0) as single, start() as ahead:
            turns = [_wire_turn(plain, single, ahead) for _ in range(TURNS + 1)][1:]
    figures = [
        Figure(
            "share of the smaller that prefetch hides", median(map(_hidden, turns)), at_least=0.8
        ),
        Figure(
            "share of sampling's waiting that it hides",
            median(_apart(one) / (one[SAMPLING] - one[WORK]) for one in turns),
        ),
        Figure(
            "sampling over torch's all_to_all_single",
            median(one[PLAIN] / one[SAMPLING] for one in turns),
            at_least=1.3,
        ),
    ]
    seconds = {name: median(one[name] for one in turns) for name in turns[0]}
    rows = [[name, 1e3 * one, 1 / one] for name, one in seconds.items()]
    return Report(figures, [Table("1 Gbit/s", ["", "ms a batch", "batches/s"], rows)])


PLAIN, SAMPLING, MODEL = "sampling, torch's exchange", "sampling", "training"
WORK = "sampling, its processor time"
BOTH, AHEAD = "both, no prefetch", "both, prefetch"


def _wire_turn(plain: Cluster, single: Cluster, ahead: Cluster) -> dict[str, float]:
    """Seconds a batch of each."""

    def epoch(ranks: Cluster, trains: bool, key: str = "wall") -> float:
        return max(one[key] / one["batches"] for one in ranks.call("epoch", trains=trains))

    return {
        PLAIN: epoch(plain, False), SAMPLING: epoch(single, False),
        WORK: epoch(single, False, "cpu"),
        MODEL: max(single.call("training", steps=10)),
        BOTH: epoch(single, True), AHEAD: epoch(ahead, True),
    }  # fmt: skip


def _apart(seconds: dict[str, float]) -> float:
    """What the two take more apart than together."""
    return seconds[SAMPLING] + seconds[MODEL] - seconds[AHEAD]


def _hidden(seconds: dict[str, float]) -> float:
    return _apart(seconds) / min(seconds[SAMPLING], seconds[MODEL])
