"""What `make demo` runs: cut a generated graph in four, train GraphSAGE on it exactly, compare.

Three runs on one seeded community graph: GraphSAGE on four local processes (`sar train`), a
multi-layer perceptron on the same features without the graph, and the same GraphSAGE in one
process: with plain DGL where that is installed, else with the library's own layers. Prints
accuracies, times, memory and traffic, and draws two pictures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

HIDDEN, LAYERS, PARTS, SEED, LR = 128, 3, 4, 0, 0.01
MIB = 2**20
HAS_DGL = importlib.util.find_spec("dgl") is not None
CUT = "metis" if HAS_DGL else "coarsen"  # DGL brings METIS
ALONE = "plain DGL" if HAS_DGL else "one rank of sar"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--single-machine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.single_machine:
        single_machine(args)
        return 0
    begin = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    step(f"Generating {args.nodes:,} nodes, {args.edges:,} edges; cutting them in {PARTS} ({CUT})")
    parts = partition(args)
    step(f"GraphSAGE, {LAYERS} layers, hidden {HIDDEN}, full batch on {PARTS} local processes")
    result = train(parts, args)
    step("A perceptron on the same features, without the graph")
    mlp = perceptron(args)
    step(f"The same GraphSAGE in one process, {ALONE}, 3 epochs, for its memory")
    single = alone(args)
    gain = report(result, mlp, single)
    pictures(result, single, args.out)
    print(f"\nThe whole demo took {time.perf_counter() - begin:.0f} s.")
    return 0 if gain >= 10 else 1


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def sar(*words: object) -> None:
    """Run `sar ...` in a process of its own; its output goes to the terminal."""
    subprocess.run([sys.executable, "-m", "sar", *map(str, words)], check=True)


def partition(args: argparse.Namespace) -> Path:
    """Generate and cut the graph; returns the JSON that describes the parts."""
    source = f"synthetic:nodes={args.nodes},edges={args.edges},seed={SEED}"
    out = args.out / "parts"
    words = ["--parts", PARTS, "--out", out, "--method", CUT, "--seed", SEED, "--overwrite"]
    sar("partition", source, *words)
    (found,) = out.glob("*.json")
    return found


def train(parts: Path, args: argparse.Namespace) -> dict:
    """Train on four ranks over gloo; returns the run's own report."""
    out = args.out / "train.json"
    sar(
        "train", parts, "--model", "sage", "--layers", LAYERS, "--hidden", HIDDEN,
        "--epochs", args.epochs, "--lr", LR, "--nproc", PARTS, "--backend", "gloo",
        "--seed", SEED, "--json", out,
    )  # fmt: skip
    return json.loads(out.read_text())


def community(args: argparse.Namespace):
    """The same seeded graph that `sar partition synthetic` cuts."""
    from sar.partition.sources.generate import community_graph

    return community_graph(args.nodes, args.edges, SEED)


def perceptron(args: argparse.Namespace) -> float:
    """Test accuracy, in percent, of an MLP of the same width trained on all training nodes."""
    data = community(args).node_data["_N"]
    feat, label, mask = data["feat"], data["label"], data["train_mask"]
    torch.manual_seed(SEED)
    classes = int(label.max()) + 1
    model = torch.nn.Sequential(
        torch.nn.Linear(feat.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, classes)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    best = 0.0
    for _ in range(args.epochs):
        logits = model(feat)
        optimizer.zero_grad()
        F.cross_entropy(logits[mask], label[mask]).backward()
        optimizer.step()
        right = logits.argmax(1) == label
        best = max(best, float(right[data["test_mask"]].float().mean()))
    return 100 * best


def alone(args: argparse.Namespace) -> dict:
    """Memory and seconds of the single-machine run, made in a fresh process."""
    words = ["--single-machine", "--nodes", args.nodes, "--edges", args.edges]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def single_machine(args: argparse.Namespace) -> None:
    """Three epochs in one process; prints peak and baseline resident memory and seconds as JSON."""
    make = with_dgl if HAS_DGL else with_one_rank
    arrays = community(args)
    data = arrays.node_data["_N"]
    feat, label, mask = data["feat"], data["label"], data["train_mask"]
    widths = [feat.shape[1]] + [HIDDEN] * (LAYERS - 1) + [int(label.max()) + 1]
    graph, layer, baseline = make(arrays)
    layers = torch.nn.ModuleList(layer(a, b) for a, b in zip(widths[:-1], widths[1:]))
    optimizer = torch.optim.Adam(layers.parameters(), lr=LR)
    del arrays
    forget_peak()
    begin = time.perf_counter()
    for _ in range(3):
        hidden = feat
        for i, one in enumerate(layers):
            hidden = one(graph, hidden if i == 0 else hidden.relu())
        optimizer.zero_grad()
        F.cross_entropy(hidden[mask], label[mask]).backward()
        optimizer.step()
    seconds = (time.perf_counter() - begin) / 3
    numbers = {"baseline_rss_mb": baseline, "peak_rss_mb": resident("VmHWM"), "seconds": seconds}
    print(json.dumps(numbers))


def with_dgl(arrays) -> tuple:
    """The graph, what makes a layer, and the memory of a process that has imported DGL."""
    import dgl
    from dgl.nn import SAGEConv

    baseline = resident("VmRSS")
    (edges,) = arrays.edges.values()
    graph = dgl.graph(edges, num_nodes=arrays.num_nodes["_N"]).formats("csc")
    return graph, partial(SAGEConv, aggregator_type="mean"), baseline


def with_one_rank(arrays) -> tuple:
    """The same of this library: a graph in one part."""
    import numba  # noqa: F401 (the first layer would, and its memory count as the layer's)

    import sar
    from sar.models import SAGEConv
    from sar.partition.write import write_partitions

    baseline = resident("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        whole = torch.zeros(arrays.num_nodes["_N"], dtype=torch.int64)
        data = sar.load_partition_data(write_partitions(arrays, whole, Path(folder) / "whole"))
        return sar.construct_full_graph(data), SAGEConv, baseline


def resident(field: str) -> float:
    """MiB of this process' VmRSS (now) or VmHWM (peak), from Linux' /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def forget_peak() -> None:
    """Start VmHWM anew, so that making the graph does not count as training on it."""
    Path("/proc/self/clear_refs").write_text("5")


def report(result: dict, mlp: float, single: dict) -> float:
    """Print the comparison; returns the points by which the graph beats the perceptron."""
    epochs, ranks = result["epochs"], result["ranks"]
    last = epochs[-1]
    best = max(epochs, key=lambda epoch: epoch["val_acc"])
    seconds = sorted(epoch["seconds"] for epoch in epochs)[len(epochs) // 2]
    gain = 100 * best["test_acc"] - mlp
    print(f"\nloss, first and last epoch        {epochs[0]['loss']:.4f}  {last['loss']:.4f}")
    for name in ("train", "val", "test"):
        print(f"{name + ' accuracy, last epoch':<33} {100 * last[name + '_acc']:.1f} %")
    print(f"test accuracy at best validation  {100 * best['test_acc']:.1f} %")
    print(f"test accuracy of the perceptron   {mlp:.1f} %")
    verdict = "beats" if gain >= 10 else "should beat, by 10 points and more,"
    print(f"GraphSAGE on {len(ranks)} ranks {verdict} the perceptron: {gain:+.1f} points.")
    alone = f"(one process, all cores: {single['seconds']:.2f})"
    print(f"seconds per epoch, median         {seconds:.2f}  {alone}")
    print("\nrank  peak memory MiB  above the imported process MiB  sent MiB")
    for rank in ranks:
        sent = rank["sent_bytes"] / MIB
        print(f"{rank['rank']:>4} {rank['peak_rss_mb']:>16.0f} {above(rank):>31.0f} {sent:>9.0f}")
    print(f" one {single['peak_rss_mb']:>16.0f} {above(single):>31.0f} {0:>9}   ({ALONE})")
    return gain


def above(numbers: dict) -> float:
    """MiB that the run took on top of the process with its libraries loaded."""
    return numbers["peak_rss_mb"] - numbers["baseline_rss_mb"]


def pictures(result: dict, single: dict, out: Path) -> None:
    """Draw learning.png (loss and accuracy) and memory.png (ranks against one process)."""
    from sar.pictures import save

    save(out / "learning.png", partial(draw_learning, result), (10, 4))
    save(out / "memory.png", partial(draw_memory, result, single), (7, 4.5))
    print(f"\nPictures: {out / 'learning.png'}, {out / 'memory.png'}")


def draw_learning(result: dict, figure, colors) -> None:
    """Loss and accuracy against the epoch."""
    from sar.pictures import read_run
    from sar.pictures.run import draw_loss, draw_scores

    left, right = figure.subplots(1, 2)
    draw_loss(left, read_run(result), colors)
    draw_scores(right, read_run(result), colors)


def draw_memory(result: dict, single: dict, figure, colors) -> None:
    """What training took in each rank, and in one process."""
    from sar.pictures.style import title

    runs = [(f"rank {rank['rank']}", above(rank)) for rank in result["ranks"]]
    runs.append((f"one process\n({ALONE})", above(single)))
    axes = figure.add_subplot()
    title(axes, "Peak memory", "above the process with its libraries loaded")
    hues = [colors.first] * len(result["ranks"]) + [colors.pale]
    bars = axes.bar([name for name, _ in runs], [value for _, value in runs], color=hues)
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_ylabel("MiB")


if __name__ == "__main__":
    sys.exit(main())
