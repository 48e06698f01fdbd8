"""Edges are learned from, as users of other libraries do it:

glt: GraphLearn's unsupervised job: binary negatives, weighted draws, and an area under the curve
at the end. pyg: ratings are predicted from what came before them, as `torch_geometric.distributed`
does it on MovieLens: seed edges with labels and times, and users without features in the files.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE, SAGEConv, to_hetero

import sar
from sar.sampling import LinkNeighborLoader

RATES = ("user", "rates", "movie")


class Dot(nn.Module):
    """Scores of pairs without types, and whether they are edges."""

    def __init__(self, width):
        super().__init__()
        self.encoder = GraphSAGE(width, 32, 2, 16)

    def forward(self, batch):
        h = self.encoder(batch.x, batch.edge_index)
        src, dst = batch.edge_label_index
        return (h[src] * h[dst]).sum(dim=-1), batch.edge_label


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.near, self.far = SAGEConv((-1, -1), width), SAGEConv((-1, -1), width)

    def forward(self, x, edge_index):
        return self.far(self.near(x, edge_index).relu(), edge_index)


class Ratings(nn.Module):
    """Ratings of pairs, and what they are."""

    def __init__(self, width, metadata):
        super().__init__()
        self.encoder = to_hetero(Encoder(width), metadata, aggr="sum")
        self.decoder = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, batch):
        times = batch[RATES].edge_label_time
        for etype in batch.edge_types:  # nothing of a later time
            tree = batch[etype[2]].batch[batch[etype].edge_index[1]]
            assert (batch[etype].time <= times[tree]).all()
        h = self.encoder(batch.x_dict, batch.edge_index_dict)
        src, dst = batch[RATES].edge_label_index
        out = self.decoder(torch.cat([h["user"][src], h["movie"][dst]], dim=1)).view(-1)
        return out, batch[RATES].edge_label.float()


def area_under_curve(found, labels):
    """The chance that a pair with an edge scores above one without."""
    right, wrong = found[labels > 0], found[labels == 0]
    above = (right[:, None] > wrong).double() + 0.5 * (right[:, None] == wrong)
    return float(above.mean())


def main():
    is_glt = sys.argv[2] == "--job=glt"
    root = Path(sys.argv[1]) / ("glt_products" if is_glt else "pyg_movielens")
    group = sar.initialize_comms()
    data = sar.load_partition_data(root / "partitions", group.rank)
    if not is_glt:
        users = data.node_features["user/orig_id"]
        data.node_features["user/feat"] = torch.eye(8)[users % 8]  # none in the files
    options = {"original_ids": True, "as_": "pyg", "batch_size": 64}
    loaders = []
    for name in ("train", "test"):
        given = torch.load(root / f"{name}_edges{group.rank}.pt")
        if is_glt:
            more = given, None, None
            options |= {"neg_sampling": "binary", "weight_attr": "weight"}
        else:
            more = (RATES, given[0]), *given[1:]
            options |= {"disjoint": True, "time_attr": "time"}
        fan = [10, 5]
        loaders.append(LinkNeighborLoader(data, fan, *more, shuffle=name == "train", **options))
    torch.manual_seed(0)
    if is_glt:
        model = Dot(data.node_features["_N/feat"].shape[1])
    else:
        model = Ratings(16, (data.book.ntypes, data.book.canonical_etypes))
        with torch.no_grad():
            model(next(iter(loaders[0])))  # lazy parameters get their shapes
    loss_of = F.binary_cross_entropy_with_logits if is_glt else F.mse_loss
    model = DistributedDataParallel(model, find_unused_parameters=is_glt)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        total = torch.zeros(2, dtype=torch.float64)
        for batch in loaders[0]:
            optimizer.zero_grad()
            values = loss_of(*model(batch), reduction="none")
            (sar.global_mean(values) * group.size).backward()
            optimizer.step()
            total += torch.tensor([float(values.sum()), len(values)])
        total = group.all_reduce(total)
        print(f"epoch {epoch} loss {total[0] / total[1]:.4f}", flush=True)
    with torch.no_grad():
        found, labels = map(torch.cat, zip(*(model.module(batch) for batch in loaders[1])))
    if is_glt:
        print(f"auc {area_under_curve(found, labels):.4f}", flush=True)
    else:
        errors = torch.tensor([float((found - labels).square().sum()), len(found)])
        error, count = group.all_reduce(errors).tolist()
        print(f"rmse {(error / count) ** 0.5:.4f}", flush=True)
    for loader in loaders:
        loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
