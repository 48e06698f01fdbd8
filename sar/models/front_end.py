"""The library's own front end as :mod:`sar.registry` offers it: no other library is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sar.errors import NotSupportedError
from sar.models.blocks import block_maker
from sar.models.calling import arguments
from sar.models.convs import LAYERS

__all__ = ["BLOCKS", "LAYERS", "arguments", "batch_maker", "install", "read_batch"]
BLOCKS = "sar's blocks"


def install() -> None:
    """Nothing: the library's own layers take sharded graphs as they are."""


def batch_maker(subgraph_type: str) -> Callable[[Any], Any]:
    """See :class:`sar.registry.FrontEnd`."""
    if subgraph_type != "directional":
        expected = "'directional', or as_='tensors', 'pyg' or 'dgl'"
        raise NotSupportedError(f"subgraph_type: got {subgraph_type!r}, expected {expected}")
    return block_maker()


def read_batch(batch: Any, input_type: str, name: str, device: Any) -> tuple[Any, Any, Tensor]:
    """See :class:`sar.registry.FrontEnd`."""
    blocks = [block.to(device) for block in batch]
    found = blocks[0].src_data
    features = {ntype: columns[name] for ntype, columns in found.items() if name in columns}
    return blocks, features, blocks[-1].dst_data[input_type]["input_id"]
