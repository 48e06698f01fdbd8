"""Peak memory, bytes on the wire and time of an epoch, from counted rows and measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sar.models import for_several_types
from sar.plan.probe import Costs, Work, measure_costs
from sar.plan.statistics import GraphStatistics, Rows
from sar.run_options import ModelOptions

CLASSES = 16  # of a model where their number is unknown
_MOST = 1024  # ranks of an estimate, whose rows are counted for each pair
_RING = 2  # an all-reduce sends nearly twice the gradients
# Of the shorter of computing and sending, what does not happen beside the longer: in forward a
# layer's dense work needs the rows that it waits for, and sums of a single round need all of them.
# Measured on 4 hosts, GraphSAGE, at five rates.
_SERIAL, _SERIAL_ONE_SHOT = 0.6, 0.75


@dataclass(frozen=True)
class Hardware:
    """The machines of a run.

    Attributes:
        bandwidth: bits a second that a host sends and, at once, receives.
        memory: bytes of a host; ``None`` is not compared.
        ranks_per_host: ranks that share a host's link, memory and cores.
        cores: cores of a host; ranks beyond them take turns.
    """

    bandwidth: float = 25e9
    memory: int | None = None
    ranks_per_host: int = 1
    cores: int = 1


@dataclass(frozen=True)
class Setting:
    """One way to run: a name, its rounds, and what it does with activations."""

    name: str
    rounds: int
    activations: str = "keep"


@dataclass(frozen=True)
class Prediction:
    """An epoch of training on the busiest rank.

    Attributes:
        memory_bytes: resident memory of the largest rank at its peak.
        sent_bytes: rows that all ranks send in an epoch, from the third on: constant sums are kept.
        compute_seconds: an epoch if the wire cost nothing. wire_seconds: if computing did.
        seconds: an epoch.
        fits: whether the ranks of a host fit into its memory; ``None`` where that is not known.
    """

    setting: Setting
    memory_bytes: float
    sent_bytes: float
    compute_seconds: float
    wire_seconds: float
    seconds: float
    fits: bool | None


def _bytes(
    graph: GraphStatistics, costs: Costs, rounds: int
) -> tuple[list[float], list[int], list[int]]:
    """Per rank: resident bytes at the peak of an epoch, bytes of rows sent, and received."""
    peaks, sent, received = [], [], []
    by_kind = _row_bytes(graph, costs)
    for rank, part in enumerate(graph.ranks):
        kinds = [(rows[rank], sizes) for rows, sizes in by_kind]
        in_flight = max(
            rows.in_flight(rank, rounds) * max(sizes, default=0) for rows, sizes in kinds
        )
        tensors = costs.fixed_bytes + part.nodes * costs.node_bytes + part.edges * costs.edge_bytes
        peaks.append(costs.process_bytes + tensors + in_flight)
        sent.append(sum(int(rows.sent.sum()) * sum(sizes) for rows, sizes in kinds))
        received.append(sum(int(rows.received.sum()) * sum(sizes) for rows, sizes in kinds))
    return peaks, sent, received


@dataclass(frozen=True)
class Predicted:
    """Bytes of an epoch of full-batch training in strict rounds, of each rank.

    Attributes:
        features, classes: columns of the input, by node type where there are several, and of the
            output.
        memory_bytes: resident memory at the peak. sent_bytes: rows, from the third epoch on, and
            gradients.
    """

    model: ModelOptions
    features: int | dict[str, int]
    classes: int
    memory_bytes: list[float]
    sent_bytes: list[float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values."""
        rounded = {
            name: [*map(round, getattr(self, name))] for name in ("memory_bytes", "sent_bytes")
        }
        return asdict(self) | rounded


def predict_training(graph: GraphStatistics, model: ModelOptions) -> Predicted:
    """Memory and traffic of training ``model``, which is measured on small graphs in some seconds.

    Raises ``ValueError`` for a graph whose features' width is unknown, ``SarError`` if it fails.
    """
    if graph.types is not None and not model.is_own and model.model != "rgcn":
        raise ValueError(for_several_types(model.model))
    if graph.types is None and model.model == "rgcn":
        raise ValueError("model: got 'rgcn', which is for several node types")
    if not graph.features:
        raise ValueError(f"{graph.name}: has no 'feat' to tell the width of a model's input")
    classes = graph.classes or CLASSES
    work = Work(model, graph.features, classes, columns=graph.columns, types=graph.types)
    costs = measure_costs(work, seconds=False)
    peaks, rows, _ = _bytes(graph, costs, max(1, graph.size - 1))
    sent = [one + _gradients(graph.size, costs) for one in rows]
    return Predicted(model, work.graph.width, classes, peaks, sent)


def predict(
    graph: GraphStatistics, costs: Costs, setting: Setting, hardware: Hardware
) -> Prediction:
    """Memory, traffic and time of an epoch of the probed model on ``graph``."""
    peaks, rows_sent, rows_received = _bytes(graph, costs, setting.rounds)
    gradients, computes, wires = _gradients(graph.size, costs), [], []
    begun = _collectives(graph, costs, setting, _row_bytes(graph, costs))
    for part, sent, received in zip(graph.ranks, rows_sent, rows_received, strict=True):
        wires.append(max(sent, received) + gradients)
        handled = (sent + received) / 2
        work = part.nodes * costs.node_seconds + part.edges * costs.edge_seconds
        computes.append(costs.fixed_seconds + work + handled * costs.byte_seconds + begun)
    turns = max(1.0, hardware.ranks_per_host / hardware.cores)
    compute = turns * (sum(computes) / len(computes) if turns > 1 else max(computes))
    wire = max(wires) * 8 / hardware.bandwidth * hardware.ranks_per_host
    fits = None
    if hardware.memory is not None:
        fits = max(peaks) * hardware.ranks_per_host <= hardware.memory
    serial = _SERIAL if setting.rounds > 1 else _SERIAL_ONE_SHOT
    seconds = max(compute, wire) + serial * min(compute, wire)
    return Prediction(setting, max(peaks), sum(rows_sent), compute, wire, seconds, fits)


def settings_of(size: int, activations: Sequence[str]) -> list[Setting]:
    """Settings of strict rounds for each of ``activations`` and, where it differs, of one round."""
    strict = max(1, size - 1)
    rounds = [("strict", strict)] + ([("one-shot", 1)] if strict > 1 else [])
    return [
        Setting(f"{word}, {one}", number, one) for one in activations for word, number in rounds
    ]


def numbers(asked: int) -> list[int]:
    """Numbers of ranks: an eighth of ``asked``, twice as many, and so on to four times it."""
    found = {max(1, asked * 2**power // 8) for power in range(6)}
    return sorted(number for number in found if number <= max(asked, _MOST))


Exchanges = list[tuple[list[Rows], list[int]]]  # rows of each rank; bytes of a row in each


def _row_bytes(graph: GraphStatistics, costs: Costs) -> Exchanges:
    """Bytes of a row in each exchange, by what travels; backward goes the way that sends less."""
    graph.count([one.relations for one in costs.exchanges])
    found: Exchanges = []
    for one in costs.exchanges:
        pulled, ended = [*one.pulled_bytes], list[int]()
        starts, ends = (graph.rows_sent(kind, one.relations) for kind in ("pulled", "ended"))
        for of_start, of_end in one.turned_bytes:
            if ends * sum(of_end) < starts * sum(of_start):
                ended += of_end
            else:
                pulled += of_start
        sizes = {"pulled": pulled, "summed": one.summed_bytes, "ended": ended}
        found += [(graph.rows(kind, one.relations), each) for kind, each in sizes.items()]
    return found


def _collectives(
    graph: GraphStatistics, costs: Costs, setting: Setting, by_kind: Exchanges
) -> float:
    """Processor seconds that messages and later rounds cost a rank, whatever they carry; the first
    round of each exchange is part of ``costs.fixed_seconds``."""
    peers, rounds, messages = graph.size - 1, 0, costs.reductions
    if not peers:
        return 0.0
    for _, sizes in by_kind:
        rounds += len(sizes) * (setting.rounds - 1)
        messages += len(sizes)  # to each other rank, in whatever round
    return rounds * costs.round_seconds + messages * peers * costs.message_seconds


def _gradients(size: int, costs: Costs) -> float:
    """Bytes that a rank sends to sum the parameters' gradients."""
    return _RING * (size - 1) / size * costs.parameters * 4
