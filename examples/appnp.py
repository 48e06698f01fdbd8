"""APPNP (Gasteiger et al. 2019): a perceptron, then personalized PageRank over its predictions.

    torchrun --nproc-per-node 4 examples/appnp.py parts/synthetic.json

The ten steps of propagation move rows as wide as the number of classes, and keep none for backward.
"""

import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class APPNP(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.predict = torch.nn.Sequential(
            torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes)
        )
        self.propagate = dgl.nn.APPNPConv(k=10, alpha=0.1)

    def forward(self, graph, x):
        return self.propagate(graph, self.predict(x))


def main(parts: str, epochs: int = 20) -> None:
    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data).add_self_loop()
    features, labels = graph.ndata["feat"], graph.ndata["label"]
    masks = {name: graph.ndata[f"{name}_mask"].bool() for name in ("train", "test")}

    model = APPNP(features.shape[1], 64, 16)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        logits = model(graph, features)
        loss = sar.global_mean(F.cross_entropy(logits, labels, reduction="none"), masks["train"])
        accuracy = sar.global_mean((logits.argmax(1) == labels).float(), masks["test"])
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} test accuracy {accuracy:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
