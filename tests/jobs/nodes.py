"""Nodes are classified from mini-batches, as users of other libraries do it:

pyg: GraphSAGE as `torch_geometric.distributed` trains it on ogbn-products; mag: for several types,
on ogbn-mag. glt: the same in the worker mode of GraphLearn. client: on batches that GraphLearn's
servers make, on ranks without partitions. igbh: a relational GAT as GraphLearn trains it on IGBH,
with layers trimmed to what a hop brought, and validation inside of an epoch.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, GraphSAGE, HeteroConv, to_hetero
from torch_geometric.utils import trim_to_layer

import sar
from sar.sampling import NeighborLoader, connect

FOLDERS = {"pyg": "pyg_products", "mag": "pyg_mag", "glt": "glt_products", "igbh": "glt_igbh"}


class RelationalGAT(nn.Module):
    def __init__(self, etypes, features, width, classes, layers=2, heads=2):
        super().__init__()
        sizes = [features, *[width] * layers]
        self.convs = nn.ModuleList(
            HeteroConv({e: GATConv(inputs, width // heads, heads, add_self_loops=False)
                        for e in etypes})
            for inputs in sizes[:-1]
        )  # fmt: skip
        self.last = nn.Linear(width, classes)

    def forward(self, batch):
        x, edges = batch.x_dict, batch.edge_index_dict
        hops = batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict
        for number, conv in enumerate(self.convs):
            x, edges, _ = trim_to_layer(number, *hops, x, edges)
            x = {ntype: F.leaky_relu(rows) for ntype, rows in conv(x, edges).items()}
        return {"paper": self.last(x["paper"])}


class Sage(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        if isinstance(batch, HeteroData):
            return self.model(batch.x_dict, batch.edge_index_dict)
        return {"_N": self.model(batch.x, batch.edge_index)}


def outputs_and_labels(model, batch):
    ((ntype, out),) = [one for one in model(batch).items() if one[0] in ("_N", "paper")]
    store = batch[ntype] if isinstance(batch, HeteroData) else batch
    return out[: store.batch_size], store.y[: store.batch_size]


def turned(batch):
    """Messages go from the nodes that were drawn to those that drew them."""
    batch.edge_index = batch.edge_index.flip(0)
    return batch


@torch.no_grad()
def accuracy(model, loader, group):
    model.eval()
    hits = torch.zeros(2)
    for batch in loader:
        out, labels = outputs_and_labels(model, batch)
        hits += torch.tensor([int((out.argmax(-1) == labels).sum()), len(labels)])
    model.train()
    right, count = group.all_reduce(hits).tolist()
    return right / count


def train(model, loaders, group, is_validated):
    model = DistributedDataParallel(
        model, process_group=group.torch_group(), find_unused_parameters=not is_simple(model)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best = 0.0
    for epoch in range(4):
        total = torch.zeros(2, dtype=torch.float64)
        for step, batch in enumerate(loaders[0]):
            optimizer.zero_grad()
            values = F.cross_entropy(*outputs_and_labels(model, batch), reduction="none")
            (sar.global_mean(values) * group.size).backward()
            optimizer.step()
            total += torch.tensor([float(values.sum()), len(values)])
            if is_validated and (epoch, step) == (2, 2):  # in the middle of an epoch
                best = accuracy(model.module, loaders[1], group)
        total = group.all_reduce(total)
        print(f"epoch {epoch} loss {total[0] / total[1]:.4f}", flush=True)
    print(f"accuracy {max(best, accuracy(model.module, loaders[1], group)):.4f}", flush=True)
    for loader in loaders:
        loader.close()


def is_simple(model):
    return isinstance(model, Sage) and isinstance(model.model, GraphSAGE)


def on_partitions(name, root):
    group = sar.initialize_comms()
    data = sar.load_partition_data(root / "partitions", group.rank)
    ntype = "paper" if name in ("mag", "igbh") else "_N"
    labels = torch.load(root / "label.pt")
    data.node_features[f"{ntype}/label"] = labels[data.node_features[f"{ntype}/orig_id"]]
    options, fan = {"original_ids": True, "as_": "pyg", "batch_size": 16}, [15, 10]
    if name == "glt":  # as its loaders do by default
        options |= {"direction": "out", "transform": turned}
    if name == "igbh":
        options, fan = options | {"seed": 42}, [5, 5]
    loaders = []
    for split in ("train", "val" if name == "igbh" else "test"):
        seeds = torch.load(root / f"{split}_idx{group.rank}.pt")
        given = seeds if ntype == "_N" else (ntype, seeds)
        loaders.append(NeighborLoader(data, fan, given, shuffle=split == "train", **options))
    torch.manual_seed(0)
    width, classes = data.node_features[f"{ntype}/feat"].shape[1], int(labels.max()) + 1
    if name == "igbh":
        model = RelationalGAT(data.book.canonical_etypes, width, 32, classes)
    else:
        model = GraphSAGE(width, 32, 2, classes)
        if name == "mag":
            model = to_hetero(model, (data.book.ntypes, data.book.canonical_etypes))
        model = Sage(model)
    torch.distributed.barrier()
    train(model, loaders, group, name == "igbh")


def on_servers(root, address, features, classes):
    with connect(address, 2) as servers:
        group, options = servers.group, {"as_": "pyg", "batch_size": 16}
        # A client takes seeds from the files of all parts, or from the servers' masks.
        seeds = torch.load(root / f"train_idx{group.rank}.pt"), servers.nodes(mask="test_mask")
        loaders = [servers.NeighborLoader([15, 10], one, **options) for one in seeds]
        torch.manual_seed(0)
        train(Sage(GraphSAGE(features, 32, 2, classes)), loaders, group, False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--job", choices=[*FOLDERS, "client"])
    for name in ("address", "features", "classes"):
        parser.add_argument(f"--{name}", type=str if name == "address" else int)
    args = parser.parse_args()
    if args.job == "client":
        on_servers(args.root / FOLDERS["glt"], args.address, args.features, args.classes)
    else:
        on_partitions(args.job, args.root / FOLDERS[args.job])
    sar.shutdown()


if __name__ == "__main__":
    main()
