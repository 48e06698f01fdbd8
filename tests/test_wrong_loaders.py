"""Wrong uses of loaders: no rank waits longer than the timeout, and all are told what it was."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from harness.graphs import ETYPE_HOMO, hetero, mixed
from harness.parts import Cutter, PartitionData, load_partition
from harness.pool import WorkerPool

import sar
from sar.comm import Group, ThreadGroup, use_group
from sar.errors import CommError, SarError
from sar.sampling import LinkNeighborLoader, NeighborLoader, Sample, Servers, SubgraphLoader, serve

TIMEOUT, SLACK = 4.0, 3.0  # seconds: of the group, and what an answer may take beside
AT_ONCE = 12  # cases: most of them wait
NOTHING = "nothing"  # what a rank is told that has done no wrong, or is gone
FORMS = {"batch_size": 4, "as_": "tensors"}
IDS = torch.arange(3)


@dataclass
class Rank:
    """What a script has at hand."""

    group: Group
    data: PartitionData
    prefetch: int = 2

    @property
    def is_wrong(self) -> bool:
        """One of two is, where a use is wrong on one rank alone."""
        return self.group.rank == 1

    def loader(self, **options: Any) -> NeighborLoader:
        given = {"num_neighbors": [2], "prefetch": self.prefetch, "group": self.group, **FORMS}
        return NeighborLoader(self.data, **given | options)

    def meet(self) -> None:
        """As summing gradients does."""
        self.group.all_reduce(torch.ones(1))


Use = Callable[[Rank], Any]
Told = list[tuple[str, float]]


def told(use: Use, path: str, prefetch: int = 2) -> Told:
    """What each of two ranks is told, and after how many seconds."""

    def case(group: Group) -> tuple[str, float]:
        return answer_of(use, Rank(group, load_partition(path, group.rank), prefetch))

    return ThreadGroup.run(2, case, timeout=TIMEOUT)


def answer_of(use: Use, rank: Rank) -> tuple[str, float]:
    """What one rank is told."""
    begun, words = time.monotonic(), NOTHING
    try:
        use(rank)
    except Exception as error:  # whatever it is
        words = f"{type(error).__name__}: {error}"
    return words, time.monotonic() - begun


def of_loader(use: Callable[[Any, Any], Any]) -> Use:
    """A use of a rank's loader."""
    return lambda rank: use(rank, rank.loader())


def all_told(cases: dict[Any, Callable[[], Told]]) -> dict[Any, Told]:
    """What is told in each of some cases; those that never end are missing."""
    answers: dict[Any, Told] = {}
    turns = threading.Semaphore(AT_ONCE)

    def run(name: Any) -> None:
        with turns:
            answers[name] = cases[name]()

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in cases]
    for one in threads:
        one.start()
    end = time.monotonic() + 90
    for one in threads:
        one.join(max(0.0, end - time.monotonic()))
    for name in [name for name, told in answers.items() if is_late(told)]:
        answers[name] = cases[name]()  # alone: it may have waited for the others' work
    return answers


def is_late(told: Told) -> bool:
    return any(seconds >= TIMEOUT + SLACK for _, seconds in told)


def check(answer: Told | None, words: str | tuple[str, str]) -> None:
    assert answer is not None, "a rank waits for ever"
    wanted = (words, words) if isinstance(words, str) else words
    for (text, _), part in zip(answer, wanted, strict=True):
        assert part in text, answer
        assert (text == NOTHING) == (part == NOTHING), answer
    assert not is_late(answer), answer


# ---------------------------------------------------------------- arguments
# Each of them on both ranks, and on one: then both are told the same, be it that they differ.

NODES, LINKS, GRAPHS = NeighborLoader, LinkNeighborLoader, SubgraphLoader
MASK, TWICE_1 = torch.ones(3, dtype=torch.bool), torch.tensor([1, 1])
ARGUMENTS: list[tuple[type, dict[str, Any], str]] = [
    (NODES, {"data": "parts/graph.json"}, "NeighborLoader: data: got str"),
    (NODES, {"num_neighbors": []}, "num_neighbors: got [], expected as many hops"),
    (NODES, {"num_neighbors": 5}, "num_neighbors: got 5, expected a list"),
    (NODES, {"num_neighbors": [2**31]}, "num_neighbors: got 2147483648, expected an int"),
    (NODES, {"num_neighbors": {"_E": [2], "no": [2]}}, "'no' is unknown"),
    (NODES, {"batch_size": 0}, "batch_size: got 0, expected an int of at least 1"),
    (NODES, {"shuffle": "no"}, "shuffle: got str, expected a bool"),
    (NODES, {"prefetch": -1}, "prefetch: got -1, expected an int of at least 0"),
    (NODES, {"batchsize": 4}, "unknown option 'batchsize'; did you mean 'batch_size'"),
    (NODES, {"num_workers": 4}, "unknown option 'num_workers'"),
    (NODES, {"as_": "torch"}, "as_: got 'torch', expected one of dgl, pyg, sar, tensors"),
    (NODES, {"topology": "shared"}, "topology: got 'shared', expected one of partitioned"),
    (NODES, {"time_attr": "no"}, "time_attr: got 'no', which neither nodes nor edges have"),
    (NODES, {"weight_attr": "no"}, "weight_attr: got 'no'"),
    (NODES, {"transform": "double"}, "transform: got str, expected a function"),
    (NODES, {"input_nodes": [1]}, "input_nodes: got list, expected a tensor"),
    (NODES, {"input_nodes": torch.tensor([57])}, "input_nodes: node 57 is not in the graph"),
    (NODES, {"input_nodes": torch.tensor([0])}, "input_nodes: node 0 is not this rank's"),
    (NODES, {"input_nodes": MASK}, "input_nodes: got bool [3], expected bool ["),
    (NODES, {"input_nodes": "user"}, "input_nodes: got 'user', expected one of ['_N']"),
    (NODES, {"input_nodes": torch.rand(3)}, "input_nodes: got torch.float32 [3]"),
    (NODES, {"input_time": IDS}, "input_time: got one, expected time_attr"),
    (NODES, {"input_nodes": TWICE_1, "rebalance": True}, "input_nodes: a node comes several times"),
    (NODES, {"temporal_strategy": "first"}, "got 'first', expected one of uniform, last"),
    (NODES, {"as_": "dgl", "disjoint": True}, "got some for DGL's blocks; expected as_='pyg'"),
    (NODES, {"as_": "dgl", "direction": "out"}, "got 'out' for DGL's blocks; expected as_='pyg'"),
    (NODES, {"fields": {"_N": ["no"]}}, "fields: got 'no' of '_N', expected one of"),
    (NODES, {"num_neighbors": {"_E": [2], ETYPE_HOMO: [3]}}, "expected each relation once"),
    (NODES, {"weight_attr": "w", "temporal_strategy": "last"}, "got 'w', expected none for temp"),
    (GRAPHS, {"direction": "out"}, "direction: got 'out', expected 'in' for induced"),
    (GRAPHS, {"subgraph_type": "whole"}, "subgraph_type: got 'whole', expected one of"),
    (LINKS, {"edge_label_index": torch.tensor([9999])}, "edge_label_index: got 9999"),
    (LINKS, {"edge_label_index": MASK}, "edge_label_index: got torch.bool [3], expected bool ["),
    (LINKS, {"edge_label_index": ("_E", torch.tensor([[1], [99]]))}, "node 99 is not in the graph"),
    (LINKS, {"edge_label": torch.ones(2)}, "edge_label: got shape (2,), expected ["),
    (LINKS, {"edge_label_time": IDS}, "edge_label_time: got one, expected time_attr"),
    (LINKS, {"neg_sampling": "tripel"}, "neg_sampling: got 'tripel', expected 'binary'"),
    (LINKS, {"neg_sampling": {"amout": 2}}, "'amout'; did you mean 'amount'"),
    (LINKS, {"neg_sampling": {"dst_weight": "no"}}, "neg_sampling: got weight 'no'"),
    (LINKS, {"neg_sampling": {"dst_weight": "feat"}}, "expected 0 or more, one each"),
    (LINKS, {"neg_sampling": {"amount": 0}}, "amount: got 0, expected more than 0"),
    (LINKS, {"neg_sampling": {"mode": "triplet", "amount": 1.5}}, "amount: got 1.5, expected a wh"),
    (LINKS, {"neg_sampling": "binary", "neg_sampling_ratio": 1.0}, "expected either"),
    (LINKS, {"edge_label_index": [[1], [2]]}, "edge_label_index: got list, expected a tensor"),
    (LINKS, {"edge_label_index": torch.zeros(3, 2)}, "edge_label_index: got torch.float32 [3, 2]"),
    (LINKS, {"exclude": "slef"}, "exclude: got 'slef', expected one of"),
]  # fmt: skip


FEW = {("user", "buys", "item"): [2], ("user", "follows", "user"): [2]}
LONG = {"num_neighbors": {name: [2] * 200 for name in ("follows", "marks", "bought_by")}}
LONGER = LONG["num_neighbors"] | {"bought_by": [2] * 199 + [3]}
# What is right on each rank, but not the same: of rank 0, of rank 1, of a graph of several types.
DIFFERENT: list[tuple[type, dict[str, Any], dict[str, Any], str]] = [
    (NODES, {}, {"num_neighbors": [2, 2]}, "num_neighbors: rank 1 got [2, 2], rank 0 got [2]; exp"),
    (NODES, {}, {"batch_size": 5}, "batch_size: rank 1 got 5, rank 0 got 4; expected the same"),
    (NODES, {}, {"weight_attr": "weight"}, "weight_attr: rank 1 got 'weight', rank 0 got None"),
    (NODES, LONG, {**LONG, "topology": "replicated"}, "topology: rank 1 got 'replicated', rank 0"),
    (NODES, LONG, {"num_neighbors": LONGER}, "num_neighbors: rank 1 got {'follows': [2, 2"),
    (NODES, {"num_neighbors": FEW}, LONG, "num_neighbors: rank 1 got {'follows': [2, 2"),
    (NODES, {}, {"input_nodes": "user"}, "input_nodes: rank 1 got 'user', rank 0 got 'item'"),
    (GRAPHS, {}, {"subgraph_type": "directional"}, "subgraph_type: rank 1 got 'directional'"),
    (LINKS, {}, {"exclude": "self"}, "exclude: rank 1 got 'self', rank 0 got None; expected the"),
    (LINKS, {}, {"neg_sampling": "binary"}, "negatives: rank 1 got NegativeSampling(mode='binary'"),
    (LINKS, {}, {"edge_label_index": "marks"}, "edge_label_index: rank 1 got (('tag', 'marks', 'i"),
]  # fmt: skip


def made(rank: Rank, kind: type, options: Sequence[dict[str, Any]]) -> Any:
    """A loader; each rank has its own options."""
    given = {"data": rank.data, "num_neighbors": [2], "group": rank.group, **FORMS}
    if len(rank.data.book.ntypes) > 1:
        given |= {"edge_label_index": "buys"} if kind is LINKS else {"input_nodes": "item"}
    return kind(**given | options[rank.group.rank])


# ---------------------------------------------------------------- loops
# Each of them with and without a thread that makes batches ahead.


def epoch(loader: Any, breaks_after: int = 99) -> None:
    for number, _ in enumerate(loader):
        if number == breaks_after:
            break


def a_step_skipped_after_an_error(rank: Rank, loader: Any) -> None:
    """Which would else look like the end of the epoch."""
    batches = iter(rank.loader(transform=failing(rank, KeyError("no such thing"))))
    while True:
        with suppress(KeyError):
            next(batches)


def a_step_skipped_by_one_rank(rank: Rank, loader: Any) -> None:
    """The loader is in step; the sums of the loop are not."""
    batches = iter(rank.loader(prefetch=2))
    if rank.is_wrong:
        next(batches)
    for _ in batches:
        rank.meet()


def two_loaders_in_another_order(rank: Rank, loader: Any) -> None:
    """Which only a thread for each makes right."""
    loaders = [rank.loader(prefetch=0), rank.loader(prefetch=0)]
    for one in loaders[::-1] if rank.is_wrong else loaders:
        epoch(one)


def an_error_in_the_body_of_one_rank(rank: Rank, loader: Any) -> None:
    for _ in loader:
        if rank.is_wrong:
            raise ValueError("mine")


def a_loop_in_a_transform(rank: Rank, loader: Any) -> None:
    loaders: list[Any] = []
    loaders.append(rank.loader(transform=lambda batch: epoch(loaders[0])))
    epoch(loaders[0])


def negatives_that_there_are_not(rank: Rank, loader: Any) -> None:
    """The only node that may be drawn is the seed edge's own, whose edge there is."""
    data = rank.data
    first = data.node_features["_N/orig_id"] == int(mixed().edges[ETYPE_HOMO][1][0])
    data.node_features["_N/first"] = first.float()
    words = {"mode": "triplet", "strict": True, "dst_weight": "first"}
    seed = torch.stack([ends[:1] for ends in mixed().edges[ETYPE_HOMO]])
    options: dict[str, Any] = {"prefetch": rank.prefetch, "group": rank.group, **FORMS}
    epoch(LINKS(data, [2], seed, neg_sampling=words, original_ids=True, **options))


def failing(rank: Rank, error: Exception, step: int = 1) -> Callable[[Any], Any]:
    """A transform or filter that raises on one rank."""
    calls: list[Any] = []

    def call(one: Any) -> Any:
        calls.append(one)
        if rank.is_wrong and len(calls) == step + 1:
            raise error
        return one

    return call


def mine(rank: Rank, step: int = 1) -> Callable[[Any], Any]:
    return failing(rank, KeyError("mine"), step)


def called(options: Callable[[Rank], dict[str, Any]]) -> Any:
    """A loop with sums over a loader that has these options."""

    def use(rank: Rank, loader: Any) -> None:
        for _ in rank.loader(**options(rank)):
            rank.meet()

    return use


def spoiled(change: Callable[[Sample], Any]) -> Any:
    """One with a filter that changes what was drawn on one rank."""

    def options(rank: Rank) -> dict[str, Any]:
        return {"filter": lambda sample: (change(sample) if rank.is_wrong else 0, sample)[1]}

    return called(options)


def started(first: list[Any], second: list[Any]) -> Any:
    """An epoch that begins elsewhere on each rank."""
    return lambda r, l: epoch(l.iterate(*(second if r.is_wrong else first)))


def first_edges(sample: Sample) -> Any:
    return sample.hops[0][ETYPE_HOMO]


def takes_nothing() -> None: ...


TWICE, CLOSED = "another iteration of this loader has begun", "the loader is closed"
LEFT, ALONE_AT = "rank 1 left the loader before step", "one thread at a time"
WAITED = "expected every rank to go through its loader at the same time and as far"
ENDED, NO_COPY = "this epoch has ended at an error, KeyError", "cannot be pickled or copied"
ALONE = "trainer 0 asks for 'epoch', trainer 1 for nothing, for 4 seconds; expected all trainers"
GONE, OTHER = "rank 3 left the loader; expected every rank", "asks for {'loader': 0, 'epoch': "
OF_ONE, OF_TRAINER = (f"KeyError: \"rank {r}: sampling: 'mine'\"" for r in (1, 3))
FILTER = "ValueError: rank 1: sampling: filter: got"
# What is done with a loader, what the ranks are told, and where servers make the batches.
LOOPS: dict[str, tuple[Any, Any, Any]] = {
    "a second iter in the loop": (lambda r, l: [epoch(l, 1) for _ in l], TWICE, TWICE),
    "a look at a batch on one rank": (
        lambda r, l: [next(iter(l)) for _ in l if r.is_wrong], (LEFT, LEFT), (GONE, "; expected "),
    ),
    "left by one rank": (
        lambda r, l: [epoch(l, 1 if r.is_wrong else 99), epoch(l)],
        (LEFT, LEFT), (GONE, "; expected "),
    ),
    "left and closed by one rank": (
        lambda r, l: [l.close() for _ in l if r.is_wrong], (LEFT, CLOSED), (GONE, "; expected "),
    ),
    "skipped after an error": (a_step_skipped_after_an_error, ENDED, ENDED),
    "skipped by one rank": (a_step_skipped_by_one_rank, ("CommError: rank 0", NOTHING), None),
    "another order": (two_loaders_in_another_order, WAITED, None),
    "an error in the body": (
        an_error_in_the_body_of_one_rank, (WAITED, "mine"), ("expected every rank", "mine"),
    ),
    "fewer epochs": (
        lambda r, l: [epoch(l) for _ in range(1 if r.is_wrong else 2)],
        (WAITED, NOTHING), (ALONE, NOTHING),
    ),
    "closed by one rank before": (
        lambda r, l: [l.close() if r.is_wrong else 0, epoch(l)], (WAITED, CLOSED), None,
    ),
    "after close": (
        lambda r, l: [l.close(), l.close(), l.leave(), len(l), epoch(l)], CLOSED, CLOSED,
    ),
    "a loop in a transform": (a_loop_in_a_transform, ALONE_AT, ALONE_AT),
    "a negative epoch": (
        started([-1], [-1]), "ValueError: rank 0: sampling: epoch: got -1, expected an",
        "epoch: got -1, expected an int from 0 to",
    ),
    "an epoch that is none": (
        started([1], ["1"]), "TypeError: rank 1: sampling: epoch: got str", OTHER,
    ),
    "another epoch": (started([0], [1]), "ranks are at steps", OTHER),
    "pickled": (
        lambda r, l: pickle.dumps(l), f"TypeError: NeighborLoader: {NO_COPY}",
        f"TypeError: RemoteLoader: {NO_COPY}",
    ),
    "a transform that raises": (called(lambda r: {"transform": mine(r)}), OF_ONE, OF_TRAINER),
    "a filter that raises": (called(lambda r: {"filter": mine(r)}), OF_ONE, None),
    "a transform of one rank that raises": (
        called(lambda r: {"transform": mine(r, 0) if r.is_wrong else None}), OF_ONE, OF_TRAINER,
    ),
    "a transform that wants to stop": (
        called(lambda r: {"transform": failing(r, StopIteration())}),
        "RuntimeError: rank 1: sampling: generator raised StopIteration", None,
    ),
    "a transform that takes nothing": (
        called(lambda r: {"transform": takes_nothing}),
        "TypeError: rank 0: sampling: takes_nothing()", None,
    ),
    "a transform that returns nothing": (
        called(lambda r: {"transform": lambda batch: None if r.is_wrong else batch}),
        "TypeError: rank 1: sampling: transform: returned None, expected the batch",
        "rank 3: sampling: transform: returned None, expected",
    ),
    "a filter that returns nothing": (
        called(lambda r: {"filter": lambda sample: None if r.is_wrong else sample}),
        "TypeError: rank 1: sampling: filter: returned None, expected the Sample", None,
    ),
    "a filter that breaks ids": (
        spoiled(lambda one: one.nodes["_N"][-1:].fill_(57)),
        f"{FILTER} id 57 of '_N', expected 0 to 56", None,
    ),
    "a filter that breaks ends": (
        spoiled(lambda one: first_edges(one).src.fill_(999)),
        f"{FILTER} an end 999 of ('_N', '_E', '_N'), expected 0 to", None,
    ),
    "draws that fit nowhere": (
        called(lambda r: {"num_neighbors": [2**31 - 1], "replace": True, "batch_size": 60}),
        "MemoryError: rank 0: sampling: num_neighbors: the draws of a hop need", None,
    ),
    "negatives that there are not": (negatives_that_there_are_not, "100 draws for", None),
}  # fmt: skip


# ---------------------------------------------------------------- loops over batches of servers


@dataclass
class Trainer(Rank):
    """One of two that train, beside two servers."""

    servers: Any = None

    def loader(self, **options: Any) -> Any:
        given = {"num_neighbors": [2], "prefetch": self.prefetch, **FORMS}
        return self.servers.NeighborLoader(**given | options)


def told_by_trainers(use: Use, path: str, prefetch: int) -> Told:
    """As :func:`told`, where servers make the batches."""
    all_answered = threading.Barrier(2, timeout=4 * TIMEOUT)

    def case(world: Group) -> tuple[str, float]:
        data = load_partition(path, world.rank % 2)
        if world.rank < 2:
            with suppress(CommError):
                serve(data, world, 2, TIMEOUT)
            return "", 0.0
        servers = Servers(world, 2, TIMEOUT)
        with use_group(servers.group):
            answer = answer_of(use, Trainer(servers.group, data, prefetch, servers))
        with suppress(SarError):  # a group that has failed, or servers that were left
            all_answered.wait()
            servers.close()
        return answer

    return ThreadGroup.run(4, case, timeout=TIMEOUT)[2:]


def closed_in_another_order(rank: Trainer, loader: Any) -> None:
    loaders = [loader, rank.loader()]
    for one in loaders[::-1] if rank.is_wrong else loaders:
        one.close()


WITH_SERVERS: dict[str, tuple[Any, Any]] = {
    **{name: (use, words) for name, (use, _, words) in LOOPS.items() if words},
    "closed in another order": (closed_in_another_order, "trainer 1 asks for {'loader': 1}"),
    "after the servers": (
        lambda r, l: [r.servers.close(), epoch(l)], "the servers were left; expected",
    ),
    "seeds of one trainer": (
        lambda r, l: None if r.is_wrong else r.servers.nodes(), ("CommError: rank 0", NOTHING),
    ),
    "options of one trainer": (
        lambda r, l: r.loader(batch_size=4 + r.is_wrong), "batch_size: rank 1 got 5, rank 0 got 4",
    ),
}  # fmt: skip


# ---------------------------------------------------------------- all of them


@pytest.fixture(scope="module")
def answers(partitioned: Cutter) -> Iterator[dict[Any, Told]]:
    """Of all cases, side by side: one that waits takes nobody's time."""
    path, typed = partitioned(mixed(), 2, "random"), partitioned(hetero(), 2, "random")
    told(lambda rank: epoch(rank.loader()), path)  # compiles
    cases: dict[Any, Callable[[], Told]] = {}
    for number, (kind, options, _) in enumerate(ARGUMENTS):
        for first in (options, {}):
            use = partial(made, kind=kind, options=(first, options))
            cases[number, not first] = partial(told, use, path)
    for number, (kind, *both, _) in enumerate(DIFFERENT):
        cases["different", number] = partial(told, partial(made, kind=kind, options=both), typed)
    for prefetch in (0, 2):
        for name, (use, *_) in LOOPS.items():
            cases[name, prefetch] = partial(told, of_loader(use), path, prefetch)
        for name, (use, _) in list(WITH_SERVERS.items())[prefetch // 2 :: 2]:
            served = partial(told_by_trainers, of_loader(use), path, prefetch)
            cases["servers", name, prefetch] = served
    cases["made by one"] = partial(told, lambda rank: rank.is_wrong or rank.loader(), path)
    return all_told(cases)


@pytest.mark.parametrize("number", range(len(ARGUMENTS)))
def test_an_argument(number: int, answers: dict[Any, Told]) -> None:
    check(answers.get((number, False)), ARGUMENTS[number][2])
    check(answers.get((number, True)), "")
    (one, _), (other, _) = answers[number, True]
    assert one == other and one != NOTHING


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_options_that_differ(number: int, answers: dict[Any, Told]) -> None:
    check(answers.get(("different", number)), DIFFERENT[number][3])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name: str, prefetch: int, answers: dict[Any, Told]) -> None:
    check(answers.get((name, prefetch)), LOOPS[name][1])


def test_a_loader_that_one_rank_makes(answers: dict[Any, Told]) -> None:
    words = "expected all ranks to make a NeighborLoader together"
    check(answers.get("made by one"), (words, NOTHING))


@pytest.mark.parametrize("name", WITH_SERVERS)
def test_with_servers(name: str, answers: dict[Any, Told]) -> None:
    """With a thread that makes batches ahead, or without one."""
    prefetch = 2 * (list(WITH_SERVERS).index(name) % 2)
    check(answers.get(("servers", name, prefetch)), WITH_SERVERS[name][1])


# ---------------------------------------------------------------- ranks that are processes

PROCESSES = [
    ("fewer epochs", 2, "processes"), ("another order", 0, "sockets"),
    ("an error in the body", 2, "sockets"),
    ("a transform that raises", 0, "sockets"),
]  # fmt: skip


def case_named(group: Group, path: str, name: str, prefetch: int) -> tuple[str, float]:
    rank = Rank(group, load_partition(path, group.rank), prefetch)
    epoch(rank.loader())  # compiles
    return answer_of(of_loader(LOOPS[name][0]), rank)


@pytest.mark.parametrize(("name", "prefetch", "pool"), PROCESSES)
def test_a_loop_of_processes(
    name: str, prefetch: int, pool: str, partitioned: Cutter, request: pytest.FixtureRequest
) -> None:
    """A group that has failed is used no more, so each has one of its own."""
    path, limit = partitioned(mixed(), 2, "random"), TIMEOUT + len(name) / 1000
    run = request.getfixturevalue(pool).run
    check(run(2, case_named, path, name, prefetch, timeout=limit), LOOPS[name][1])


def case_after_shutdown(group: Group, path: str, prefetch: int) -> list[tuple[str, float]]:
    """What the next batch, another epoch and the end of a loader are told."""
    rank = Rank(group, load_partition(path, group.rank), prefetch)
    loader = rank.loader(batch_size=1)
    batches = iter(loader)
    next(batches)
    rank.meet()
    sar.shutdown()
    uses: list[Use] = [lambda _: list(batches), lambda _: epoch(loader), lambda _: loader.close()]
    return [answer_of(use, rank) for use in uses]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_shutdown(prefetch: int, partitioned: Cutter, either: WorkerPool) -> None:
    """Of batches that a thread has made, the rest comes."""
    path, limit = partitioned(mixed(), 2, "random"), TIMEOUT + (1 + prefetch) / 100
    for one in either.run(2, case_after_shutdown, path, prefetch, timeout=limit):
        for text, seconds in one[:2]:
            assert text.startswith("CommError") and seconds < limit + SLACK, one
        assert one[2][1] < limit + SLACK


def case_in_a_child(group: Group, path: str, prefetch: int) -> list[int]:
    """What a child of each rank gets to know, as a worker of torch's loaders is one."""
    rank = Rank(group, load_partition(path, group.rank), prefetch)
    loader = rank.loader()
    batches, codes = iter(loader), []
    next(batches)
    uses: list[Use] = [lambda _: next(batches), lambda _: epoch(loader), lambda _: loader.close()]
    for use in uses:
        child = os.fork()
        if not child:
            os._exit("used by a child of its process" in answer_of(use, rank)[0])
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert len(list(batches)) == len(loader) - 1
    loader.close()
    return codes


@pytest.mark.parametrize("prefetch", [0, 2])
def test_in_a_child(prefetch: int, partitioned: Cutter, either: WorkerPool) -> None:
    path = partitioned(mixed(), 2, "random")
    assert either.run(2, case_in_a_child, path, prefetch) == [[1, 1, 1]] * 2
