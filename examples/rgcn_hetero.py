"""An R-GCN on papers, authors and terms, of which only papers have features: the rest is learned.

    sar partition bibliography:papers=2000 --parts 4 --out parts
    torchrun --nproc-per-node 4 examples/rgcn_hetero.py parts/bibliography.json [--mfgs]

With --mfgs, layers compute what the training nodes need and no more.
"""

import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


class RGCN(torch.nn.Module):
    """Each layer: a mean over each relation, times a matrix of its own, and the node's own row."""

    def __init__(self, etypes: list[str], features: int, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.papers = torch.nn.Linear(features, width)
        self.convs, self.loops = torch.nn.ModuleList(), torch.nn.ModuleList()
        for out in (width, classes):
            convs = {r: dgl.nn.GraphConv(width, out, norm="right", bias=False) for r in etypes}
            self.convs.append(dgl.nn.HeteroGraphConv(convs, aggregate="sum"))
            self.loops.append(torch.nn.Linear(width, out))

    def forward(self, graphs, h):
        h = {**h, "paper": self.papers(h["paper"])}
        for conv, loop, graph in zip(self.convs, self.loops, graphs):
            h = {t: F.elu(rows) for t, rows in h.items()}
            own = {t: loop(rows[: graph.num_dst_nodes(t)]) for t, rows in h.items()}
            h = {t: own[t] + rows for t, rows in conv(graph, h).items()}
        return h["paper"]


def main(parts: str, mfgs: bool) -> None:
    group = sar.initialize_comms()
    torch.manual_seed(0)
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    rows = data.node_features["paper/train_mask"].nonzero().flatten()
    if mfgs:  # seeds are global ids
        seeds = rows + int(data.book.node_ranges["paper"][group.rank, 0])
        graphs, rows_of_logits = sar.construct_mfgs(data, seeds, 2), slice(None)
    else:
        graphs, rows_of_logits = [sar.construct_full_graph(data)] * 2, rows
    labels = data.node_features["paper/label"][rows]
    papers = data.node_features["paper/feat"][graphs[0].srcnodes("paper")]
    tables = {t: sar.nn.ShardedEmbedding(graphs[0], t, 32, sparse=True) for t in ("author", "term")}
    model = RGCN(graphs[0].etypes, papers.shape[1])
    sar.sync_params(model)
    learned = [table.weight for table in tables.values()]
    optimizers = torch.optim.Adam(model.parameters(), 0.01), torch.optim.SparseAdam(learned, 0.01)
    for epoch in range(20):
        h = {t: table(graphs[0]) for t, table in tables.items()}
        logits = model(graphs, h | {"paper": papers})[rows_of_logits]
        loss = sar.global_mean(F.cross_entropy(logits, labels, reduction="none"))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        for optimizer in optimizers:
            optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], "--mfgs" in sys.argv)
