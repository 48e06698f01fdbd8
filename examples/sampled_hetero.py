"""Mini-batches of several node types for a heterogeneous model of PyG's.

On ogbn-mag: sar partition ogbn-mag --parts 4 --out parts
torchrun --nproc-per-node 4 examples/sampled_hetero.py parts/ogbn-mag.json --batch-size 1024
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import HeteroConv, SAGEConv

import sar
from sar.sampling import NeighborLoader


class Model(torch.nn.Module):
    """A SAGEConv for each relation; node types without features share a learned row."""

    def __init__(self, data, features: int, classes: int, width: int = 32) -> None:
        super().__init__()
        others = [ntype for ntype in data.book.ntypes if ntype != "paper"]
        self.rows = torch.nn.ParameterDict({n: torch.randn(1, width) for n in others})
        self.papers = torch.nn.Linear(features, width)
        etypes = data.book.canonical_etypes
        self.convs = torch.nn.ModuleList(
            HeteroConv({e: SAGEConv((width, width), width) for e in etypes}) for _ in range(2)
        )
        self.last = torch.nn.Linear(width, classes)

    def forward(self, batch):
        x = {n: row.expand(batch[n].num_nodes, -1) for n, row in self.rows.items()}
        x["paper"] = self.papers(batch["paper"].x)
        for conv in self.convs:
            x = {ntype: F.relu(h) for ntype, h in conv(x, batch.edge_index_dict).items()}
        return self.last(x["paper"])[: batch["paper"].batch_size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(args.parts, group.rank, "cpu")
    labels, train = (data.node_features[f"paper/{n}"] for n in ("label", "train_mask"))
    classes = int(group.all_reduce(labels.max(), "max")) + 1
    torch.manual_seed(0)
    model = Model(data, data.node_features["paper/feat"].shape[1], classes)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"batch_size": args.batch_size, "shuffle": True, "as_": "pyg"}
    with NeighborLoader(data, [5, 5], ("paper", train.bool()), **options) as loader:
        for epoch in range(args.epochs):
            for batch in loader:
                seeds = batch["paper"].y[: batch["paper"].batch_size]
                losses = F.cross_entropy(model(batch), seeds, reduction="none")
                loss = sar.global_mean(losses)
                optimizer.zero_grad()
                loss.backward()
                sar.gather_grads(model)
                optimizer.step()
            if group.rank == 0:
                print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main()
