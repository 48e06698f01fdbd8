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
    parser.add_argument("--mask", default="train_mask", help="of the nodes to train on")
    args = parser.parse_args()

    with connect(args.address, args.servers) as servers:
        torch.manual_seed(0)
        model = GraphSAGE(servers.width("feat"), 64, 2, servers.num_classes("label"))
        sar.sync_params(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seeds = servers.nodes(mask=args.mask)  # this trainer's share
        options = {"batch_size": 64, "shuffle": True, "as_": "pyg"}
        with servers.NeighborLoader([10, 5], seeds, **options) as loader:
            for epoch in range(args.epochs):
                for batch in loader:
                    logits = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
                    labels = batch.y[: batch.batch_size].view(-1).long()
                    losses = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
                    loss = sar.global_mean(losses, labels >= 0)  # over the seeds of all trainers
                    optimizer.zero_grad()
                    loss.backward()
                    sar.gather_grads(model)
                    optimizer.step()
                if servers.group.rank == 0:
                    print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main()
