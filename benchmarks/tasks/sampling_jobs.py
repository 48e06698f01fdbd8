"""Ranks that go through a loader for ever, with partitions or beside servers, to be hurt."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Be a rank; it writes a file once it goes through its loader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", help="PARTS.json, or HOST:PORT of two servers")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=float, required=True)
    args = parser.parse_args()

    import sar
    from sar.sampling import NeighborLoader, connect

    rank, options = os.environ["RANK"], {"batch_size": 8, "as_": "tensors"}

    def transform(batch: Any) -> Any:
        (args.folder / f"goes-{rank}").touch()
        if (args.folder / f"raise-{rank}").exists():
            raise KeyError("a transform that raises")
        return batch

    def met() -> None:
        (args.folder / f"met-{rank}").touch()

    if args.place.endswith(".json"):
        group = sar.initialize_comms(timeout=args.timeout)
        met()
        data = sar.load_dgl_partition_data(args.place, group.rank, "cpu")
        loader: Any = NeighborLoader(data, [4, 4], transform=transform, **options)
    else:
        servers = connect(args.place, 2, timeout=args.timeout)
        met()
        group, given = servers.group, {"transform": transform, **options}
        loader = servers.NeighborLoader([4, 4], servers.nodes(), **given)
    model = torch.nn.Linear(8, 3)
    sar.sync_params(model)
    while True:
        for batch in loader:
            rows = batch.node_data["_N"]["feat"][: batch.batch_size]
            model.zero_grad()
            sar.global_mean(model(rows).square()).backward()
            sar.gather_grads(model)


if __name__ == "__main__":
    main()
