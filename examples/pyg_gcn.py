"""GCN (Kipf and Welling 2017), an unmodified model of PyG's, on the whole graph.

The lines marked "sar:" differ from one machine.

torchrun --nproc-per-node 4 examples/pyg_gcn.py parts/synthetic.json
"""

import sys

import torch
from torch_geometric.nn import GCN

import sar
import sar.pyg


def main(parts: str, epochs: int = 20) -> None:
    group = sar.initialize_comms()  # sar: joins the other ranks
    sar.manual_seed(0)  # sar: in place of torch.manual_seed
    data = sar.pyg.construct_full_graph(sar.load_partition_data(parts))  # sar: this rank's part
    classes = int(group.all_reduce(data.y.max(), "max")) + 1  # sar: over all ranks

    model = GCN(data.num_features, 32, num_layers=2, out_channels=classes, dropout=0.5)
    sar.prepare(model, data)  # sar: rank 0's parameters; dropout by node
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        model.train()
        logits = model(data.x, data.edge_index)
        loss = sar.cross_entropy(logits, data.y, data.train_mask)  # sar: over all ranks
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)  # sar: the sum over the ranks
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(data.x, data.edge_index).argmax(1) == data.y).float()
        accuracy = sar.global_mean(right, data.test_mask)  # sar: over all ranks
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} test accuracy {accuracy:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
