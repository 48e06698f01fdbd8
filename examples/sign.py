"""SIGN (Frasca et al. 2020): neighborhoods are averaged once, before training.

    torchrun --nproc-per-node 4 examples/sign.py parts/synthetic.json

After that every node is a row of its own: training exchanges nothing but gradients of parameters.
"""

import sys

import torch
import torch.nn.functional as F

import sar


class SIGN(torch.nn.Module):
    """One projection for each number of hops, and a classifier on all of them."""

    def __init__(self, inputs: int, hidden: int, classes: int, hops: int) -> None:
        super().__init__()
        self.projections = torch.nn.ModuleList(
            torch.nn.Linear(inputs, hidden) for _ in range(hops + 1)
        )
        self.classify = torch.nn.Linear(hidden * (hops + 1), classes)

    def forward(self, hops):
        parts = [project(x) for project, x in zip(self.projections, hops)]
        return self.classify(F.relu(torch.cat(parts, dim=1)))


def main(parts: str, epochs: int = 20, num_hops: int = 3) -> None:
    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    features, labels = graph.ndata["feat"], graph.ndata["label"]
    masks = {name: graph.ndata[f"{name}_mask"].bool() for name in ("train", "test")}

    hops = [features]
    for _ in range(num_hops):
        hops.append(graph.aggregate(hops[-1], "mean"))

    model = SIGN(features.shape[1], 32, 16, num_hops)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        logits = model(hops)
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
