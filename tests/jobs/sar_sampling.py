"""The sampled job of IntelLabs SAR, by its own names: blocks to train on, then the whole graph."""

import os
import sys
from pathlib import Path

import dgl.nn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import sar


class Net(nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        sizes = [inputs, hidden, hidden, classes]
        self.convs = nn.ModuleList(
            dgl.nn.SAGEConv(a, b, aggregator_type="mean") for a, b in zip(sizes, sizes[1:])
        )

    def forward(self, blocks, rows):
        for block, conv in zip(blocks, self.convs):
            rows = conv(block, rows if conv is self.convs[0] else F.relu(rows, inplace=True))
        return rows


def counts_of(logits, labels, masks):
    pairs = [((logits[m].argmax(1) == labels[m]).sum(), m.numel()) for m in masks.values()]
    return torch.tensor([float(one) for pair in pairs for one in pair])


def main():
    root = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = sar.nfs_ip_init(rank, str(root / f"ip_file{os.environ['MASTER_PORT']}"))
    sar.initialize_comms(rank, size, address, "gloo")
    data = sar.load_dgl_partition_data(str(root / "dgl/dgl.json"), rank, torch.device("cpu"))
    masks = {
        name: sar.suffix_key_lookup(data.node_features, name).nonzero(as_tuple=False).view(-1)
        for name in ("train_mask", "val_mask", "test_mask")
    }
    labels = sar.suffix_key_lookup(data.node_features, "label").long()
    features = sar.suffix_key_lookup(data.node_features, "feat")
    classes = labels.max() + 1
    sar.comm.all_reduce(classes, dist.ReduceOp.MAX, move_to_comm_device=True)
    graph, starts = sar.construct_full_graph(data), data.node_ranges
    del data

    torch.manual_seed(rank)
    model = Net(features.size(1), 32, classes.item())
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = sar.core.sampling.DistNeighborSampler(
        [10, 5, 5],
        input_node_features={"features": features},
        output_node_features={"labels": labels},
        output_device=torch.device("cpu"),
    )
    loader = sar.core.sampling.DataLoader(
        graph, masks["train_mask"] + starts[sar.rank()][0], sampler, 16, shuffle=True,
        precompute_optimized_batches=False, optimized_batches_cache=None, num_workers=0,
    )  # fmt: skip
    local = graph.sampling_graph
    print(f"{local.num_edges()} edges with {list(local.edata)}", flush=True)
    for number in range(4):
        model.train()
        sar.Config.max_collective_size = 0
        total = torch.zeros(2)
        for blocks in loader:
            blocks = [block.to(torch.device("cpu")) for block in blocks]
            wanted = blocks[-1].dstdata["labels"]
            logits = model(blocks, blocks[0].srcdata["features"])
            loss = sar.global_mean(F.cross_entropy(logits, wanted, reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            sar.gather_grads(model)
            optimizer.step()
            total += torch.tensor([loss.item(), 1])
        print(f"epoch {number} loss {total[0] / total[1]:.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        counts = counts_of(model([graph] * 3, features), labels, masks)
    sar.comm.all_reduce(counts, op=dist.ReduceOp.SUM, move_to_comm_device=True)
    print(f"accuracy {counts[4] / counts[5]:.4f}", flush=True)
    loader.close()
    sar.shutdown()


if __name__ == "__main__":
    main()
