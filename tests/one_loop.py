"""A script of a user's: alone, under torchrun, or on ranks that it launches itself.

Prints rank 0's losses, as JSON. ``one_loop.py PARTS [RANKS]``
"""

import json
import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class Model(torch.nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(inputs, 16, "mean", feat_drop=0.2)
        self.norm = torch.nn.BatchNorm1d(16)
        self.last = dgl.nn.SAGEConv(16, classes, "mean")

    def forward(self, graph, x):
        return self.last(graph, F.relu(self.norm(self.first(graph, x))))


def main(parts: str) -> list[float]:
    sar.initialize_comms()
    sar.manual_seed(0)
    data = sar.load_partition_data(parts)
    graph = sar.construct_full_graph(data)
    x, y = data.node_features["_N/feat"], data.node_features["_N/label"]
    mask = data.node_features["_N/train_mask"]
    model = sar.prepare(Model(x.shape[1], 4), graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = sar.global_mean(F.cross_entropy(model(graph, x), y, reduction="none"), mask)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        sar.check(model, optimizer, every=2)
        losses.append(loss.item())
    if sar.rank() == 0:
        print("losses", json.dumps(losses))
    sar.shutdown()
    return losses


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print("launched", json.dumps(sar.launch(main, int(sys.argv[2]), (sys.argv[1],))))
    else:
        main(sys.argv[1])
