"""Where a rank's time goes: what each layer computes, waits for and moves; spans for a trace.

Every group has a :class:`Meter`. It always sums up by layer and pass, which costs a few clock
readings an exchange; spans are kept only between :meth:`Meter.record` and :meth:`Meter.stop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

OTHER = ("", "other")  # what belongs to no layer: the loss, the optimizer, reading data
COMPUTE = 0  # lane of stretches and waits; lanes of the wire follow


@dataclass
class Counters:
    """Bytes of rows sent to and received from other ranks, and collectives begun.

    Attributes:
        avoided_bytes: of rows that were not sent again because the result was kept.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    collectives: int = 0
    avoided_bytes: int = 0


class Work(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Return when the receive buffer is filled and the send buffer may be reused."""


@dataclass
class Stretch:
    """Sums over one pass of one layer. ``seconds`` (wall, or of the device's stream) include waits
    for other ranks and exclude inner layers; bytes are of rows."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: int = 0


class Clock(Protocol):
    """The clock of a device that computes asynchronously."""

    def mark(self, taken: Stretch) -> None:
        """Count what the device does since the last mark as ``taken``'s."""

    def settle(self) -> None:
        """Wait for the marks, and add the seconds between them."""


@dataclass
class LayerNotes:
    """What layers say of their work while :attr:`Meter.notes` is set.

    Attributes:
        ways: (layer, what computes it, why nothing faster does) for each decision, in order.
        rows: sent and received, by (layer, pass).
        undo: what brings back, last first, what layers keep for later; ``None``: nobody will.
    """

    ways: list[tuple[str, str, str | None]] = field(default_factory=list)
    rows: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    undo: list[Callable[[], None]] | None = None


@dataclass
class Span:
    """A named time on the clock of :func:`time.perf_counter`. ``lane`` 0 is what the rank does,
    from 1 what its wire does; spans of one lane nest. ``sent`` and ``received`` are bytes of an
    exchange's rows."""

    name: str
    begin: float
    end: float
    lane: int = COMPUTE
    sent: int = 0
    received: int = 0


@dataclass
class Meter:
    """The account of one rank.

    Attributes:
        stretches: by (layer, pass).
        spans: since :meth:`record`; ``None`` when nothing is recorded.
        since, here: when the present stretch began, and what it is added to.
        notes: where layers say in forward how they compute; ``None``: nobody asks.
    """

    stretches: dict[tuple[str, str], Stretch] = field(default_factory=dict)
    spans: list[Span] | None = None
    since: float = field(default_factory=time.perf_counter)
    notes: LayerNotes | None = None

    def __post_init__(self) -> None:
        self._lanes: list[float] = []  # when each lane of the wire is free again
        self._clock: Clock | None = None
        self._key = OTHER
        self.here = self.stretches.setdefault(OTHER, Stretch())

    def switch(self, layer: str, work: str) -> tuple[str, str]:
        """Count what follows for this layer and pass; returns those before."""
        now, before = time.perf_counter(), self._key
        if self._clock is None:
            self.here.seconds += now - self.since
        else:
            self._clock.mark(self.here)
        if self.spans is not None:
            self.spans.append(Span(" ".join(before).strip(), self.since, now))
        self._key, self.since = (layer, work), now
        here = self.stretches.get(self._key)
        if here is None:
            here = self.stretches[self._key] = Stretch()
        self.here = here
        return before

    @property
    def at_work(self) -> tuple[str, str]:
        """The layer and the pass that is counted for now."""
        return self._key

    def use(self, clock: Clock | None) -> None:
        """Time layers by ``clock``, ``None`` for this thread's, as waits and spans always are."""
        self.switch(*self._key)
        self.settle()
        self._clock = clock

    def settle(self) -> None:
        """Wait for a device's clock: seconds are complete up to the last switch."""
        if self._clock is not None:
            self._clock.settle()

    def tell(self, what: str, reason: str | None = None) -> None:
        """Say what computes the layer at work, and why nothing faster does, if one may know."""
        if self.notes is not None and self._key[1] != "backward":
            self.notes.ways.append((self._key[0], what, reason))

    def count_rows(self, sent: int, received: int) -> None:
        """Count rows on their way, whatever they are coded as, while :attr:`notes` is set."""
        if self.notes is not None:
            before = self.notes.rows.get(self._key, (0, 0))
            self.notes.rows[self._key] = before[0] + sent, before[1] + received

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Context manager around a call that blocks on other ranks."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.waited(name, begin)

    def record(self) -> None:
        self.switch(*self._key)
        self.spans, self._lanes = [], []

    def stop(self) -> list[Span]:
        """The spans kept since :meth:`record`, those of the wire in lanes."""
        self.switch(*self._key)
        spans, self.spans = self.spans or [], None
        for span in sorted((s for s in spans if s.lane != COMPUTE), key=lambda s: s.begin):
            span.lane = self._free_lane(span)
        return spans

    def flight(self, work: Work, what: str, sent: int = 0, received: int = 0) -> Span | None:
        """The span of work just begun, if kept; ended by the transport, or by the wait."""
        if self.spans is None:
            return None
        now = time.perf_counter()
        span = Span(f"{' '.join(self._key).strip()} {what}", now, 0.0, 1, sent, received)
        self.spans.append(span)
        when_done = getattr(work, "when_done", None)
        if when_done is not None:
            when_done(lambda: setattr(span, "end", time.perf_counter()))
        return span

    def _free_lane(self, span: Span) -> int:
        for lane, free in enumerate(self._lanes):
            if free <= span.begin:
                self._lanes[lane] = span.end
                return lane + 1
        self._lanes.append(span.end)
        return len(self._lanes)

    def waited(self, name: str, begin: float) -> None:
        now = time.perf_counter()
        self.here.wait_seconds += now - begin
        if self.spans is not None:
            self.spans.append(Span(name, max(begin, self.since), now))
