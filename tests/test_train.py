"""The trainer, its data and its metrics, on ranks that are threads."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.graphs import GraphArrays, community
from harness.parts import PartitionData, write_partitions
from torch import Tensor

import sar
from sar.comm import Group, ThreadGroup
from sar.errors import SarError
from sar.train import (
    DataOptions,
    ModelOptions,
    NodeData,
    Trainer,
    TrainOptions,
    build_model,
    load_node_data,
    score,
)

NODES, CLASSES, WIDTH = 120, 4, 6


def graph() -> GraphArrays:
    return community(NODES, 900, 3, classes=CLASSES, features=WIDTH)


def cut(arrays: GraphArrays, parts: int, folder: Path, empty: int | None = None) -> str:
    """Random parts; the training nodes of part ``empty`` are taken away."""
    home = np.random.default_rng(0).integers(0, parts, NODES)
    if empty is not None:
        mask = arrays.node_data["_N"]["train_mask"]
        mask[torch.from_numpy(home == empty)] = False
    return write_partitions(arrays, home, folder / f"parts{parts}", num_parts=parts)


def on_ranks(json_path: str, size: int, case) -> list:
    def rank(group: Group):
        return case(group, sar.load_dgl_partition_data(json_path, group.rank, "cpu"))

    return ThreadGroup.run(size, rank, timeout=60)


# ---------------------------------------------------------------- data


def with_fields(tmp_path: Path, **fields: Tensor) -> str:
    arrays = graph()
    arrays.node_data["_N"].update(fields)
    return cut(arrays, 2, tmp_path)


def load(json_path: str, **options: object) -> list[NodeData]:
    return on_ranks(json_path, 2, lambda group, part: load_node_data(part, DataOptions(**options)))


def original_rows(json_path: str) -> Tensor:
    parts = on_ranks(json_path, 2, lambda group, part: part.node_features["_N/orig_id"])
    return torch.cat(parts)


def test_data_of_all_ranks_is_the_graphs(tmp_path: Path) -> None:
    path = with_fields(tmp_path)
    ranks, order = load(path), original_rows(path)
    data = graph().node_data["_N"]
    assert torch.equal(torch.cat([rank.features for rank in ranks]), data["feat"][order])
    assert torch.equal(torch.cat([rank.labels for rank in ranks]), data["label"][order])
    assert {rank.num_classes for rank in ranks} == {CLASSES}
    for split in ("train", "val", "test"):
        counted = sum(len(rank.rows[split]) for rank in ranks)
        assert counted == int(data[f"{split}_mask"].sum()) > 0


def test_nan_and_minus_one_are_no_labels(tmp_path: Path) -> None:
    labels = graph().node_data["_N"]["label"].float()
    labels[::3] = float("nan")
    labels[1] = -1
    labels[2] = 9  # of one rank
    path = with_fields(tmp_path, year=labels[:, None])
    ranks, order = load(path, labels="year"), original_rows(path)
    loaded = torch.cat([rank.labels for rank in ranks])
    assert torch.equal(loaded, labels.nan_to_num(nan=-1.0).long()[order])
    assert [rank.num_classes for rank in ranks] == [10, 10]
    for rank in ranks:
        assert all(bool((rank.labels[rows] >= 0).all()) for rows in rank.rows.values())


def test_features_arrive_as_float32_whose_rows_sum_to_one(tmp_path: Path) -> None:
    half = torch.rand(NODES, WIDTH).half()
    half[5] = 0  # stays
    path = with_fields(tmp_path, half=half)
    order = original_rows(path)
    for normalize, expected in ((False, half.float()), (True, F.normalize(half.float(), p=1))):
        ranks = load(path, features="half", normalize_features=normalize)
        loaded = torch.cat([rank.features for rank in ranks])
        assert loaded.dtype == torch.float32
        torch.testing.assert_close(loaded, expected[order])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": "nope"}, "features: got 'nope', expected one of .*feat, .*label"),
        ({"labels": "nope"}, "labels: got 'nope', expected one of"),
        ({"features": "label"}, r"features: 'label' has shape .* expected \[n, F\]"),
        ({"labels": "feat"}, "multilabel"),
        ({"labels": "feat", "multilabel": True}, "other values than 0, 1 and NaN"),
        ({"labels": "fraction"}, "fractions"),
        ({"labels": "negative"}, "holds -2"),
        ({"labels": "large"}, "class 1000000000000"),
    ],
)
def test_bad_fields_are_the_same_error_on_every_rank(
    tmp_path: Path, options: dict, words: str
) -> None:
    values = {"fraction": 0.5, "negative": -2, "large": 10**12}
    path = with_fields(tmp_path, **{k: torch.full((NODES,), v) for k, v in values.items()})

    def case(group: Group, part: PartitionData) -> str:
        with pytest.raises(ValueError, match=words) as caught:
            load_node_data(part, DataOptions(**options))
        return str(caught.value)

    messages = on_ranks(path, 2, case)
    assert messages[0] == messages[1] and messages[0].startswith("rank 0: ")


def test_a_field_missing_on_one_rank_is_every_ranks_error(tmp_path: Path) -> None:
    def case(group: Group, part: PartitionData) -> str:
        if group.rank == 1:
            del part.node_features["_N/train_mask"]
        with pytest.raises(ValueError, match="rank 1: mask: got 'train_mask'") as caught:
            load_node_data(part, DataOptions())
        return str(caught.value)

    assert len(set(on_ranks(with_fields(tmp_path), 2, case))) == 1


# ---------------------------------------------------------------- metrics

SPLITS = [[30], [11, 19], [0, 30], [7, 0, 23]]


def scored(metric: str, logits: Tensor, labels: Tensor, splits: list[int]) -> float:
    def case(group: Group) -> float:
        return score(metric, logits.split(splits)[group.rank], labels.split(splits)[group.rank])

    values = ThreadGroup.run(len(splits), case, timeout=20)
    assert len({str(value) for value in values}) == 1
    return values[0]


def naive_auc(scores: Tensor, truth: Tensor) -> float:
    pairs = [
        (p > n) + 0.5 * (p == n)
        for p in scores[truth == 1].tolist()
        for n in scores[truth == 0].tolist()
    ]
    return sum(pairs) / len(pairs)


def naive_f1(guess: Tensor, truth: Tensor) -> tuple[float, float]:
    """(micro, macro) of 0/1 matrices, entry by entry."""
    table = []
    for c in range(truth.shape[1]):
        entries = [
            (g, t) for g, t in zip(guess[:, c].tolist(), truth[:, c].tolist()) if not math.isnan(t)
        ]
        table.append([entries.count((1, 1)), entries.count((1, 0)), entries.count((0, 1))])
    one = [2 * t / (2 * t + f + m) for t, f, m in table if t + f + m]
    t, f, m = (sum(row[i] for row in table) for i in range(3))
    return 2 * t / (2 * t + f + m), sum(one) / len(one)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_metrics_of_classes(splits: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 5, generator=generator)
    labels = torch.randint(0, 4, (30,), generator=generator)  # class 4 is only ever predicted
    guess = logits.argmax(1)
    micro, macro = naive_f1(F.one_hot(guess, 5), F.one_hot(labels, 5).float())
    for name in ("accuracy", "ogb-acc"):
        assert scored(name, logits, labels, splits) == float((guess == labels).double().mean())
    assert scored("f1-micro", logits, labels, splits) == pytest.approx(micro, abs=1e-12)
    assert scored("f1-macro", logits, labels, splits) == pytest.approx(macro, abs=1e-12)
    chances = logits.double().softmax(1)
    rest = [naive_auc(chances[:, c], (labels == c).long()) for c in range(4)]
    assert scored("roc-auc", logits, labels, splits) == pytest.approx(sum(rest) / 4, abs=1e-12)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_metrics_of_labels_with_unknown_ones(splits: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 3, generator=generator).round(decimals=0)  # many ties
    labels = torch.randint(0, 2, (30, 3), generator=generator).float()
    labels[torch.rand(30, 3, generator=generator) < 0.2] = float("nan")
    guess, known = (logits > 0).float(), ~labels.isnan()
    micro, macro = naive_f1(guess, labels)
    expected = float((guess == labels)[known].double().mean())
    assert scored("accuracy", logits, labels, splits) == pytest.approx(expected, abs=1e-12)
    assert scored("f1-micro", logits, labels, splits) == pytest.approx(micro, abs=1e-12)
    assert scored("f1-macro", logits, labels, splits) == pytest.approx(macro, abs=1e-12)
    auc = [naive_auc(logits[:, c], labels[:, c]) for c in range(3)]
    assert scored("roc-auc", logits, labels, splits) == pytest.approx(sum(auc) / 3, abs=1e-12)
    more = [torch.cat([rows, torch.ones(30, 1)], 1) for rows in (logits, labels)]  # of one value
    assert scored("ogb-rocauc", *more, splits) == pytest.approx(sum(auc) / 3, abs=1e-12)


def test_auc_of_two_classes_is_that_of_the_second() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, -1.0], [0.0, 3.0]])
    labels = torch.tensor([0, 0, 1, 1])
    expected = naive_auc(logits[:, 1] - logits[:, 0], labels)
    assert scored("roc-auc", logits, labels, [1, 3]) == expected


def test_a_metric_of_nothing_is_undefined() -> None:
    empty = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    for metric in ("accuracy", "f1-micro", "f1-macro", "roc-auc"):
        assert math.isnan(scored(metric, *empty, [0, 0]))
    with pytest.raises(ValueError, match="metric: got 'mrr', expected one of accuracy"):
        score("mrr", *empty)
    with pytest.raises(ValueError, match="'ogb-rocauc' and classes, expected multilabel"):
        score("ogb-rocauc", *empty)


# ---------------------------------------------------------------- trainer


def train(
    folder: Path, ranks: int, model: ModelOptions, options: TrainOptions, empty: int | None = None
) -> list[list[dict]]:
    """Histories of all ranks; the first parameters are the same whatever ``ranks`` is."""
    torch.manual_seed(0)
    first = build_model(model, WIDTH, CLASSES)

    def case(group: Group, part: PartitionData) -> list[dict]:
        data = load_node_data(part, DataOptions())
        trainer = Trainer(copy.deepcopy(first), sar.construct_full_graph(part), data, options)
        return trainer.fit()

    path = cut(graph(), ranks, folder, empty)
    return on_ranks(path, ranks, case)


def without_seconds(history: list[dict]) -> list[dict]:
    return [{name: record[name] for name in record if name != "seconds"} for record in history]


@pytest.mark.parametrize(
    ("name", "batch_norm"), [("sage", True), ("gcn", False), ("gin", True), ("gat", False)]
)
def test_one_and_three_ranks_learn_alike(tmp_path: Path, name: str, batch_norm: bool) -> None:
    model = ModelOptions(name, 2, 8, batch_norm=batch_norm)
    options = TrainOptions(epochs=12, lr=0.01, weight_decay=1e-4, schedule="cosine", clip_norm=1.0)
    (alone,) = train(tmp_path, 1, model, options)
    together = train(tmp_path, 3, model, options)
    assert all(without_seconds(one) == without_seconds(together[0]) for one in together)
    for one, other in zip(alone, together[0], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert [record["epoch"] for record in alone] == list(range(1, 13))
    assert alone[-1]["loss"] < 0.98 * alone[0]["loss"]
    assert set(alone[0]) == {
        "epoch", "loss", "lr", "seconds",
        *(f"{split}_{name}" for split in ("train", "val", "test") for name in ("acc", "accuracy")),
    }  # fmt: skip


def test_a_rank_without_training_nodes(tmp_path: Path) -> None:
    options = TrainOptions(epochs=3, eval_every=2)
    model = ModelOptions("sage", 2, 8, batch_norm=True)
    history = train(tmp_path, 2, model, options, empty=1)[1]
    assert history[-1]["loss"] < history[0]["loss"]
    assert [record["val_acc"] is None for record in history] == [True, False, False]


def test_two_runs_are_bit_identical(tmp_path: Path) -> None:
    """With dropout on one rank; threads of one process share torch's generator."""
    options = TrainOptions(epochs=5, seed=7)
    model = ModelOptions("sage", 2, 8, dropout=0.5)
    runs = [train(tmp_path / str(i), 1, model, options)[0] for i in range(2)]
    assert without_seconds(runs[0]) == without_seconds(runs[1])
    other = train(tmp_path / "other", 1, model, TrainOptions(epochs=5, seed=8))[0]
    assert other[0]["loss"] != runs[0][0]["loss"]


class Linear(torch.nn.Module):
    """Needs no graph."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, outputs)

    def forward(self, graph: None, x: Tensor) -> Tensor:
        return self.linear(x)


def rows(count: int, labels: Tensor) -> NodeData:
    idx = torch.arange(count)
    features = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    splits = {"train": idx, "val": idx[:0], "test": idx}
    return NodeData(features, labels, splits, 2, labels.dim() == 2)


def test_nan_loss_stops_every_rank_and_names_the_epoch() -> None:
    def case(group: Group) -> tuple[str, bool]:
        data = rows(4, torch.tensor([0, 1, 0, 1]))
        trainer = Trainer(Linear(), None, data, TrainOptions(epochs=5))
        trainer.train_epoch()
        trainer.epoch = 1
        if group.rank == 1:
            data.features[0, 0] = float("nan")
        with pytest.raises(SarError, match="epoch 2: the loss is nan") as caught:
            trainer.fit()
        finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters())
        return str(caught.value), finite

    outcomes = ThreadGroup.run(2, case, timeout=20)
    assert outcomes[0] == outcomes[1] and outcomes[0][1]


def test_multilabel_loss_leaves_unknown_labels_out() -> None:
    labels = torch.tensor([[0, 1], [1, float("nan")], [float("nan"), 0]])

    def case(group: Group) -> tuple[float, float, list[dict]]:
        trainer = Trainer(Linear(), None, rows(3, labels), TrainOptions(epochs=2))
        logits, known = trainer.predict(), ~labels.isnan()
        expected = F.binary_cross_entropy_with_logits(logits[known], labels[known])
        return float(trainer.loss(logits)), float(expected), trainer.fit()

    for loss, expected, history in ThreadGroup.run(2, case, timeout=20):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert history[-1]["loss"] < history[0]["loss"] and history[0]["val_acc"] is None


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ModelOptions, {"model": "gta"}, "model: got 'gta', expected one of sage, gcn, gin, gat"),
        (TrainOptions, {"metric": "mrr"}, "metric: got 'mrr'"),
        (TrainOptions, {"seed": -1}, "seed: got -1"),
    ],
)
def test_options_say_what_is_wrong(kind: type, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**options)
