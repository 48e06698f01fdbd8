"""The stream of a message pass: shards in rounds, edges in blocks, one function call a block. All
source tensors travel packed in one row, so that a round is one message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.relation import Relation
from sar.kernels import add_rows, wide_dtype
from sar.kernels.csc import ascending
from sar.kernels.device import chunk_bytes
from sar.ops.capture import Captures, NoCaptures
from sar.ops.randomness import seeded
from sar.stream import Pass, Step

Rows = list[Tensor]
Weigh = Callable[[Tensor], Tensor]
_GOLDEN = 0x9E3779B97F4A7C15  # spreads block numbers over the seeds
_MIN_BLOCK_EDGES = 256
_ALIGNMENT = 16  # bytes; every dtype's columns start on a multiple of its size


class Inputs(NamedTuple):
    """Tensors that a message function reads, in its order: of owned rows of the source type
    [num_src, ...], of destination rows [num_dst, ...] and of local edges [num_edges, ...]."""

    src: list[Tensor]
    dst: list[Tensor]
    edge: list[Tensor]


class Weighting(NamedTuple):
    """Messages weighed by a softmax of ``num_scores`` scores of an edge, H; ``label``, int64
    [width], says which of them weighs each element of a message."""

    num_scores: int
    label: Tensor


@dataclass(frozen=True)
class Messages:
    """A message function and how it wants its edges.

    Attributes:
        function: (src rows, dst rows, edge rows, positions) of a block -> one tensor per output,
            [e, ...]; positions are int32 [e], where the edges are among the local ones.
        is_udf: it may use tensors that are not inputs, and random numbers: captures are looked
            for, randomness is replayed.
        ordered: the edges of a block come in ascending position.
        linear_in_src: its gradient does not depend on the source rows, so backward fetches none.
        sort_by: index of an integer edge input that the edges of a block are sorted by.
        capturing: finds what the function uses besides its arguments; needs ``is_udf``.
        captures: tensors that the function is known to use, on every rank alike.
        hidden: leaf parameters that the function uses where no torch function shows them.
        widest: bytes of the widest value that the function computes for an edge.
        names: of the inputs, for errors, by the ``id`` of the tensor.
        weighting: the function also takes what makes weights of scores, a function that it calls
            once, and its one output is linear in them; see :class:`sar.ops.reducers.SoftmaxSum`.
    """

    function: Callable[..., Rows]
    is_udf: bool = False
    ordered: bool = False
    linear_in_src: bool = False
    sort_by: int | None = None
    capturing: Captures = field(default_factory=NoCaptures)
    captures: tuple[Tensor, ...] = ()
    hidden: tuple[Tensor, ...] = ()
    widest: int = 0
    names: Mapping[int, str] = field(default_factory=dict)
    weighting: Weighting | None = None


def autocast_state() -> tuple[str, bool, torch.dtype]:
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@dataclass(frozen=True)
class MessagePass:
    """One pass of messages over a relation: what is computed, how it is reduced and streamed.

    Attributes:
        reduce: ``"sum"``, ``"max"``, ``"min"`` per destination, or ``"edges"``: kept per edge.
        num_src, num_dst, num_edge: how many of the tensor inputs are rows of each side.
        seed: of the random numbers that a user's function draws, mixed with the block's number.
        autocast: (device type, enabled, dtype) that the forward ran under.
        pushed_bytes: of a row that is sent to the owners of the sources.
    """

    relation: Relation
    messages: Messages
    reduce: str
    policy: Policy
    num_src: int
    num_dst: int
    num_edge: int
    seed: int = 0
    autocast: tuple[str, bool, torch.dtype] = field(default_factory=autocast_state)
    pushed_bytes: int = 0

    @classmethod
    def of(
        cls, relation: Relation, messages: Messages, reduce: str, policy: Policy, inputs: Inputs
    ) -> MessagePass:
        src, dst, edge = map(len, inputs)
        seed = int(torch.randint(2**62, (1,))) if messages.is_udf else 0
        return cls(relation, messages, reduce, policy, src, dst, edge, seed)

    def split(self, values: Sequence) -> tuple[list, list, list]:
        """One value per input, by side: source, destination, edge."""
        a, b = self.num_src, self.num_src + self.num_dst
        return list(values[:a]), list(values[a:b]), list(values[b : b + self.num_edge])

    def call(
        self,
        block: Block,
        src_rows: Rows,
        dst_rows: Rows,
        edge_rows: Rows,
        mode: AbstractContextManager | None = None,
        weigh: Weigh | None = None,
    ) -> Rows:
        """Call the function with the random numbers and autocast state that belong to the block."""
        given = [src_rows, dst_rows, edge_rows, block.position, *([] if weigh is None else [weigh])]
        if not self.messages.is_udf:
            return self.messages.function(*given)
        with as_before(self.seed, block.number, self.autocast, block.src.device, mode):
            return self.messages.function(*given)


@contextmanager
def as_before(
    seed: int, number: int, autocast: tuple[str, bool, torch.dtype], device: torch.device,
    mode: AbstractContextManager | None,
) -> Iterator[None]:  # fmt: skip
    """Around a call of a user's function, in both passes: the random numbers of ``number`` and what
    :func:`autocast_state` gave."""
    kind, enabled, dtype = autocast
    seed = (seed + number * _GOLDEN) % 2**63
    seed ^= seed >> 32  # torch's CPU generator takes the low half only
    with (
        seeded(seed, device),
        torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False),
        mode or nullcontext(),
    ):
        yield


@dataclass(frozen=True)
class Block:
    """A few edges of one shard, int32 [e] each, and a number that names it in both passes."""

    number: int
    src: Tensor
    dst: Tensor
    position: Tensor


class RowLayout:
    """Where each tensor's columns lie in a packed row; different dtypes are packed as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [t.shape[1:] for t in tensors]
        self.dtypes = [t.dtype for t in tensors]
        self.mixed = len(set(self.dtypes)) > 1
        self.dtype = torch.uint8 if self.mixed else self.dtypes[0]
        self.bounds: list[tuple[int, int]] = []
        self.width = 0
        for t in tensors:
            size = math.prod(t.shape[1:]) * (t.element_size() if self.mixed else 1)
            self.bounds.append((self.width, self.width + size))
            self.width += -(-size // _ALIGNMENT) * _ALIGNMENT if self.mixed else size

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[rows, width] contiguous; a single tensor is only reshaped."""
        flat = [flat_rows(t) for t in tensors]
        if len(flat) == 1:
            return flat[0].contiguous()
        if not self.mixed:
            return torch.cat(flat, dim=1)
        packed = flat[0].new_zeros((len(flat[0]), self.width), dtype=torch.uint8)
        for part, (low, high) in zip(flat, self.bounds, strict=True):
            packed[:, low:high] = part.contiguous().view(torch.uint8).view(len(part), high - low)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Views of the columns in the shapes of the tensors; copies where dtypes are mixed."""
        parts = []
        for (low, high), shape, dtype in zip(self.bounds, self.shapes, self.dtypes, strict=True):
            columns = packed[:, low:high]
            if self.mixed:
                columns = columns.contiguous().view(dtype)
            parts.append(columns.reshape(len(packed), *shape))
        return parts

    def add_rows(self, target: Tensor, idx: Tensor, parts: Sequence[Tensor | None]) -> None:
        """target[idx] += the columns of ``parts`` that are not ``None``; of one dtype only."""
        for part, (low, high) in zip(parts, self.bounds, strict=True):
            if part is not None:
                add_rows(target[:, low:high], idx, flat_rows(part).to(target.dtype))


def flat_rows(tensor: Tensor) -> Tensor:
    """The tensor as [rows, numbers of a row]; a view where there can be one."""
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))


def sum_layout(tensors: Sequence[Tensor]) -> RowLayout | None:
    """The layout of sums of such rows, in one wide dtype so that they are added in place."""
    wide = reduce(torch.promote_types, [wide_dtype(t.dtype) for t in tensors], torch.bfloat16)
    return RowLayout([t[:0].to(wide) for t in tensors]) if tensors else None


def pack_rows(src: list[Tensor]) -> tuple[RowLayout | None, Tensor | None]:
    """The source rows packed as one message; ``None`` when the function reads none."""
    if not src:
        return None, None
    layout = RowLayout(src)
    return layout, layout.pack(src)


def rows_at(tensors: Sequence[Tensor], idx: Tensor) -> Rows:
    return [t.index_select(0, idx) for t in tensors]


def unpack_rows(layout: RowLayout | None, rows: Tensor | None, idx: Tensor) -> list[Tensor]:
    """The source rows [e, ...] of a block; none when the function reads none."""
    if layout is None or rows is None:
        return []
    return layout.unpack(rows.index_select(0, idx))


def row_bytes(spec: MessagePass, layout: RowLayout | None) -> int:
    """Bytes by which rounds of this pass are chosen, in forward as in backward."""
    size = spec.pushed_bytes
    if layout is not None:
        size += 2 * layout.row_bytes  # backward: rows in, gradients out
    return max(1, size)


def each_block(
    spec: MessagePass, src: Rows, edge: Rows, others: Sequence[Tensor],
    keep: list[Tensor] | None = None, kept: Sequence[Tensor] = (), fetches: bool = True,
) -> Iterator[tuple[Step, Iterator[tuple[Block, Rows]]]]:  # fmt: skip
    """The steps of a pass, each with its blocks and the source rows of their edges; collective.

    ``others`` are what else has a row for each edge. ``keep`` gets the packed rows of each round,
    ``kept`` has them. Without ``fetches`` only the shapes of source rows matter: nothing travels.
    """
    layout, packed = pack_rows(src)
    size = block_size(spec, layout, others)
    sent = packed if fetches or kept else None
    blank = None if packed is None else packed.new_zeros((1, packed.shape[1]))
    width = row_bytes(spec, layout)
    policy, edges = spec.policy, spec.relation.store
    steps = Pass(edges, policy, sent, row_bytes=width, order=True, keep=keep, kept=kept)
    for step in steps:
        rows = step.rows
        if blank is not None and sent is None:
            rows = packed if step.round is None else blank.expand(step.round.num_recv, -1)
        blocks = _blocks(spec, step, edge, size)
        yield step, ((block, unpack_rows(layout, rows, block.src)) for block in blocks)


def _blocks(spec: MessagePass, step: Step, kinds: Rows, size: int) -> Iterator[Block]:
    """Edges of a step in blocks of at most ``size``; ``kinds`` are edge inputs, for ``sort_by``."""
    messages = spec.messages
    for index, (src, dst, position) in enumerate(step.shard.edge_blocks(size)):
        if messages.ordered:  # as the function would see them in DGL
            order = ascending(position)
            if messages.sort_by is not None:
                kind = kinds[messages.sort_by].index_select(0, position[order])
                if bool((kind[1:] < kind[:-1]).any()):  # edges often are sorted
                    order = order[torch.argsort(kind, stable=True)]
            src, dst, position = src[order], dst[order], position[order]
        if len(src):
            yield Block(step.number * 2**32 + index, src, dst, position)


def block_size(spec: MessagePass, layout: RowLayout | None, others: Sequence[Tensor]) -> int:
    """Edges a block: inputs and outputs, and any value between, stay below the policy's bytes."""
    an_edge = sum(RowLayout([t]).row_bytes for t in others)
    an_edge += layout.row_bytes if layout is not None else 0
    an_edge = max(1, an_edge, spec.messages.widest)
    size = spec.policy.block_bytes or chunk_bytes(spec.relation.plan.device)
    return max(_MIN_BLOCK_EDGES, size // an_edge)
