"""Ratings are predicted from what came before them, as `torch_geometric.distributed` does it on
MovieLens: seed edges with labels and times, and users that have no features in the files."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import SAGEConv, to_hetero

import sar
from sar.sampling import LinkNeighborLoader

RATES = ("user", "rates", "movie")


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.near, self.far = SAGEConv((-1, -1), width), SAGEConv((-1, -1), width)

    def forward(self, x, edge_index):
        return self.far(self.near(x, edge_index).relu(), edge_index)


class Model(nn.Module):
    def __init__(self, width, metadata):
        super().__init__()
        self.encoder = to_hetero(Encoder(width), metadata, aggr="sum")
        self.decoder = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, batch):
        h = self.encoder(batch.x_dict, batch.edge_index_dict)
        src, dst = batch[RATES].edge_label_index
        return self.decoder(torch.cat([h["user"][src], h["movie"][dst]], dim=1)).view(-1)


def squared_errors(model, batch):
    return F.mse_loss(model(batch), batch[RATES].edge_label.float(), reduction="none")


def main():
    root = Path(sys.argv[1]) / "pyg_movielens"
    group = sar.initialize_comms()
    data = sar.load_partition_data(root / "partitions", group.rank)
    users = data.node_features["user/orig_id"]
    data.node_features["user/feat"] = torch.eye(8)[users % 8]  # none in the files

    made = {}
    for name in ("train", "test"):
        pairs, labels, times = torch.load(root / f"{name}_edges{group.rank}.pt")
        made[name] = LinkNeighborLoader(
            data, [10, 5], (RATES, pairs), labels, times, original_ids=True, as_="pyg",
            batch_size=64, shuffle=name == "train", disjoint=True, time_attr="time",
        )  # fmt: skip

    torch.manual_seed(0)
    model = Model(16, (data.book.ntypes, data.book.canonical_etypes))
    with torch.no_grad():
        model(next(iter(made["train"])))  # lazy parameters get their shapes
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        total = torch.zeros(2, dtype=torch.float64)
        for batch in made["train"]:
            times = batch[RATES].edge_label_time
            for etype in batch.edge_types:  # nothing of a later time
                tree = batch[etype[2]].batch[batch[etype].edge_index[1]]
                assert (batch[etype].time <= times[tree]).all()
            optimizer.zero_grad()
            values = squared_errors(model, batch)
            (sar.global_mean(values) * group.size).backward()
            optimizer.step()
            total += torch.tensor([float(values.sum()), len(values)])
        total = group.all_reduce(total)
        print(f"epoch {epoch} loss {total[0] / total[1]:.4f}", flush=True)
    errors = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in made["test"]:
            values = squared_errors(model.module, batch)
            errors += torch.tensor([float(values.sum()), len(values)])
    error, count = group.all_reduce(errors).tolist()
    print(f"rmse {(error / count) ** 0.5:.4f}", flush=True)
    for loader in made.values():
        loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
