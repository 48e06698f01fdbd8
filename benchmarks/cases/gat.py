"""Accuracy of graph attention on the citation graphs."""

from __future__ import annotations

from statistics import mean, stdev

from benchmarks.cases.real import CURVES, EPOCHS, RANKS, SEEDS, prepare_citation
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

TASK = "benchmarks.tasks.gat:GatCitation"
FLOORS = {"cora": 0.815, "pubmed": 0.77}
CURVE, CURVE_EPOCHS = "cora", 50
RECIPES = {
    "cora": {"out_heads": 1, "rate": 0.005, "decay": 5e-4},
    "pubmed": {"out_heads": 8, "rate": 0.01, "decay": 1e-3},
}


@benchmark("gat", "edges")
def gat(options: Options) -> Report:
    """Test accuracy of a GAT on Cora and Pubmed on 4 ranks; loss curves of 1 and 4.

    The paper's two layers (8 heads of 8, dropout 0.6 on features and attention, elu), features and
    splits as in `real`, accuracy after the last of 200 epochs, seeds 0 to 4. The curves are those
    of the first epochs on Cora, dropout included: its masks do not depend on the cut.
    """
    folder = options.data
    if folder is None or not all((folder / f"{name}.npz").is_file() for name in FLOORS):
        return Report(skipped="pass --data or set SAR_DATA: cora.npz, pubmed.npz")
    table = Table("Accuracies by seed", ["data set", *(f"seed {seed}" for seed in SEEDS), "stdev"])
    report = Report(tables=[table])
    with Cluster(TASK, environment=LAUNCH) as one, Cluster(TASK, RANKS, environment=LAUNCH) as many:
        for name, floor in FLOORS.items():
            graph = prepare_citation(options, folder / f"{name}.npz")
            many.call("load", parts=str(graph.parts["metis", RANKS]))
            accuracies = []
            for seed in SEEDS:
                result = many.call("fit_gat", seed=seed, epochs=EPOCHS, **RECIPES[name])[0]
                accuracies.append(result["accuracy"])
            table.rows.append([name, *accuracies, stdev(accuracies)])
            report.figures.append(
                Figure(f"{name}: mean test accuracy", mean(accuracies), at_least=floor)
            )
            if name == CURVE:
                one.call("load", parts=str(graph.parts["random", 1]))
                recipe = {"seed": 0, "epochs": CURVE_EPOCHS, **RECIPES[name]}
                curves = [cluster.call("fit_gat", **recipe)[0]["losses"] for cluster in (one, many)]
                apart = max(abs(a - b) for a, b in zip(*curves))
                report.figures.append(
                    Figure(f"{name}: loss curves of 1 and {RANKS} ranks", apart, at_most=CURVES)
                )
    return report
