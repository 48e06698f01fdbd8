"""Nodes are classified by GraphSAGE, as `torch_geometric.distributed` does it on ogbn-products
and, with a model for several types, on ogbn-mag."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE, to_hetero

import sar
from sar.sampling import NeighborLoader


def outputs_and_labels(model, batch):
    if isinstance(batch, HeteroData):
        store = batch["paper"]
        out = model(batch.x_dict, batch.edge_index_dict)["paper"]
    else:
        store, out = batch, model(batch.x, batch.edge_index)
    return out[: store.batch_size], store.y[: store.batch_size]


def train(model, loader, optimizer, group):
    model.train()
    total = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        optimizer.zero_grad()
        out, labels = outputs_and_labels(model, batch)
        values = F.cross_entropy(out, labels, reduction="none")
        (sar.global_mean(values) * group.size).backward()
        optimizer.step()
        total += torch.tensor([float(values.sum()), len(values)])
    total = group.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def test(model, loader, group):
    model.eval()
    hits = torch.zeros(2)
    for batch in loader:
        out, labels = outputs_and_labels(model.module, batch)
        hits += torch.tensor([int((out.argmax(-1) == labels).sum()), len(labels)])
    right, count = group.all_reduce(hits).tolist()
    return right / count


def main():
    root, is_hetero = Path(sys.argv[1]), "--hetero" in sys.argv
    root = root / ("pyg_mag" if is_hetero else "pyg_products")
    ntype = "paper" if is_hetero else "_N"
    group = sar.initialize_comms()
    data = sar.load_partition_data(root / "partitions", group.rank)
    labels = torch.load(root / "label.pt")
    data.node_features[f"{ntype}/label"] = labels[data.node_features[f"{ntype}/orig_id"]]
    seeds = [torch.load(root / f"{name}_idx{group.rank}.pt") for name in ("train", "test")]
    if is_hetero:
        seeds = [("paper", ids) for ids in seeds]

    options = {"original_ids": True, "as_": "pyg", "batch_size": 16}
    train_loader = NeighborLoader(data, [15, 10], seeds[0], shuffle=True, **options)
    test_loader = NeighborLoader(data, [15, 10], seeds[1], **options)

    torch.manual_seed(0)
    width = data.node_features[f"{ntype}/feat"].shape[1]
    model = GraphSAGE(width, 32, 2, int(labels.max()) + 1)
    if is_hetero:
        model = to_hetero(model, (data.book.ntypes, data.book.canonical_etypes))
    model = DistributedDataParallel(model, find_unused_parameters=is_hetero)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.distributed.barrier()
    for epoch in range(4):
        loss = train(model, train_loader, optimizer, group)
        print(f"epoch {epoch} loss {loss:.4f}", flush=True)
    print(f"accuracy {test(model, test_loader, group):.4f}", flush=True)
    train_loader.close()
    test_loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
