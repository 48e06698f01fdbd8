"""What the messages of a round hold: rows as they are, or coded where digits may be lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.stream.codec import Codec, block_rows
from sar.stream.plan import Combine, HaloPlan, Round

Message = tuple[Tensor, list[int]]  # a buffer and how much of it belongs to each rank


class RowMessages:
    """Source rows on their way to the ranks that read them.

    Args:
        rows: [num_rows, *] of one dtype; their columns travel side by side.
        keep: rows that land stay valid, in memory of their own.
        codec: of what is sent.
    """

    def __init__(
        self, plan: HaloPlan, rows: Sequence[Tensor], keep: bool = False, codec: Codec | None = None
    ) -> None:
        self.plan, self.rows, self.keep, self.codec = plan, rows, keep, codec
        self.width = sum(part.shape[1] for part in rows)

    def sent(self, step: Round) -> Message:
        """What this rank sends in a round."""
        send = self._take(step.num_send, self.codec, keep=False, most=step.most)
        if self.codec is None:
            self.plan.gather_round(step, self.rows, send)
        else:
            parts = send.split(list(step.send_rows))
            for peer, part in zip(step.targets, parts, strict=True):
                self._encode(part, peer, self.codec)
        return send, step.send_counts

    def received(self, step: Round) -> Message:
        """Room for what it gets."""
        keep = self.keep and self.codec is None
        recv = self._take(step.num_recv, self.codec, keep=keep, most=step.most)
        return recv, step.recv_counts

    def landed(self, step: Round, recv: Tensor) -> Tensor:
        """[step.num_recv, width] rows out of what it got, which goes back to the pool."""
        if self.codec is None:
            return recv
        rows = self._take(len(recv), None, keep=self.keep, most=step.most)
        self.codec.decode_all(recv, rows)
        self.plan.group.pool.give(recv)
        return rows

    @property
    def row_bytes(self) -> int:
        """Of a row on the wire."""
        return _row_bytes(self.width, self.rows[0].dtype, self.codec)

    def _encode(self, out: Tensor, peer: int, codec: Codec) -> None:
        """What one peer gets, coded."""
        for low in range(0, len(out), block_rows(self.width)):
            part = out[low : low + block_rows(self.width)]
            rows = self.rows[0].new_empty((len(part), self.width))
            self.plan.gather(peer, self.rows, low, rows)
            codec.encode(rows, part)

    def _take(self, num_rows: int, codec: Codec | None, keep: bool, most: int) -> Tensor:
        like = self.rows[0]
        dtype = like.dtype if codec is None else codec.dtype
        width = self.width if codec is None else codec.width(self.width)
        if keep:
            return like.new_empty((num_rows, width), dtype=dtype)
        return self.plan.group.pool.take((num_rows, width), dtype, like.device, most)


class GradientMessages:
    """Gradients of halo rows on their way to the owners of the rows.

    Args:
        width, dtype: of a row.
        combine: adds rows that come home to the owned ones.
        codec: of what is sent.
    """

    def __init__(
        self,
        plan: HaloPlan,
        width: int,
        dtype: torch.dtype,
        combine: Combine,
        codec: Codec | None = None,
    ) -> None:
        self.plan, self.width, self.dtype = plan, width, dtype
        self.combine, self.codec = combine, codec

    def rows(self, step: Round) -> Tensor:
        """[step.num_recv, width] uninitialised, from the pool."""
        return self._take(step.num_recv, None, step.most)

    def sent(self, step: Round, grads: Tensor) -> Message:
        """What this rank sends of ``grads`` [step.num_recv, width], which are given up."""
        if self.codec is not None:
            rows, grads = grads, self._take(step.num_recv, self.codec, step.most)
            self.codec.encode_all(rows, grads)
            self.plan.group.pool.give(rows)
        return grads, step.recv_counts

    def received(self, step: Round) -> Message:
        """Room for what it gets."""
        return self._take(step.num_send, self.codec, step.most), step.send_counts

    def add(self, step: Round, recv: Tensor, home: Tensor) -> None:
        """Add what it got, which goes back to the pool, to ``home`` [num_rows, width]."""
        landed = self._decoded(recv, step.most)
        self.plan.scatter_round(step, home, landed, self.combine)
        self.plan.group.pool.give(landed)

    @property
    def row_bytes(self) -> int:
        """Of a row on the wire."""
        return _row_bytes(self.width, self.dtype, self.codec)

    def _decoded(self, recv: Tensor, most: int) -> Tensor:
        if self.codec is None:
            return recv
        rows = self._take(len(recv), None, most)
        self.codec.decode_all(recv, rows)
        self.plan.group.pool.give(recv)
        return rows

    def _take(self, num_rows: int, codec: Codec | None, most: int) -> Tensor:
        pool, device = self.plan.group.pool, self.plan.device
        dtype = self.dtype if codec is None else codec.dtype
        width = self.width if codec is None else codec.width(self.width)
        return pool.take((num_rows, width), dtype, device, most)


def _row_bytes(width: int, dtype: torch.dtype, codec: Codec | None) -> int:
    if codec is None:
        return width * dtype.itemsize
    return codec.width(width) * codec.dtype.itemsize
