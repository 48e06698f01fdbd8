"""GAT (Velickovic et al. 2018) of PyG's layers with norms; no tensor has a row for each edge.

torchrun --nproc-per-node 4 examples/pyg_gat.py parts/synthetic.json [--norm graph]

A layer norm normalizes each row by itself. A graph norm takes statistics of all nodes, which
`sar.prepare` makes those of all ranks.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv, GraphNorm, LayerNorm

import sar
import sar.pyg


class GAT(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int, norm: str, heads: int = 4) -> None:
        super().__init__()
        width = hidden * heads
        self.first = GATConv(inputs, hidden, heads, dropout=0.2)
        self.norm = GraphNorm(width) if norm == "graph" else LayerNorm(width, mode="node")
        self.dropout = torch.nn.Dropout(0.2)
        self.second = GATConv(width, classes, dropout=0.2)

    def forward(self, x, edge_index):
        x = self.dropout(F.elu(self.norm(self.first(x, edge_index))))
        return self.second(x, edge_index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--norm", choices=["layer", "graph"], default="layer")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    group = sar.initialize_comms()
    sar.manual_seed(0)
    data = sar.pyg.construct_full_graph(sar.load_partition_data(args.parts))
    classes = int(group.all_reduce(data.y.max(), "max")) + 1

    model = GAT(data.num_features, 8, classes, args.norm)
    sar.prepare(model, data)  # the same masks of dropout on any cut, norms of all ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(args.epochs):
        model.train()
        loss = sar.cross_entropy(model(data.x, data.edge_index), data.y, data.train_mask)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(data.x, data.edge_index).argmax(1) == data.y).float()
        accuracy = sar.global_mean(right, data.test_mask)
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} test accuracy {accuracy:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main()
