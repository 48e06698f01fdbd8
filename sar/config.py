"""Options: :class:`Policy`, frozen and passed down; :class:`Config`, the original's switches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

from sar.errors import NotSupportedError
from sar.options import POSITIVE, Kind, check_options, one_of, option
from sar.words import CONSTANT_INPUTS

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)})
_UNITS.update({f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)})


def parse_bytes(text: int | str, name: str = "memory_budget") -> int:
    """Bytes of ``"4GiB"``, ``"500 MB"`` or a plain integer. Raises ``TypeError`` for another type
    and ``ValueError`` for an unreadable or non-positive size."""
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


def _size(text: str) -> str:
    try:
        parse_bytes(text, "")
    except ValueError as error:
        raise ValueError(str(error).removeprefix(": ")) from error
    return text


SIZE = Kind(
    "SIZE", "a size like '4GiB'", _size, (int, str)
)  # the text is kept: it says more than a number


class Lossy:
    """Gone: rows and gradients always travel whole, and training is exact.

    Raises ``NotSupportedError``. For fewer bytes, ``Policy(zeros="skip")`` sends no zeros of a relu
    and autocast makes rows 16 bits wide.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotSupportedError(
            "sar.Lossy: lossy wires and boundary sampling are gone: rows always travel whole; for "
            "fewer bytes use Policy(zeros='skip') or torch.autocast"
        )


@dataclass(frozen=True)
class Policy:
    """How a layer's halo is streamed; results depend on it by rounding only.

    Args:
        rounds: number of rounds a layer's halo is fetched in. 1 holds the whole halo at once
            (one-shot, fastest), P - 1 holds one peer's rows (strict, smallest). ``None`` is strict.
            Clamped to [1, max(1, P - 1)].
        memory_budget: bytes (or ``"4GiB"``) that send and receive buffers in flight may take; the
            fewest rounds that fit are chosen per row width. Excludes ``rounds``.
        rematerialize: fetch remote rows again in backward (True) or keep the forward's (False).
        block_bytes: bytes of edge values computed at once on the generic path; ``None`` is 8 MiB on
            the processor, whose caches hold them, and 1 GiB elsewhere.
        constant_inputs: where sums and means of rows that ask for no gradient are kept when the
            same rows come a second time, so that they are not sent again: in ``"memory"``, in a
            ``"mapped"`` temporary file, or not at all (``"off"``). Takes one row of the input's
            width for each owned row.
            ``"mapped"`` also keeps remote rows of an attention layer's input, in files.
        structure: which orientations of the edges stay in memory: ``"both"`` (12 bytes an edge), or
            ``"one"`` (8 bytes), where backward sorts each shard anew when its turn comes.
        exchange: ``"auto"`` sends the fewest rows that sums of copied rows need, some as they are
            and some as partial sums, and has attention like that of GATConv computed backward where
            its edges start if that sends less; ``"pull"`` always sends source rows as they are.
        zeros: ``"skip"`` sends rows that are summed without their zeros, with a bit for each of
            their numbers, and no gradient home of the zeros of a relu that drops it and says so:
            :func:`sar.nn.relu`, or ``activation=F.relu`` of a layer that is fused. All
            parameters get the gradients that they get with ``"send"``; ``torch.autograd.grad`` of a
            relu's result itself does not. Hooks on that result are seen if they come before the
            sum; later ones raise ``NotSupportedError`` in backward.

    ``constant_inputs`` and ``zeros`` have to be equal on all ranks. Where ranks differ in the
    first, making a graph raises ``ValueError`` on every rank.

    Raises:
        TypeError: a value of another type.
        ValueError: a value out of range, or both ``rounds`` and ``memory_budget``. A budget below
            what strict rounds need raises it at the first layer that needs more.
    """

    rounds: int | None = option(
        None, "rounds a layer's halo is fetched in; default: P - 1, strict", POSITIVE
    )
    memory_budget: int | str | None = option(
        None, "bytes of halo in flight, like 4GiB, not --rounds", SIZE
    )
    rematerialize: bool = option(True, "keep fetched rows for the backward pass")
    block_bytes: int | None = option(
        None,
        "bytes of edge values computed at once by messages without a kernel of their own; "
        "default: 8MiB, 1GiB on cuda",
        SIZE,
    )
    constant_inputs: str = option(
        "memory",
        "where sums of rows that stay the same are kept instead of sent again; mapped (files) "
        "also keeps what an attention layer reads of others",
        one_of(CONSTANT_INPUTS),
    )
    structure: str = option(
        "both", "orientations of the edges kept, 12 bytes an edge or 8", one_of(("both", "one"))
    )
    exchange: str = option(
        "auto",
        "what is least for sums and attention, or all source rows",
        one_of(("auto", "pull")),
    )
    zeros: str = option(
        "send",
        "whether zeros of relu and dropout travel with rows that are summed",
        one_of(("send", "skip")),
    )

    def __post_init__(self) -> None:
        if self.rounds is not None and self.memory_budget is not None:
            raise ValueError("rounds and memory_budget: got both, expected at most one of them")
        for name in ("memory_budget", "block_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        check_options(self)


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
