"""A model of PyG's, unmodified, on mini-batches under DistributedDataParallel.

On ogbn-products: sar partition ogbn-products --parts 4 --out parts
torchrun --nproc-per-node 4 examples/sampled_pyg.py parts/ogbn-products.json --batch-size 1024
"""

import argparse

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import sar
from sar.sampling import NeighborLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(args.parts, group.rank, "cpu")
    features, labels = data.node_features["_N/feat"], data.node_features["_N/label"]
    train = data.node_features["_N/train_mask"].bool()
    classes = int(group.all_reduce(labels.max(), "max")) + 1

    torch.manual_seed(0)
    model = DistributedDataParallel(GraphSAGE(features.shape[1], 64, 2, classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"batch_size": args.batch_size, "shuffle": True, "as_": "pyg"}
    with NeighborLoader(data, [10, 10], train, **options) as loader:
        for epoch in range(args.epochs):
            right = torch.zeros(2)
            for batch in loader:
                logits = model(batch.x, batch.edge_index)[: batch.batch_size]
                seeds = batch.y[: batch.batch_size]
                losses = F.cross_entropy(logits, seeds, reduction="none")
                loss = sar.global_mean(losses)
                optimizer.zero_grad()
                (loss * group.size).backward()  # DistributedDataParallel divides by it
                optimizer.step()
                right += torch.tensor([(logits.argmax(1) == seeds).sum(), len(seeds)])
            hits, count = group.all_reduce(right).tolist()
            if group.rank == 0:
                print(f"epoch {epoch} loss {loss:.4f} train {hits / count:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main()
