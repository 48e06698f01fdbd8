"""Layers of one's own in plain torch, which get rows of other ranks by three calls.

    torchrun --nproc-per-node 4 examples/own_layers.py parts/synthetic.json

`sar.halo` brings all rows that edges start in, `sar.sum_rounds` calls a function for some of them
at a time, `sar.fetch` brings rows of any nodes. Gradients go back to the ranks that own the rows.
"""

import sys

import torch
import torch.nn.functional as F

import sar


class Attention(torch.nn.Module):
    """Means of W h_u over u -> v, weighted by a softmax; the whole halo is in memory."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.project, self.score = torch.nn.Linear(inputs, outputs), torch.nn.Linear(2 * outputs, 1)

    def forward(self, graph, edges, x):
        h = self.project(x)
        rows, (src, dst) = torch.cat([h, sar.halo(graph, h)]), edges
        weight = torch.tanh(self.score(torch.cat([rows[src], h[dst]], dim=1))).exp()
        total = h.new_zeros(len(h), 1).index_add(0, dst, weight)
        return torch.zeros_like(h).index_add(0, dst, weight * rows[src]) / total.clamp(min=1e-9)


class GatedSum(torch.nn.Module):
    """Means of h_u * sigmoid(a . [h_u, h_v]) over u -> v; two rounds are in memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(2 * width, 1)

    def part(self, rows, src, dst, positions, x):
        gates = torch.sigmoid(self.gate(torch.cat([rows[src], x[dst]], dim=1)))
        return torch.zeros_like(x).index_add(0, dst, gates * rows[src])

    def forward(self, graph, x):
        sums = sar.sum_rounds(graph, self.part, x, x)
        return sums / graph.in_degrees().clamp(min=1).unsqueeze(1)


class Net(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.attention, self.gated = Attention(inputs, hidden), GatedSum(hidden)
        self.own, self.above = torch.nn.Linear(hidden, classes), torch.nn.Linear(hidden, classes)

    def forward(self, graph, edges, parent, x):
        h = F.relu(self.attention(graph, edges, x))
        h = h + self.gated(graph, h)
        return self.own(h) + self.above(sar.fetch(graph, h, parent))


def main(parts: str, epochs: int = 10) -> None:
    group = sar.initialize_comms()
    sar.manual_seed(0)
    data = sar.load_partition_data(parts)
    graph, columns = sar.construct_full_graph(data), data.node_features
    x, y, train = columns["_N/feat"], columns["_N/label"], columns["_N/train_mask"].bool()
    classes = int(group.all_reduce(y.max(), "max")) + 1
    edges = sar.local_edges(graph)  # once: it does not change
    ids, _ = graph.node_names("_N")
    parent = (ids - 1).clamp(min=0) // 2  # in a tree of all nodes, of whichever rank
    model = Net(x.shape[1], 32, classes)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        loss = sar.cross_entropy(model(graph, edges, parent, x), y, train)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
