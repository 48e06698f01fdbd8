"""A graph larger than memory, on one machine: its parts take turns, and what waits is in a file.

The function is what a script does on a rank; the lines marked "sar:" differ from one machine. It
goes on behind the last epoch that was saved, so start it again if it was stopped.

python examples/larger_than_memory.py parts/synthetic.json --directory /scratch --memory 20GiB
"""

import argparse
import os
from pathlib import Path

import torch
from torch_geometric.nn import SAGEConv

import sar
import sar.pyg
from sar.partition.load import PartitionData


class Net(torch.nn.Module):
    """GraphSAGE with a residual connection, batch norm and dropout."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(inputs, hidden), SAGEConv(hidden, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.dropout = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        x = x + self.second(self.dropout(x), edge_index).relu()
        return self.last(x)


def train(part: PartitionData, out: Path, epochs: int) -> float:
    group = sar.current_group()  # sar: of all parts
    data = sar.pyg.construct_full_graph(part)  # sar: this part's rows and edges
    classes = int(group.all_reduce(data.y.max(), "max")) + 1  # sar: over all parts
    sar.manual_seed(0)  # sar: in place of torch.manual_seed
    model = Net(data.num_features, 32, classes)
    sar.prepare(model, data)  # sar: batch norm over all parts, dropout by node
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saved, done = out / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
    for epoch in range(done, epochs):
        sar.manual_seed(epoch)  # sar: dropout is the same where a run goes on
        loss = sar.cross_entropy(model(data.x, data.edge_index), data.y, data.train_mask)  # sar
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)  # sar: the sum over the parts
        optimizer.step()
        if group.rank == 0:  # sar: one part saves, as all have the same model
            print(f"epoch {epoch} loss {loss:.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, out / "new.pt")
            os.replace(out / "new.pt", saved)
    model.eval()
    with torch.no_grad():
        found = model(data.x, data.edge_index).argmax(1)
    torch.save({"ids": data.n_id, "classes": found}, out / f"predictions-{part.part_id}.pt")
    return sar.global_mean((found == data.y).float(), data.test_mask).item()  # sar: over all parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", help="JSON of the partitions")
    parser.add_argument("--out", type=Path, default=Path("larger"), help="checkpoint, predictions")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--directory", help="folder on a disk, for what memory has no room for")
    parser.add_argument("--memory", help="what the process may take, as 20GiB")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    accuracy, *_ = sar.run_parts(
        args.parts, train, (args.out, args.epochs), directory=args.directory, memory=args.memory
    )
    files = sorted(args.out.glob("predictions-*.pt"))
    ids = torch.cat([torch.load(file)["ids"] for file in files])
    print(f"test accuracy {accuracy:.3f}; classes of {len(ids):,} nodes in {len(files)} files")


if __name__ == "__main__":
    main()
