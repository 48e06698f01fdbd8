"""GraphSAGE with a training loop of one's own: the lines that differ from one machine are marked.

torchrun --nproc-per-node 4 examples/train_sage.py parts/synthetic.json
"""

import argparse

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class GraphSAGE(torch.nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            dgl.nn.SAGEConv(a, b, "mean") for a, b in zip(widths[:-1], widths[1:])
        )
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, graph, x):
        for layer in self.layers[:-1]:
            x = self.drop(F.relu(layer(graph, x)))
        return self.layers[-1](graph, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()

    group = sar.initialize_comms()  # sar: torchrun says who the ranks are; without it there is one
    sar.manual_seed(0)  # sar: also of dropout, whose masks are those of any other number of ranks
    data = sar.load_partition_data(args.parts)  # sar: this rank's part
    graph = sar.construct_full_graph(data)  # sar: in place of a DGL graph
    features, labels = graph.ndata["feat"], graph.ndata["label"]
    masks = {n: graph.ndata[f"{n}_mask"].bool() for n in ("train", "val", "test")}
    classes = int(group.all_reduce(labels.max(), "max")) + 1  # sar: over all ranks

    model = GraphSAGE([features.shape[1], args.hidden, classes])
    sar.prepare(model, graph)  # sar: equal parameters, batch norm and dropout of all ranks' nodes
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        model.train()
        losses = F.cross_entropy(model(graph, features), labels, reduction="none")
        loss = sar.global_mean(losses, masks["train"])  # sar: over all ranks' nodes
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)  # sar: sum over ranks
        optimizer.step()
        sar.check(model, optimizer, every=50)  # sar: whether the ranks still agree

        model.eval()
        with torch.no_grad():
            right = (model(graph, features).argmax(1) == labels).float()
        scores = [f"{name} {sar.global_mean(right, masks[name]):.3f}" for name in masks]
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} accuracy {' '.join(scores)}")
    sar.shutdown()


if __name__ == "__main__":
    main()
