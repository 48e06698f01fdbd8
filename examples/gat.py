"""Graph attention (Velickovic et al. 2018) with DGL's own layer; no tensor has a row per edge.

torchrun --nproc-per-node 4 examples/gat.py parts/synthetic.json
"""

import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class GAT(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int, heads: int = 4) -> None:
        super().__init__()
        drops = {"feat_drop": 0.2, "attn_drop": 0.2}
        self.first = dgl.nn.GATConv(inputs, hidden, heads, activation=F.elu, **drops)
        self.second = dgl.nn.GATConv(hidden * heads, classes, 1, **drops)

    def forward(self, graph, x):
        return self.second(graph, self.first(graph, x).flatten(1)).mean(1)


def main(parts: str, epochs: int = 10) -> None:
    group = sar.initialize_comms()
    sar.manual_seed(0)
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data).add_self_loop()  # GATConv refuses nodes without edges
    features, labels = graph.ndata["feat"], graph.ndata["label"]
    masks = {name: graph.ndata[f"{name}_mask"].bool() for name in ("train", "test")}

    model = sar.convert_dropout(GAT(features.shape[1], 8, 16))  # the same masks on any cut
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        model.train()
        losses = F.cross_entropy(model(graph, features), labels, reduction="none")
        loss = sar.global_mean(losses, masks["train"])
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(graph, features).argmax(1) == labels).float()
        accuracy = sar.global_mean(right, masks["test"])
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} test accuracy {accuracy:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
