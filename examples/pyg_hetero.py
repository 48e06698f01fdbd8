"""Papers, authors and terms, of which only papers have features: an HGT or an R-GCN of PyG's.

sar partition bibliography:papers=2000 --parts 4 --out parts
torchrun --nproc-per-node 4 examples/pyg_hetero.py parts/bibliography.json [--model rgcn]

HGT is called with dicts by type. R-GCN takes all types as one graph and is told the types of edges.
Rows of nodes without features are learned; each rank holds those of its own nodes.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import HGTConv, RGCNConv

import sar
import sar.pyg

WIDTH = 32


class HGT(torch.nn.Module):
    def __init__(self, data, tables, classes: int) -> None:
        super().__init__()
        self.tables, self.papers = tables, torch.nn.Linear(data["paper"].x.shape[1], WIDTH)
        self.first = HGTConv(WIDTH, WIDTH, data.metadata(), heads=4)
        self.second = HGTConv(WIDTH, WIDTH, data.metadata(), heads=4)
        self.last = torch.nn.Linear(WIDTH, classes)

    def forward(self, papers, edge_index_dict):
        x = {ntype: table() for ntype, table in self.tables.items()} | {
            "paper": self.papers(papers)
        }
        x = self.first(x, edge_index_dict)
        return self.last(self.second(x, edge_index_dict)["paper"])


class RGCN(torch.nn.Module):
    def __init__(self, data, tables, classes: int) -> None:
        super().__init__()
        self.tables, self.papers = tables, torch.nn.Linear(data["paper"].x.shape[1], WIDTH)
        self.types, relations = data.node_types, len(data.edge_types)
        self.first = RGCNConv(WIDTH, WIDTH, relations, num_bases=3)
        self.second = RGCNConv(WIDTH, classes, relations, num_bases=3)

    def forward(self, papers, edge_index, edge_type):
        x = {ntype: table() for ntype, table in self.tables.items()} | {
            "paper": self.papers(papers)
        }
        rows = torch.cat([x[ntype] for ntype in self.types])  # types lie one behind the other
        rows = F.relu(self.first(rows, edge_index, edge_type))
        counts = [len(x[ntype]) for ntype in self.types]
        out = self.second(rows, edge_index, edge_type).split(counts)
        return out[self.types.index("paper")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="the JSON that `sar partition` wrote")
    parser.add_argument("--model", choices=["hgt", "rgcn"], default="hgt")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    group = sar.initialize_comms()
    sar.manual_seed(0)
    part = sar.load_partition_data(args.parts)
    data = sar.pyg.construct_full_graph(part)
    paper = data["paper"]
    classes = int(group.all_reduce(paper.y.max(), "max")) + 1
    cites = data["paper", "cites", "paper"]  # any relation says the graph
    tables = {t: sar.nn.ShardedEmbedding(cites, t, WIDTH) for t in ("author", "term")}
    if args.model == "hgt":
        model = HGT(data, torch.nn.ModuleDict(tables), classes)
        inputs = (paper.x, data.edge_index_dict)
    else:
        one = sar.pyg.construct_full_graph(sar.to_homogeneous(part))
        model = RGCN(data, torch.nn.ModuleDict(tables), classes)
        inputs = (paper.x, one.edge_index, one.edge_type)
    sar.prepare(model, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        loss = sar.cross_entropy(model(*inputs), paper.y, paper.train_mask)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        with torch.no_grad():
            right = (model(*inputs).argmax(1) == paper.y).float()
        accuracy = sar.global_mean(right, paper.test_mask)
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} test accuracy {accuracy:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main()
