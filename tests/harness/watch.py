"""Watching what is allocated, on a graph where a tensor of all edges would stand out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.write import write_partitions


class Largest(TorchDispatchMode):
    """The most elements that any torch operation gave out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(out):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self.elements = max(self.elements, value.numel())
        return out


def dense_graph(nodes: int, edges: int, folder: Path) -> Any:
    """One part with every node on the receiving side."""
    import sar

    generator = torch.Generator().manual_seed(0)
    src = torch.randint(nodes, (edges,), generator=generator)
    others = torch.randint(nodes, (edges - nodes,), generator=generator)
    dst = torch.cat([torch.arange(nodes), others])
    arrays = GraphArrays("dense", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: (src, dst)})
    parts = torch.zeros(nodes, dtype=torch.int64)
    data = sar.load_dgl_partition_data(write_partitions(arrays, parts, folder / "parts"), 0, "cpu")
    return sar.construct_full_graph(data, sar.Policy(block_bytes=1 << 16))
