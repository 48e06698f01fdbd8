"""GraphSAGE on ranks that hold no partition: servers make the mini-batches.

sar sample-server parts/synthetic.json --trainers 2 --address 127.0.0.1:29400 &
torchrun --nproc-per-node 2 examples/server_client.py 127.0.0.1:29400 --servers 4
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import sar
from sar.sampling import connect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="where the servers are, HOST:PORT")
    parser.add_argument("--servers", type=int, required=True, help="how many there are")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--classes", type=int, default=8)
    args = parser.parse_args()

    with connect(args.address, args.servers) as servers:
        torch.manual_seed(0)
        model = GraphSAGE(args.features, 64, 2, args.classes)
        sar.sync_params(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seeds = servers.nodes(mask="train_mask")  # this trainer's share
        options = {"batch_size": 64, "shuffle": True, "as_": "pyg"}
        with servers.NeighborLoader([10, 5], seeds, **options) as loader:
            for epoch in range(args.epochs):
                for batch in loader:
                    logits = model(batch.x, batch.edge_index)[: batch.batch_size]
                    losses = F.cross_entropy(logits, batch.y[: batch.batch_size], reduction="none")
                    loss = sar.global_mean(losses)  # over the seeds of all trainers
                    optimizer.zero_grad()
                    loss.backward()
                    sar.gather_grads(model)
                    optimizer.step()
                if servers.group.rank == 0:
                    print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main()
