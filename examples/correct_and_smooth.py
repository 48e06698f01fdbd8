"""Correct & Smooth (Huang et al. 2021): a perceptron's predictions, repaired over the graph.

    torchrun --nproc-per-node 4 examples/correct_and_smooth.py parts/synthetic.json

Errors on training nodes spread to their neighbors and are subtracted, then labels and predictions
are averaged along the edges.
"""

import sys

import dgl.nn
import torch
import torch.nn.functional as F

import sar


def correct_and_smooth(graph, soft, truth, train):
    """[N, C] better predictions from ``soft``; ``truth`` is one-hot, read where ``train``."""
    plain = {"clamp": False, "normalize": False, "reset": False}
    error = (truth - soft) * train.unsqueeze(1)
    spread = dgl.nn.LabelPropagation(k=20, alpha=0.9, **plain)(graph, error)
    size = sar.global_mean(error.abs().sum(1), train)  # mean error of all ranks' training nodes
    scale = size / spread.abs().sum(1, keepdim=True).clamp(min=1e-3)
    start = torch.where(train.unsqueeze(1), truth, soft + scale.clamp(max=1.5) * spread)
    return dgl.nn.LabelPropagation(k=20, alpha=0.8, **plain)(graph, start)


def main(parts: str, epochs: int = 40) -> None:
    group = sar.initialize_comms()
    data = sar.load_dgl_partition_data(parts, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    features, labels = graph.ndata["feat"], graph.ndata["label"]
    train, test = (graph.ndata[f"{name}_mask"].bool() for name in ("train", "test"))
    hidden, out = torch.nn.Linear(features.shape[1], 64), torch.nn.Linear(64, 16)
    model = torch.nn.Sequential(hidden, torch.nn.ReLU(), out)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        loss = sar.global_mean(F.cross_entropy(model(features), labels, reduction="none"), train)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        if group.rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}")

    with torch.no_grad():
        soft, truth = model(features).softmax(1), F.one_hot(labels, 16).float()
        better = correct_and_smooth(graph, soft, truth, train)
        for name, guess in {"perceptron": soft, "corrected and smoothed": better}.items():
            accuracy = sar.global_mean((guess.argmax(1) == labels).float(), test)
            if group.rank == 0:
                print(f"{name}: test accuracy {accuracy:.3f}")
    sar.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
