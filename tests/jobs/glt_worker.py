"""GraphSAGE in the worker mode of GraphLearn, as it trains on ogbn-products."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import sar
from sar.sampling import NeighborLoader


def turned(batch):
    """Messages go from the nodes that were drawn to those that drew them."""
    batch.edge_index = batch.edge_index.flip(0)
    return batch


@torch.no_grad()
def test(model, loader, group):
    model.eval()
    hits = torch.zeros(2)
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        found = out.argmax(-1) == batch.y[: batch.batch_size]
        hits += torch.tensor([int(found.sum()), len(found)])
    right, count = group.all_reduce(hits).tolist()
    return right / count


def main():
    root = Path(sys.argv[1]) / "glt_products"
    group = sar.initialize_comms()
    data = sar.load_partition_data(root / "partitions", group.rank)
    labels = torch.load(root / "label.pt")
    data.node_features["_N/label"] = labels[data.node_features["_N/orig_id"]]
    train_idx = torch.load(root / f"train_idx{group.rank}.pt")
    test_idx = torch.load(root / f"test_idx{group.rank}.pt")

    options = {"original_ids": True, "as_": "pyg", "batch_size": 16}
    options |= {"direction": "out", "transform": turned}  # as its loaders do by default
    train_loader = NeighborLoader(data, [15, 10], train_idx, shuffle=True, **options)
    test_loader = NeighborLoader(data, [15, 10], test_idx, **options)

    torch.manual_seed(0)
    width = data.node_features["_N/feat"].shape[1]
    model = DistributedDataParallel(GraphSAGE(width, 32, 2, int(labels.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size].log_softmax(dim=-1)
            values = F.nll_loss(out, batch.y[: batch.batch_size], reduction="none")
            loss = sar.global_mean(values)
            (loss * group.size).backward()
            optimizer.step()
        torch.distributed.barrier()
        print(f"epoch {epoch} loss {loss:.4f}", flush=True)
    print(f"accuracy {test(model.module, test_loader, group):.4f}", flush=True)
    train_loader.close()
    test_loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
