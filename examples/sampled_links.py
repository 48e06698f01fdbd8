"""Link prediction on mini-batches of edges, with pairs that are none beside them.

On ogbl-collab: sar partition ogbl-collab --parts 4 --out parts
torchrun --nproc-per-node 4 examples/sampled_links.py parts/ogbl-collab.json --batch-size 1024
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import sar
from sar.sampling import LinkNeighborLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(args.parts, group.rank, "cpu")
    width = data.node_features["_N/feat"].shape[1]
    torch.manual_seed(0)
    model = GraphSAGE(width, 32, 2)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"batch_size": args.batch_size, "shuffle": True, "as_": "pyg"}
    negatives = {"mode": "binary", "amount": 1, "keep_src": True, "strict": True}
    with LinkNeighborLoader(
        data, [10, 5], neg_sampling=negatives, exclude="reverse", **options
    ) as loader:
        for epoch in range(args.epochs):
            right = torch.zeros(2)
            for batch in loader:
                h = model(batch.x, batch.edge_index)
                src, dst = batch.edge_label_index
                scores = (h[src] * h[dst]).sum(1)
                losses = F.binary_cross_entropy_with_logits(
                    scores, batch.edge_label, reduction="none"
                )
                loss = sar.global_mean(losses)
                optimizer.zero_grad()
                loss.backward()
                sar.gather_grads(model)
                optimizer.step()
                found = (scores > 0) == (batch.edge_label > 0)
                right += torch.tensor([found.sum(), len(found)])
            hits, count = group.all_reduce(right).tolist()
            if group.rank == 0:
                print(f"epoch {epoch} loss {loss:.4f} told apart {hits / count:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main()
