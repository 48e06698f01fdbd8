"""Models that become unequal between ranks, and runs that are resumed on another graph."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import nn

import sar
from sar.comm import Group
from sar.train import NodeData, Trainer, TrainOptions


def model(rank: int = 0, seed: int = 0) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        for number, param in enumerate(made.parameters()):
            param.normal_(generator=torch.Generator().manual_seed(number + 100 * rank * seed))
    return made


def flip_a_bit(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.view(torch.int32).view(-1)[1] ^= 1 << 20  # not lost in rounding


@pytest.mark.parametrize("name", ["0.weight", "2.bias", "1.running_var"])
def test_one_bit_on_one_rank_is_named_on_all(name: str) -> None:
    def case(group: Group) -> str:
        mine = model()
        if group.rank == 1:
            flip_a_bit({**dict(mine.named_parameters()), **dict(mine.named_buffers())}[name])
        if "running" in name:
            sar.check(mine, buffers=False, group=group)
        with pytest.raises(sar.DriftError) as caught:
            sar.check(mine, group=group)
        return str(caught.value)

    first, *others = run_threads(3, case)
    assert others == [first] * 2
    assert f"model: {name} of rank 1 is not the same as rank 0's (1 of 9 tensors differ)" in first


def test_buffers_of_every_kind_are_compared() -> None:
    """Conjugate views, halves, flags, strides and nothing."""
    numbers = torch.arange(6.0).view(2, 3)
    kinds = [numbers.cfloat().conj(), numbers.bfloat16(), numbers > 2, numbers.t(), numbers[:0]]

    def case(group: Group) -> None:
        mine = model()
        sar.check(mine, group=group)
        for at, kind in enumerate(kinds):
            mine.register_buffer(f"kind{at}", kind)
        sar.check(mine, group=group)
        mine.kind0 = mine.kind0 + 1j * group.rank
        with pytest.raises(sar.DriftError, match="model: kind0 of rank 1 is not"):
            sar.check(mine, group=group)
        with pytest.raises(ValueError, match="expected equal names, shapes"):
            sar.check(nn.Linear(3, 2 + group.rank), group=group)

    run_threads(2, case)


@pytest.mark.parametrize("call", ["gather_grads", "overlap_gradients", "check"])
def test_a_norm_of_one_ranks_rows_is_told_once_in_any_loop(call: str) -> None:
    def case(group: Group) -> None:
        mine = model().train()
        for _ in range(3):
            getattr(sar, call)(mine, group=group)
        getattr(sar, call)(sar.convert_batch_norm(model().train()), group=group)
        getattr(sar, call)(model().eval(), group=group)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_threads(2, case)
        run_threads(1, case)
    words = [str(one.message) for one in told]
    assert len(words) == 1 and words[0].startswith("1 normalizes with each rank's own rows"), words


# ---------------------------------------------------------------- the trainer


def trainer(group: Group, path: str, folder: Path | None, epochs: int, **options: Any) -> Trainer:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    rows = torch.arange(graph.num_nodes())
    nodes = NodeData(
        torch.randn(len(rows), 6, generator=torch.Generator().manual_seed(group.rank)),
        rows % 2, {"train": rows, "val": rows, "test": rows}, 2, False,
    )  # fmt: skip
    return Trainer(
        WithoutGraph(), graph, nodes, TrainOptions(epochs=epochs, mfgs="off", **options),
        checkpoint=folder,
    )  # fmt: skip


class WithoutGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        with torch.no_grad():
            self.layer.weight.fill_(0.5)
            self.layer.bias.zero_()

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_the_trainer_notices_a_flipped_bit(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Group, every: int, last: int) -> int:
        one = trainer(group, path, None, last, check_every=every)
        train_epoch = one.train_epoch

        def then_flip() -> float:
            loss = train_epoch()
            if one.epoch == 4 and group.rank == 1:
                flip_a_bit(one.model.layer.weight)
            return loss

        one.train_epoch = then_flip  # type: ignore[method-assign]
        with pytest.raises(sar.DriftError, match="layer.weight of rank 1"):
            one.fit()
        return one.epoch

    assert run_threads(2, case, 3, 9) == [6, 6]
    assert run_threads(2, case, 25, 9) == [7, 7], "by the eighth sum of gradients"
    assert run_threads(2, case, 25, 6) == [6, 6], "at the end in any case"


def without_digests(path: str, folder: Path) -> str:
    """A copy as DGL would have written it."""
    import shutil

    shutil.copytree(Path(path).parent, folder)
    file = folder / Path(path).name
    content = json.loads(file.read_text())
    del content["sar"]
    file.write_text(json.dumps(content))
    return str(file)


def resume(ranks: int, path: str, folder: Path) -> list[str]:
    def case(group: Group) -> str:
        one = trainer(group, path, folder, 4)
        try:
            return f"epoch {one.resume()}"
        except ValueError as error:
            return str(error)

    return run_threads(ranks, case)


def test_another_graph_with_equal_counts_is_refused(partitioned: Cutter, tmp_path: Path) -> None:
    path, other = partitioned(mixed(), 2, "random"), partitioned(mixed(seed=7), 2, "random")
    run_threads(2, lambda group: trainer(group, path, tmp_path, 2).fit())
    assert resume(2, path, tmp_path) == ["epoch 2"] * 2
    first, second = resume(2, other, tmp_path)
    assert first == second and "made with another graph" in first
    with pytest.warns(UserWarning, match="but not bit for bit"):
        assert resume(3, partitioned(mixed(), 3, "random"), tmp_path) == ["epoch 2"] * 3
    other = partitioned(mixed(seed=7), 3, "random")
    assert "made with another graph" in resume(3, other, tmp_path)[0]


def test_partitions_without_digests(partitioned: Cutter, tmp_path: Path) -> None:
    path = without_digests(partitioned(mixed(), 2, "random"), tmp_path / "plain")
    three = without_digests(partitioned(mixed(), 3, "random"), tmp_path / "three")
    folder = tmp_path / "run"
    run_threads(2, lambda group: trainer(group, path, folder, 2).fit())
    assert resume(2, path, folder) == ["epoch 2"] * 2
    with pytest.warns(UserWarning, match="that it is the same one cannot be told"):
        assert resume(3, three, folder) == ["epoch 2"] * 3
    file = Path(path)
    content = json.loads(file.read_text())
    other = copy.deepcopy(content) | {"graph_name": "another"}
    file.write_text(json.dumps(other))
    assert "made with another graph" in resume(2, path, folder)[0]
