"""An R-GCN on papers, authors and terms, of which only papers have features: the rest is learned.

sar partition bibliography:papers=2000 --parts 4 --out parts
torchrun --nproc-per-node 4 examples/rgcn_hetero.py parts/bibliography.json [--mfgs]
"""

import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class RGCN(torch.nn.Module):
    """Each layer: a mean over each relation, times a matrix of its own, and the node's own row."""

    def __init__(self, graph, features: int, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        tables = {t: sar.nn.ShardedEmbedding(graph, t, width) for t in ("author", "term")}
        self.tables, self.papers = torch.nn.ModuleDict(tables), torch.nn.Linear(features, width)
        self.convs, self.loops = torch.nn.ModuleList(), torch.nn.ModuleList()
        for out in (width, classes):
            convs = {r: dgl.nn.GraphConv(width, out, "right", bias=False) for r in graph.etypes}
            self.convs.append(dgl.nn.HeteroGraphConv(convs, aggregate="sum"))
            self.loops.append(torch.nn.Linear(width, out))

    def forward(self, graphs, papers):
        h = {t: table(graphs[0]) for t, table in self.tables.items()}
        h["paper"] = self.papers(papers[graphs[0].srcnodes("paper")])
        for conv, loop, graph in zip(self.convs, self.loops, graphs):
            h = {t: F.elu(rows) for t, rows in h.items()}
            h = {t: loop(h[t][: len(sums)]) + sums for t, sums in conv(graph, h).items()}
        return h["paper"]


def main(parts: str, mfgs: bool) -> None:
    group = sar.initialize_comms()
    torch.manual_seed(0)
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    papers, labels = data.node_features["paper/feat"], data.node_features["paper/label"]
    rows = data.node_features["paper/train_mask"].nonzero().flatten()
    own = int(data.book.node_ranges["paper"][group.rank, 0])  # the first id: seeds are global ids
    graphs = (
        sar.construct_mfgs(data, rows + own, 2) if mfgs else 2 * [sar.construct_full_graph(data)]
    )
    model = RGCN(graphs[0], papers.shape[1])
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(20):
        logits = model(graphs, papers) if mfgs else model(graphs, papers)[rows]
        loss = sar.global_mean(F.cross_entropy(logits, labels[rows], reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], "--mfgs" in sys.argv)
