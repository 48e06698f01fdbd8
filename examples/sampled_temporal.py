"""Mini-batches in which nothing is later than the seed: nodes came in the order of `time`.

Nodes without a `time` get one here; ogbn-arxiv has the year of each paper:
sar partition ogbn-arxiv --parts 4 --out parts
torchrun --nproc-per-node 4 examples/sampled_temporal.py parts/ogbn-arxiv.json --time node_year
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import sar
from sar.sampling import NeighborLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--time", default="time", help="the feature of nodes that says when")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(args.parts, group.rank, "cpu")
    features, labels = data.node_features["_N/feat"], data.node_features["_N/label"]
    if f"_N/{args.time}" not in data.node_features:
        data.node_features[f"_N/{args.time}"] = data.node_features["_N/orig_id"].long() % 10
    train = data.node_features["_N/train_mask"].bool()
    classes = int(group.all_reduce(labels.max(), "max")) + 1

    torch.manual_seed(0)
    model = GraphSAGE(features.shape[1], 64, 2, classes)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with NeighborLoader(
        data, [10, 5], train, batch_size=64, shuffle=True, as_="pyg",
        time_attr=args.time, temporal_strategy="last",
    ) as loader:  # fmt: skip
        for epoch in range(args.epochs):
            for batch in loader:
                # batch.batch is the tree of each node, batch.seed_time the time of each tree's seed
                logits = model(batch.x, batch.edge_index)[: batch.batch_size]
                losses = F.cross_entropy(logits, batch.y[: batch.batch_size], reduction="none")
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
