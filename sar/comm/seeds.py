"""Seeds that all ranks draw alike, so that random numbers need not depend on the cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from sar._private import in_backward
from sar.errors import SarError

if TYPE_CHECKING:
    from sar.comm.group import Group


class SeedStream:
    """Seeds of dropout; number k is a function of the run's base and of k, not of ranks.

    Every rank has its own and draws in lockstep, as it takes part in collectives.

    Attributes:
        base: what :func:`sar.manual_seed` was given; ``None`` until it is given or first needed.
        count: seeds drawn since.
        replays: draws are those of an earlier forward pass.
    """

    def __init__(self) -> None:
        self.base: int | None = None
        self.count = 0
        self.replays = False

    def restart(self, base: int, count: int = 0) -> None:
        """Continue from ``base`` after ``count`` draws, as :meth:`state` gives them."""
        self.base, self.count = base, count

    def state(self) -> tuple[int, int] | None:
        """The arguments of :meth:`restart` that lead here; ``None`` before there is a base."""
        return None if self.base is None else (self.base, self.count)

    def draw(self, group: Group) -> int:
        """The next seed, in [0, 2**63); collective where there is no base yet.

        Rank 0's torch seed is the base then. Raises ``SarError`` inside a backward pass: a forward
        that is recomputed there would get other masks than it had.
        """
        if in_backward() and not self.replays:
            raise SarError(
                "dropout: drawn again in backward, expected the forward's masks; give "
                "torch.utils.checkpoint context_fn=sar.nn.same_dropout, use_reentrant=False"
            )
        self._begin(group)
        self.count += 1
        return digest_of_text(f"{self.base} {self.count - 1}")

    def _begin(self, group: Group) -> None:
        if self.base is None:
            self.base = int(group.broadcast(torch.tensor(signed(torch.initial_seed()))))

    def same_twice(self, group: Group) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Contexts of a forward pass and of its repetition, which draws the same seeds.

        Collective where there is no base yet.
        """
        self._begin(group)
        return nullcontext(), self.again()

    def again(self) -> AbstractContextManager:
        """A context, to be entered any number of times, that draws the seeds from here on again."""
        return _Again(self)


@contextmanager
def no_draws(seeds: SeedStream) -> Iterator[None]:
    """On exit forget the draws made inside."""
    kept = seeds.base, seeds.count
    try:
        yield
    finally:
        seeds.base, seeds.count = kept


class _Again:
    """The context of :meth:`SeedStream.again`, from the state when it was made."""

    def __init__(self, seeds: SeedStream) -> None:
        self.seeds, self.state = seeds, (seeds.base, seeds.count)
        self.kept: list[tuple[int | None, int, bool]] = []

    def __enter__(self) -> None:
        seeds, (base, count) = self.seeds, self.state
        self.kept.append((seeds.base, seeds.count, seeds.replays))
        seeds.base = seeds.base if base is None else base  # it was found after this was made
        seeds.count, seeds.replays = count, True

    def __exit__(self, *_: object) -> None:
        seeds = self.seeds
        seeds.base, seeds.count, seeds.replays = self.kept.pop()


def digest_of_text(text: str | bytes) -> int:
    """63 bits of the SHA-256 of ``text``."""
    content = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def signed(seed: int) -> int:
    """The 64 bits of ``seed`` as an int64."""
    return (seed + 2**63) % 2**64 - 2**63
