"""GraphSAGE on mini-batches of DGL's blocks, evaluated exactly on the whole graph.

On ogbn-products: sar partition ogbn-products --parts 4 --out parts
torchrun --nproc-per-node 4 examples/sampled_sage.py parts/ogbn-products.json --batch-size 1024
"""

import argparse

import dgl.nn
import torch
import torch.nn.functional as F

import sar
from sar.sampling import NeighborLoader


class GraphSAGE(torch.nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            dgl.nn.SAGEConv(a, b, "mean") for a, b in zip(widths[:-1], widths[1:])
        )

    def forward(self, graphs, x):
        """``graphs``: a block for each layer, or the whole graph for each."""
        for number, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            x = layer(graph, x if number == 0 else F.relu(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(args.parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    features, labels = data.node_features["_N/feat"], data.node_features["_N/label"]
    masks = {n: data.node_features[f"_N/{n}_mask"].bool() for n in ("train", "val", "test")}
    classes = int(group.all_reduce(labels.max(), "max")) + 1

    torch.manual_seed(0)
    model = GraphSAGE([features.shape[1], 64, classes])
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"batch_size": args.batch_size, "shuffle": True, "as_": "dgl"}
    with NeighborLoader(data, [10, 10], masks["train"], **options) as loader:
        for epoch in range(args.epochs):
            for _, _, blocks in loader:
                logits = model(blocks, blocks[0].srcdata["feat"])
                losses = F.cross_entropy(logits, blocks[-1].dstdata["label"], reduction="none")
                loss = sar.global_mean(losses)  # over the seeds of all ranks
                optimizer.zero_grad()
                loss.backward()
                sar.gather_grads(model)
                optimizer.step()
            with torch.no_grad():
                right = (model([graph, graph], features).argmax(1) == labels).float()
            scores = [f"{name} {sar.global_mean(right, masks[name]):.3f}" for name in masks]
            if group.rank == 0:
                print(f"epoch {epoch} loss {loss:.4f} accuracy {' '.join(scores)}")
    sar.shutdown()


if __name__ == "__main__":
    main()
