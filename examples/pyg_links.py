"""Link prediction: a GraphSAGE of PyG's learns which edges a graph lacks.

    torchrun --nproc-per-node 4 examples/pyg_links.py parts/synthetic.json

Every tenth edge is held out, in both directions. Negative edges are drawn anew in each epoch, the
same on any number of ranks; held-out edges are ranked among all nodes, each rank scoring its own.
"""

import sys

import torch
from torch_geometric.nn import GraphSAGE

import sar
import sar.pyg
from sar.nn import MLPScorer, NegativeSampler, link_loss, rank_links, ranking_metrics


def main(parts: str, epochs: int = 60) -> None:
    group = sar.initialize_comms()
    sar.manual_seed(0)
    data = sar.pyg.construct_full_graph(sar.load_partition_data(parts))
    src, dst = data.edge_index
    ids = data.orig_id.double()
    held_out = ((ids[src] + ids[dst]) % 10 == 0).materialize()  # both directions of an edge
    train = data.edge_index[:, ~held_out]

    encoder, scorer = GraphSAGE(data.num_features, 32, num_layers=2), MLPScorer(2 * 32, 32)
    model = torch.nn.ModuleList([encoder, scorer])
    sar.prepare(model, data)
    sampler = NegativeSampler(train, k=4, method="per_source", seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        h = encoder(data.x, train)
        loss = link_loss(train, sampler(epoch), scorer, h)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")

    h = encoder(data.x, train)
    metrics = ranking_metrics(rank_links(data, scorer, h, held_out))
    if group.rank == 0:
        print("held-out edges:", *(f"{name} {value:.3f}" for name, value in metrics.items()))
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
