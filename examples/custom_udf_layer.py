"""A layer of one's own whose messages are a Python function with learned parameters.

    torchrun --nproc-per-node 4 examples/custom_udf_layer.py parts/synthetic.json

The message function sees a block of edges at a time and runs again in backward; the parameters it
uses are found, not declared.
"""

import sys

import dgl.function as fn
import torch
import torch.nn.functional as F

import sar


class GatedConv(torch.nn.Module):
    """out_v = mean over u -> v of W h_u * sigmoid(a . [h_u, h_v])"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.project = torch.nn.Linear(inputs, outputs)
        self.gate = torch.nn.Linear(2 * inputs, 1)

    def message(self, edges):
        both = torch.cat([edges.src["h"], edges.dst["h"]], dim=1)
        return {"m": self.project(edges.src["h"]) * torch.sigmoid(self.gate(both))}

    def forward(self, graph, x):
        with graph.local_scope():
            graph.srcdata["h"] = x
            graph.dstdata["h"] = x[: graph.num_dst_nodes()]
            graph.update_all(self.message, fn.mean("m", "out"))
            return graph.dstdata["out"]


def main(parts: str, epochs: int = 10) -> None:
    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    features, labels = graph.ndata["feat"], graph.ndata["label"]
    train = graph.ndata["train_mask"].bool()

    first, second = GatedConv(features.shape[1], 32), GatedConv(32, 16)
    model = torch.nn.ModuleList([first, second])
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        logits = second(graph, F.relu(first(graph, features)))
        loss = sar.global_mean(F.cross_entropy(logits, labels, reduction="none"), train)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
