"""Batch norm over the nodes of all ranks, for a model that was written with nn.BatchNorm1d.

torchrun --nproc-per-node 4 examples/batch_norm.py parts/synthetic.json
"""

import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class GCN(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.GraphConv(inputs, hidden, allow_zero_in_degree=True)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.second = dgl.nn.GraphConv(hidden, classes, allow_zero_in_degree=True)

    def forward(self, graph, x):
        return self.second(graph, F.relu(self.norm(self.first(graph, x))))


def main(parts: str, epochs: int = 10) -> None:
    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    features, labels = graph.ndata["feat"], graph.ndata["label"]
    train = graph.ndata["train_mask"].bool()

    # The parameters stay the same objects, so converting before or after making an optimizer works.
    model = sar.nn.convert_batch_norm(GCN(features.shape[1], 32, 16))
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        logits = model(graph, features)
        loss = sar.global_mean(F.cross_entropy(logits, labels, reduction="none"), train)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            mean = model.norm.running_mean.mean()
            print(f"epoch {epoch} loss {loss:.4f} running mean {mean:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
