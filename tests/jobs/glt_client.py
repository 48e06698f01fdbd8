"""GraphSAGE as a client of GraphLearn's servers: a job on ogbn-products with batches that
servers make, on ranks that hold no partition."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import sar
from sar.sampling import connect


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
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    for name in ("address", "features", "classes"):
        parser.add_argument(f"--{name}", type=str if name == "address" else int)
    args = parser.parse_args()
    root = args.root / "glt_products"
    with connect(args.address, 2) as servers:
        group = servers.group
        options = {"as_": "pyg", "batch_size": 16}
        # A client takes seeds from the files of all parts, or from the servers' masks.
        train_idx = torch.load(root / f"train_idx{group.rank}.pt")
        test_idx = servers.nodes(mask="test_mask")
        train_loader = servers.NeighborLoader([15, 10], train_idx, shuffle=True, **options)
        test_loader = servers.NeighborLoader([15, 10], test_idx, **options)

        torch.manual_seed(0)
        model = GraphSAGE(args.features, 32, 2, args.classes)
        model = DistributedDataParallel(model, process_group=group.torch_group())
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
            print(f"epoch {epoch} loss {loss:.4f}", flush=True)
        print(f"accuracy {test(model.module, test_loader, group):.4f}", flush=True)
        train_loader.close()
        test_loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
