"""A relational GAT on papers, authors and terms, as GraphLearn trains it on IGBH: fanouts for
several relations, layers trimmed to what a hop brought, and validation inside of an epoch."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GATConv, HeteroConv
from torch_geometric.utils import trim_to_layer

import sar
from sar.sampling import NeighborLoader


class RelationalGAT(nn.Module):
    def __init__(self, etypes, features, width, classes, layers=2, heads=2):
        super().__init__()
        sizes = [features, *[width] * layers]
        self.convs = nn.ModuleList(
            HeteroConv({e: GATConv(inputs, width // heads, heads, add_self_loops=False)
                        for e in etypes})
            for inputs in sizes[:-1]
        )  # fmt: skip
        self.last = nn.Linear(width, classes)

    def forward(self, batch):
        x, edges = batch.x_dict, batch.edge_index_dict
        hops = batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict
        for number, conv in enumerate(self.convs):
            x, edges, _ = trim_to_layer(number, *hops, x, edges)
            x = {ntype: F.leaky_relu(rows) for ntype, rows in conv(x, edges).items()}
        return self.last(x["paper"])[: batch["paper"].batch_size]


@torch.no_grad()
def evaluate(model, loader, group):
    model.eval()
    hits = torch.zeros(2)
    for batch in loader:
        found = model(batch).argmax(-1) == batch["paper"].y[: batch["paper"].batch_size]
        hits += torch.tensor([int(found.sum()), len(found)])
    model.train()
    right, count = group.all_reduce(hits).tolist()
    return right / count


def main():
    root = Path(sys.argv[1]) / "glt_igbh"
    group = sar.initialize_comms()
    data = sar.load_partition_data(root / "partitions", group.rank)
    labels = torch.load(root / "label.pt")
    data.node_features["paper/label"] = labels[data.node_features["paper/orig_id"]]
    train_idx, val_idx = (torch.load(root / f"{n}_idx{group.rank}.pt") for n in ("train", "val"))

    options = {"original_ids": True, "as_": "pyg", "seed": 42, "shuffle": True}
    train_loader = NeighborLoader(data, [5, 5], ("paper", train_idx), batch_size=16, **options)
    val_loader = NeighborLoader(data, [5, 5], ("paper", val_idx), batch_size=64, **options)

    torch.manual_seed(42)
    width = data.node_features["paper/feat"].shape[1]
    model = RelationalGAT(data.book.canonical_etypes, width, 32, int(labels.max()) + 1)
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best = 0.0
    for epoch in range(4):
        total = torch.zeros(2, dtype=torch.float64)
        for step, batch in enumerate(train_loader):
            optimizer.zero_grad()
            seeds = batch["paper"].y[: batch["paper"].batch_size]
            values = F.cross_entropy(model(batch), seeds, reduction="none")
            (sar.global_mean(values) * group.size).backward()
            optimizer.step()
            total += torch.tensor([float(values.sum()), len(values)])
            if (epoch, step) == (2, 2):  # in the middle of an epoch
                best = evaluate(model.module, val_loader, group)
        total = group.all_reduce(total)
        print(f"epoch {epoch} loss {total[0] / total[1]:.4f}", flush=True)
    best = max(best, evaluate(model.module, val_loader, group))
    print(f"accuracy {best:.4f}", flush=True)
    train_loader.close()
    val_loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
