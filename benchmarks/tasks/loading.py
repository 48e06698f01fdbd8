"""Loads one partition and watches the memory that takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks import measure


class Loading:
    """A process that has imported the library and not loaded anything yet."""

    def __init__(self, rank: int, size: int, port: int, parts: str) -> None:
        import sar  # noqa: F401  the memory is counted above the imported process
        from sar.partition.load import load_partition

        self.load, self.parts = load_partition, parts

    def run(self, part_id: int) -> dict[str, int]:
        """Bytes: the peak while loading, what stays, and the structure's tensors."""
        measure.settle()
        before = measure.anonymous_bytes()
        with measure.PeakMemory() as watch:
            data = self.load(self.parts, part_id)
        measure.settle()
        return {
            # not `best`: files are mapped and unmapped on the way
            "peak": watch.peak.sampled - before,
            "stays": measure.anonymous_bytes() - before,
            "structure": sum(_tensor_bytes(shard) for shard in data.edges.values()),
        }


def _tensor_bytes(shard: Any) -> int:
    return sum(value.nbytes for value in vars(shard).values() if isinstance(value, Tensor))
