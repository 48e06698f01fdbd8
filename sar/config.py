"""Options: :class:`Policy`, frozen and passed down; :class:`Config`, the original's switches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CONSTANT_INPUTS = ("memory", "mapped", "off")
_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)})
_UNITS.update({f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)})


def parse_bytes(text: int | str, name: str = "memory_budget") -> int:
    """Bytes of ``"4GiB"``, ``"500 MB"`` or a plain integer.

    Raises ``TypeError`` for another type and ``ValueError`` for an unreadable or non-positive size.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise TypeError(f"{name}: got {type(text).__name__}, expected an int or a str like '4GiB'")
    if isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match.group(2).upper() not in _UNITS:
            raise ValueError(f"{name}: got {text!r}, expected a size like '4GiB' or '500MB'")
        if re.fullmatch("[A-Z]b", match.group(2)):
            raise ValueError(f"{name}: got {text!r}, which reads as bits, expected bytes, as 'GB'")
        size = int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    if size <= 0:
        raise ValueError(f"{name}: got {text!r}, expected more than 0 bytes")
    return size


WIRE_DTYPES = ("bfloat16", "int8")


@dataclass(frozen=True)
class Lossy:
    """What may be lost to send fewer bytes. Nothing by default: training is exact.

    Args:
        wire_dtype: what feature rows travel as: ``None`` (as they are), ``"bfloat16"``, or
            ``"int8"`` with one scale a row and stochastic rounding. Rows that are no wider than
            that, and integers, travel as they are.
        gradient_wire_dtype: the same for gradients of rows on their way home.
        boundary_rate: share of the remote rows that a sum or mean reads while gradients are
            recorded, drawn anew for every reduction and scaled by its inverse (boundary-node
            sampling, arXiv 2203.10983); in (0, 1]. Evaluation reads all.
    """

    wire_dtype: str | None = None
    gradient_wire_dtype: str | None = None
    boundary_rate: float = 1.0

    def __post_init__(self) -> None:
        for name in ("wire_dtype", "gradient_wire_dtype"):
            value = getattr(self, name)
            if value is not None and value not in WIRE_DTYPES:
                expected = ", ".join(map(repr, WIRE_DTYPES))
                raise ValueError(f"{name}: got {value!r}, expected None or one of {expected}")
        rate = self.boundary_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise TypeError(f"boundary_rate: got {type(rate).__name__}, expected a float")
        if not 0 < rate <= 1:
            raise ValueError(f"boundary_rate: got {rate}, expected 0 < rate <= 1")

    @property
    def draws(self) -> bool:
        """Whether what is lost of features is drawn at random, anew each time."""
        return self.wire_dtype == "int8" or self.boundary_rate < 1

    @property
    def code(self) -> int:
        """A number that is equal where the options are: ranks compare it."""
        known = (None, *WIRE_DTYPES)
        kinds = known.index(self.wire_dtype) * len(known) + known.index(self.gradient_wire_dtype)
        return kinds * 10**9 + round(self.boundary_rate * 10**8)


EXACT = Lossy()


@dataclass(frozen=True)
class Policy:
    """How a layer's halo is streamed; without ``lossy``, results depend on it by rounding only.

    Args:
        rounds: number of rounds a layer's halo is fetched in. 1 holds the whole halo at once
            (one-shot, fastest), P - 1 holds one peer's rows (strict, smallest). ``None`` is strict.
            Clamped to [1, max(1, P - 1)].
        memory_budget: bytes (or ``"4GiB"``) that send and receive buffers in flight may take; the
            fewest rounds that fit are chosen per row width. Excludes ``rounds``.
        rematerialize: fetch remote rows again in backward (True) or keep the forward's (False).
        block_bytes: bytes of edge values computed at once on the generic path; ``None`` is 8 MiB on
            the processor, whose caches hold them, and 1 GiB elsewhere.
        lossy: what may be lost for fewer bytes on the wire.
        constant_inputs: where sums and means of rows that ask for no gradient are kept when the
            same rows come a second time, so that they are not sent again: in ``"memory"``, in a
            ``"mapped"`` temporary file, or not at all (``"off"``). Takes one row of the input's
            width for each owned row. What ``lossy`` draws at random is drawn anew instead.
            ``"mapped"`` also keeps remote rows of an attention layer's input, in files.
        structure: which orientations of the edges stay in memory: ``"both"`` (12 bytes an edge), or
            ``"one"`` (8 bytes), where backward sorts each shard anew when its turn comes.
        exchange: ``"auto"`` sends the fewest rows that sums of copied rows need, some as they are
            and some as partial sums, and has attention like that of GATConv computed backward where
            its edges start if that sends less; ``"pull"`` always sends source rows as they are.
        zeros: ``"skip"`` sends rows that are summed without their zeros, with a bit for each of
            their numbers, and no gradient home of the zeros of a relu, which drops it. All
            parameters get the gradients that they get with ``"send"``; ``torch.autograd.grad`` of a
            relu's result itself does not.
    """

    rounds: int | None = None
    memory_budget: int | str | None = None
    rematerialize: bool = True
    block_bytes: int | None = None
    lossy: Lossy = EXACT
    constant_inputs: str = "memory"
    structure: str = "both"
    exchange: str = "auto"
    zeros: str = "send"

    def __post_init__(self) -> None:
        if self.rounds is not None:
            if isinstance(self.rounds, bool) or not isinstance(self.rounds, int):
                raise TypeError(
                    f"rounds: got {type(self.rounds).__name__}, expected an int or None"
                )
            if self.rounds < 1:
                raise ValueError(f"rounds: got {self.rounds}, expected at least 1")
        if self.memory_budget is not None:
            if self.rounds is not None:
                raise ValueError("rounds and memory_budget: got both, expected at most one of them")
            object.__setattr__(self, "memory_budget", parse_bytes(self.memory_budget))
        if not isinstance(self.rematerialize, bool):
            raise TypeError(
                f"rematerialize: got {type(self.rematerialize).__name__}, expected a bool"
            )
        if self.exchange not in ("auto", "pull"):
            raise ValueError(f"exchange: got {self.exchange!r}, expected 'auto' or 'pull'")
        if self.zeros not in ("send", "skip"):
            raise ValueError(f"zeros: got {self.zeros!r}, expected 'send' or 'skip'")
        if self.block_bytes is not None:
            object.__setattr__(self, "block_bytes", parse_bytes(self.block_bytes, "block_bytes"))
        if not isinstance(self.lossy, Lossy):
            raise TypeError(f"lossy: got {type(self.lossy).__name__}, expected a sar.Lossy")
        if self.constant_inputs not in CONSTANT_INPUTS:
            raise ValueError(
                f"constant_inputs: got {self.constant_inputs!r}, "
                f"expected one of {', '.join(CONSTANT_INPUTS)}"
            )
        if self.structure not in ("both", "one"):
            raise ValueError(f"structure: got {self.structure!r}, expected 'both' or 'one'")


class Config:
    """The original library's process-wide switches, read at each forward of a graph without policy.

    Attributes:
        disable_sr: keep the fetched rows for backward instead of fetching them again.
        max_collective_size: elements per all-to-all of ``sar.comm.all_to_all``, to within a row of
            each tensor; 0 is unlimited.
        pipeline_depth: accepted for old scripts; two rounds are always in flight.
    """

    disable_sr: bool = False
    max_collective_size: int = 0
    pipeline_depth: int = 1


def current_policy(policy: Policy | None) -> Policy:
    """The graph's own policy or, where it has none, the one that :class:`Config` describes now."""
    if policy is not None:
        return policy
    return BY_CONFIG[bool(Config.disable_sr)]


BY_CONFIG = {no_sr: Policy(rematerialize=not no_sr) for no_sr in (False, True)}


def usable_device(device: torch.device | str) -> torch.device:
    """The device ``device``. Raises ``ValueError`` where this torch has none of that name."""
    import torch  # options are read before it is needed

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: got {device!r}, expected one such as 'cpu' or 'cuda'") from error
    there = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= there:
        raise ValueError(f"device: got '{found}', but this torch finds {there} CUDA devices")
    return found
