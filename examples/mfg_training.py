"""Message flow graphs: when few nodes have labels, compute only what leads to them.

torchrun --nproc-per-node 4 examples/mfg_training.py parts/synthetic.json
"""

import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class GraphSAGE(torch.nn.Module):
    """Takes one block per layer, as a model for DGL's samplers does."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            dgl.nn.SAGEConv(a, b, "mean") for a, b in zip(widths[:-1], widths[1:])
        )

    def forward(self, blocks, x):
        for layer, block in zip(self.layers[:-1], blocks[:-1]):
            x = F.relu(layer(block, x))
        return self.layers[-1](blocks[-1], x)


def main(parts: str, epochs: int = 10) -> None:
    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    first_nid = data.node_ranges[group.rank][0]
    features, labels = data.node_features["_N/feat"], data.node_features["_N/label"]
    # One training node in five, as global ids. A rank may have none.
    seeds = data.node_features["_N/train_mask"].nonzero().flatten()[::5] + first_nid

    blocks = sar.construct_mfgs(data, seeds, 2)
    inputs = features[blocks[0].input_nodes]  # rows that the first layer reads
    outputs = labels[seeds - first_nid]  # the last layer returns the seeds, ascending
    model = GraphSAGE([features.shape[1], 32, 16])
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        loss = sar.global_mean(F.cross_entropy(model(blocks, inputs), outputs, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
