"""A model of PyG's, unmodified: mini-batches under DistributedDataParallel, then exact full batch.

On ogbn-products: sar partition ogbn-products --parts 4 --out parts
torchrun --nproc-per-node 4 examples/sampled_pyg.py parts/ogbn-products.json --batch-size 1024
"""

import argparse

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import sar
import sar.pyg
from sar.sampling import NeighborLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--epochs", type=int, default=15, help="sampled ones")
    parser.add_argument("--exact", type=int, default=5, help="full-batch ones after them")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    group = sar.initialize_comms()
    part = sar.load_partition_data(args.parts)
    data = sar.pyg.construct_full_graph(part)
    classes = int(group.all_reduce(data.y.max(), "max")) + 1

    torch.manual_seed(0)
    model = DistributedDataParallel(GraphSAGE(data.num_features, 64, 2, classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(loss):
        optimizer.zero_grad()
        (loss * group.size).backward()  # DistributedDataParallel divides by it
        optimizer.step()

    def report(epoch, loss):
        with torch.no_grad():  # on the whole graph, so the accuracy is exact
            right = (model(data.x, data.edge_index).argmax(1) == data.y).float()
        accuracy = sar.global_mean(right, data.test_mask)
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} test accuracy {accuracy:.3f}")

    options = {"batch_size": args.batch_size, "shuffle": True, "as_": "pyg"}
    with NeighborLoader(part, [10, 10], data.train_mask, **options) as loader:
        for epoch in range(args.epochs):
            for batch in loader:
                logits = model(batch.x, batch.edge_index)[: batch.batch_size]
                seeds = batch.y[: batch.batch_size]
                loss = sar.global_mean(F.cross_entropy(logits, seeds, reduction="none"))
                step(loss)
            report(epoch, loss)
    for epoch in range(args.epochs, args.epochs + args.exact):
        loss = sar.cross_entropy(model(data.x, data.edge_index), data.y, data.train_mask)
        step(loss)
        report(epoch, loss)
    sar.shutdown()


if __name__ == "__main__":
    main()
