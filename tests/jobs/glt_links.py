"""GraphSAGE that learns from edges alone, as GraphLearn's unsupervised job does it: binary
negatives, weighted draws, and an area under the curve at the end."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import sar
from sar.sampling import LinkNeighborLoader


def scores(model, batch):
    h = model(batch.x, batch.edge_index)
    src, dst = batch.edge_label_index
    return (h[src] * h[dst]).sum(dim=-1)


def area_under_curve(found, labels):
    """The chance that a pair with an edge scores above one without."""
    right, wrong = found[labels > 0], found[labels == 0]
    above = (right[:, None] > wrong).double() + 0.5 * (right[:, None] == wrong)
    return float(above.mean())


def main():
    root = Path(sys.argv[1]) / "glt_products"
    group = sar.initialize_comms()
    data = sar.load_partition_data(root / "partitions", group.rank)
    made = {}
    for name in ("train", "test"):
        pairs = torch.load(root / f"{name}_edges{group.rank}.pt")
        made[name] = LinkNeighborLoader(
            data, [10, 5], pairs, neg_sampling="binary", original_ids=True, as_="pyg",
            weight_attr="weight", batch_size=64, shuffle=name == "train",
        )  # fmt: skip
    torch.manual_seed(0)
    model = GraphSAGE(data.node_features["_N/feat"].shape[1], 32, 2, 16)
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        model.train()
        total = torch.zeros(2, dtype=torch.float64)
        for batch in made["train"]:
            optimizer.zero_grad()
            found = scores(model, batch)
            values = F.binary_cross_entropy_with_logits(found, batch.edge_label, reduction="none")
            (sar.global_mean(values) * group.size).backward()
            optimizer.step()
            total += torch.tensor([float(values.sum()), len(values)])
        total = group.all_reduce(total)
        print(f"epoch {epoch} loss {total[0] / total[1]:.4f}", flush=True)
    with torch.no_grad():
        model.eval()
        pairs = [(scores(model.module, batch), batch.edge_label) for batch in made["test"]]
        found, labels = map(torch.cat, zip(*pairs))
    print(f"auc {area_under_curve(found, labels):.4f}", flush=True)
    for loader in made.values():
        loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
