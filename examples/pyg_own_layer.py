"""A MessagePassing of one's own, with learned messages, on the whole graph.

    torchrun --nproc-per-node 4 examples/pyg_own_layer.py parts/synthetic.json

`message` is called once, on tensors that record it. The ranks then compute it for some edges at a
time, and again in backward; no tensor has a row for each edge.
"""

import sys

import torch
import torch.nn.functional as F
from torch_geometric.nn import MessagePassing

import sar
import sar.pyg


class GatedConv(MessagePassing):
    """out_v = mean over u -> v of W h_u * sigmoid(a . [h_u, h_v])"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="mean")
        self.project = torch.nn.Linear(inputs, outputs)
        self.gate = torch.nn.Linear(2 * inputs, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.project(x_j) * torch.sigmoid(self.gate(torch.cat([x_j, x_i], dim=1)))


class Net(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GatedConv(inputs, hidden), GatedConv(hidden, classes)

    def forward(self, x, edge_index):
        return self.second(F.relu(self.first(x, edge_index)), edge_index)


def main(parts: str, epochs: int = 10) -> None:
    group = sar.initialize_comms()
    sar.manual_seed(0)
    data = sar.pyg.construct_full_graph(sar.load_partition_data(parts))
    classes = int(group.all_reduce(data.y.max(), "max")) + 1
    model = sar.prepare(Net(data.num_features, 32, classes), data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        loss = sar.cross_entropy(model(data.x, data.edge_index), data.y, data.train_mask)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
