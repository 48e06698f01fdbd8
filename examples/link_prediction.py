"""Link prediction: GraphSAGE learns which edges a graph lacks.

    torchrun --nproc-per-node 4 examples/link_prediction.py parts/synthetic.json

Every tenth edge is held out. Negative edges are drawn anew in each epoch, the
same on any number of ranks; held-out edges are ranked among all nodes, each rank scoring its own.
"""

import sys

import dgl.function as fn
import dgl.nn
import torch
import torch.nn.functional as F

import sar
from sar.nn import MLPScorer, NegativeSampler, link_loss, rank_links, ranking_metrics


class GraphSAGE(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(inputs, hidden, "mean")
        self.second = dgl.nn.SAGEConv(hidden, hidden, "mean")

    def forward(self, graph, x):
        return self.second(graph, F.relu(self.first(graph, x)))


def main(parts: str, epochs: int = 60) -> None:
    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    features = graph.ndata["feat"]
    graph.ndata["id"] = graph.ndata["orig_id"].double()
    graph.apply_edges(fn.u_add_v("id", "id", "sum"))
    held_out = graph.edata["sum"] % 10 == 0  # both directions of an edge, whatever the cut
    train = graph.edge_subgraph(~held_out)

    encoder, scorer = GraphSAGE(features.shape[1], 32), MLPScorer(2 * 32, 32)
    model = torch.nn.ModuleList([encoder, scorer])
    sar.sync_params(model)
    sampler = NegativeSampler(train, k=4, method="per_source", seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        h = encoder(train, features)
        loss = link_loss(train, sampler(epoch), scorer, h)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")

    metrics = ranking_metrics(rank_links(graph, scorer, encoder(train, features), held_out))
    if group.rank == 0:
        print("held-out edges:", *(f"{name} {value:.3f}" for name, value in metrics.items()))
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
