"""ShardedEmbedding: one table whatever the ranks; its gradients, steps, clipping and checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl import nn as dglnn
from harness import WorkerPool, assert_close, run_threads
from harness.graphs import NUM_FEATURES, shop, to_dgl
from harness.parts import Cutter, joined
from harness.training import local_train_nodes, train_nodes, whole_blocks
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.nn import ShardedEmbedding, ShardedParameter, clip_grad_norm_
from sar.nn.embedding import initial_rows
from sar.train import NodeData, Trainer, TrainOptions, load_embedding, save_embedding

LEARNED = ("tag", "user")  # items have features
STEPS = 4
SEED = 3
float64 = torch.float64


class Model(nn.Module):
    """Two layers over every relation; rows of some types are learned."""

    def __init__(self, tables: dict[str, nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)
        widths = (NUM_FEATURES, 5, 4)
        self.layers = nn.ModuleList(
            dglnn.HeteroGraphConv(
                {etype[1]: dglnn.SAGEConv(a, b, "mean") for etype in shop().edges}, "sum"
            )
            for a, b in zip(widths[:-1], widths[1:])
        )

    def forward(self, graphs: list[Any], h: dict[str, Tensor]) -> dict[str, Tensor]:
        h = {t: F.elu(rows) for t, rows in self.layers[0](graphs[0], h).items()}
        return self.layers[1](graphs[1], h)


def whole_table(ntype: str, sparse: bool) -> nn.Embedding:
    """The same table in one process."""
    rows = initial_rows(torch.arange(shop().num_nodes[ntype]), ntype, NUM_FEATURES, SEED)
    return nn.Embedding.from_pretrained(rows, freeze=False, sparse=sparse)


def start() -> dict[str, Tensor]:
    """Parameters of the layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model({}).double().state_dict()


def optimizers(model: Model, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "sparse":
        return [
            torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.05),
            torch.optim.Adam(model.layers.parameters(), lr=0.05),
        ]
    return [torch.optim.Adam(model.parameters(), lr=0.05)]


def optimize(
    model: Model, kind: str, loss: Any, gather: Any, clip: Any, steps: int, many: Any = None
) -> dict[str, dict[str, Tensor]]:
    """Some steps; the first gradient and the last rows of each table."""
    many = many or optimizers(model, kind)
    first: dict[str, Tensor] = {}
    for step in range(steps):
        for one in many:
            one.zero_grad()
        loss().backward()
        gather(model)
        clip(model)
        if step == 0:
            first = {t: dense(table.weight.grad) for t, table in model.tables.items()}
        for one in many:
            one.step()
    last = {t: table.weight.detach().clone() for t, table in model.tables.items()}
    return {"first": first, "last": last}


def dense(grad: Tensor) -> Tensor:
    return (grad.to_dense() if grad.is_sparse else grad).clone()


def case(group: Any, path: str, kind: str, mfgs: bool, state: dict, limit: float | None) -> dict:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    if mfgs:
        graphs = sar.construct_mfgs(data, local_train_nodes(data), 2)
    else:
        graphs = [sar.construct_full_graph(data)] * 2
    sparse = kind == "sparse"
    options = {"sparse": sparse, "seed": SEED, "dtype": float64}
    model = Model({t: ShardedEmbedding(graphs[0], t, NUM_FEATURES, **options) for t in LEARNED})
    model.double().load_state_dict(state, strict=False)
    model = copy.deepcopy(model)
    before = [table.weight.clone() for table in model.tables.values()]
    sar.sync_params(model)
    after = [table.weight for table in model.tables.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after)), "sync_params touched rows"
    items = data.node_features["item/feat"].double()[graphs[0].srcnodes("item")]
    ids = {t: data.node_features[f"{t}/orig_id"] for t in data.book.ntypes}

    def loss() -> Tensor:
        rows = {t: model.tables[t](graphs[0]) for t in LEARNED} | {"item": items}
        parts = []
        for ntype, out in sorted(model(graphs, rows).items()):
            dst = graphs[1].dstnodes(ntype)
            mask = data.node_features[f"{ntype}/train_mask"][dst].bool()
            labels = data.node_features[f"{ntype}/label"][dst]
            parts.append(sar.global_mean(F.cross_entropy(out, labels, reduction="none"), mask))
        return torch.stack(parts).sum()

    def clip(net: nn.Module) -> None:
        if limit is not None:
            clip_grad_norm_(net, limit)

    found = optimize(model, kind, loss, sar.gather_grads, clip, STEPS)
    return found | {"ids": ids, "layers": model.layers.state_dict()}


def reference(kind: str, mfgs: bool, limit: float | None) -> dict:
    whole = to_dgl(shop())
    graphs = whole_blocks(whole, train_nodes(whole), 2) if mfgs else [whole, whole]
    model = Model({t: whole_table(t, kind == "sparse") for t in LEARNED}).double()
    model.load_state_dict(start(), strict=False)

    def loss() -> Tensor:
        src, dst = graphs[0].srcnodes, graphs[1].dstnodes
        rows = {t: model.tables[t](src[t].data["orig_id"]) for t in LEARNED}
        rows["item"] = src["item"].data["feat"].double()
        parts = []
        for ntype, out in sorted(model(graphs, rows).items()):
            mask, labels = dst[ntype].data["train_mask"], dst[ntype].data["label"]
            parts.append(F.cross_entropy(out[mask], labels[mask]))
        return torch.stack(parts).sum()

    def clip(net: nn.Module) -> None:
        if limit is not None:
            nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], limit)

    found = optimize(model, kind, loss, lambda net: None, clip, STEPS)
    return found | {"layers": model.layers.state_dict()}


def by_id(parts: list[dict], key: str, ntype: str) -> Tensor:
    ids = [part["ids"][ntype] for part in parts]
    return joined([part[key][ntype] for part in parts], ids, shop().num_nodes[ntype])


SETTINGS: list[tuple[int, str, str, bool, float | None]] = [
    (1, "coarsen", "dense", False, None),
    (2, "random", "sparse", False, None),
    (3, "coarsen", "sparse", True, None),  # in processes
    (4, "adversarial", "dense", True, 0.05),
    (8, "random", "dense", False, 0.05),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_steps_equal_one_process(
    setting: tuple, partitioned: Cutter, processes: WorkerPool
) -> None:
    """First gradients, and rows and layers after some steps."""
    size, method, kind, mfgs, limit = setting
    want = reference(kind, mfgs, limit)
    path = partitioned(shop(), size, method)
    run = processes.run if size == 3 else run_threads
    parts = run(size, case, path, kind, mfgs, start(), limit)
    for ntype in LEARNED:
        for key, allowed in (("first", float64), ("last", torch.float32)):
            got = by_id(parts, key, ntype)
            assert_close(got, want[key][ntype], f"{key} of {ntype}", allowed)  # Adam amplifies
    for part in parts:
        for name, value in part["layers"].items():
            assert_close(value, want["layers"][name], name, torch.float32)


def rows_of(group: Any, path: str, options: dict) -> dict:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    block = sar.construct_mfgs(data, local_train_nodes(data), 1)[0]
    table = ShardedEmbedding(graph, "user", 3, **options)
    assert isinstance(table.weight, ShardedParameter) and len(table.weight) == len(table.ids)
    assert torch.equal(ShardedEmbedding(block, "user", 3, **options).weight, table.weight)
    assert torch.equal(table(block), table()[block.srcnodes("user")])
    return {"ids": {"user": table.ids}, "rows": {"user": table.weight.detach()}}


def test_rows_start_alike_on_any_number_of_ranks(partitioned: Cutter) -> None:
    tables = [
        by_id(
            run_threads(size, rows_of, partitioned(shop(), size, cut), {"seed": 5}), "rows", "user"
        )
        for size, cut in ((1, "coarsen"), (3, "random"), (8, "adversarial"))
    ]
    assert all(torch.equal(tables[0], table) for table in tables)
    other = run_threads(1, rows_of, partitioned(shop(), 1, "coarsen"), {"seed": 6, "bound": 0.5})
    assert len(tables[0].unique()) == tables[0].numel()
    assert not torch.isin(by_id(other, "rows", "user"), tables[0]).any()
    assert 0.4 < float(by_id(other, "rows", "user").abs().max()) <= 0.5


def test_a_sparse_step_touches_the_rows_of_its_block(partitioned: Cutter) -> None:
    """A step with few seeds leaves all rows alone that their block does not read."""

    def case(group: Any, path: str) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        start_nid = int(data.book.node_ranges["item"][group.rank, 0])
        block = sar.construct_mfgs(data, torch.arange(start_nid, start_nid + 1), 1)[0]
        table = ShardedEmbedding(block, "user", 3, sparse=True)
        before = table.weight.detach().clone()
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        block["buys"].aggregate(table(block), "sum").sum().backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
        read = block.srcnodes("user")[block.out_degrees(etype="buys") > 0]
        moved = (table.weight != before).any(1).nonzero().view(-1)
        assert torch.equal(moved, read.sort().values) and len(moved) < len(before)

    run_threads(2, case, partitioned(shop(), 2, "random"))


# Checkpoints.


def case_save(group: Any, path: str, folder: Path, kind: str) -> dict:
    table, optimizer, target = table_and_steps(group, path, kind)
    steps(table, optimizer, target, 3)
    save_embedding(folder, table, optimizer)
    return after(table, optimizer, target)


def case_load(group: Any, path: str, folder: Path, kind: str) -> dict:
    table, optimizer, target = table_and_steps(group, path, kind, seed=1)
    load_embedding(folder, table, optimizer)
    return after(table, optimizer, target)


def after(table: Any, optimizer: Any, target: Tensor) -> dict:
    steps(table, optimizer, target, 2)
    return {"ids": {"user": table.ids}, "rows": {"user": table.weight.detach()}}


def table_and_steps(group: Any, path: str, kind: str, seed: int = 0) -> tuple:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    table = ShardedEmbedding(
        sar.construct_full_graph(data), "user", 3, sparse=kind == "SparseAdam", seed=seed
    )
    optimizer = getattr(torch.optim, kind)(table.parameters(), lr=0.1)
    return table, optimizer, initial_rows(table.ids, "target", 3).float()


def steps(table: nn.Module, optimizer: Any, target: Tensor, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        (table() - target).pow(3).abs().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["Adam", "SparseAdam", "SGD"])
def test_a_checkpoint_fits_any_number_of_ranks(
    kind: str, partitioned: Cutter, tmp_path: Path
) -> None:
    """Rows and the optimizer's state go on where they were, bit for bit; what a killed save of this
    table was writing is removed."""
    folder, others = tmp_path / "run", ["other.00ff.0.pt.partial", "user.partial"]
    folder.mkdir()
    for name in ("user.00ff.0.pt.partial", "user.00ff.1.pt.partial", *others):
        (folder / name).write_text("half")
    for _ in range(2):  # the second takes the place of the first
        saved = run_threads(3, case_save, partitioned(shop(), 3, "random"), folder, kind)
    assert sorted(one.name for one in folder.glob("*.partial")) == others
    assert sorted(p.name.count(".") for p in folder.glob("*.pt")) == [1, 3, 3, 3]
    want = by_id(saved, "rows", "user")
    for size, method in ((1, "coarsen"), (4, "adversarial"), (8, "random")):
        parts = run_threads(size, case_load, partitioned(shop(), size, method), folder, kind)
        assert torch.equal(by_id(parts, "rows", "user"), want)


class Bomb:
    def __reduce__(self) -> tuple:
        return (print, ("boom",))


def case_refused(group: Any, path: str, folder: Path, words: str, dim: int = 3) -> None:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    table = ShardedEmbedding(sar.construct_full_graph(data), "user", dim)
    before = table.weight.detach().clone()
    with pytest.raises(ValueError, match=words):
        load_embedding(folder, table)
    assert torch.equal(table.weight, before)


def test_unusable_checkpoints_are_refused_on_every_rank(
    partitioned: Cutter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = partitioned(shop(), 2, "random")
    run_threads(2, case_refused, path, tmp_path / "none", "no checkpoint of an embedding")
    folder = tmp_path / "run"
    run_threads(2, case_save, path, folder, "SGD")
    run_threads(2, case_refused, path, folder, "got dim 3, expected 4", 4)
    (shard,) = folder.glob("user.*.1.pt")
    torch.save(Bomb(), shard)
    run_threads(2, case_refused, path, folder, "damaged, or not a checkpoint")
    assert "boom" not in capsys.readouterr().out
    shard.unlink()
    run_threads(2, case_refused, path, folder, "no checkpoint")


def test_a_save_that_fails_leaves_the_old_one(
    partitioned: Cutter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 cannot write: every rank raises, and the folder still holds what it held."""
    from sar.train import embedding as module

    path, folder, write = partitioned(shop(), 2, "random"), tmp_path / "run", module.write_sealed
    saved = run_threads(2, case_save, path, folder, "SGD")

    def failing(where: Path, content: dict) -> None:
        if where.name.endswith(".1.pt"):
            raise OSError("disk full")
        write(where, content)

    def case(group: Any) -> None:
        table, optimizer, _ = table_and_steps(group, path, "SGD", seed=9)
        with pytest.raises(OSError, match=r"rank 1: disk full"):
            save_embedding(folder, table, optimizer)

    monkeypatch.setattr(module, "write_sealed", failing)
    run_threads(2, case)
    parts = run_threads(2, case_load, path, folder, "SGD")
    assert torch.equal(by_id(parts, "rows", "user"), by_id(saved, "rows", "user"))


BAD: list[tuple[type, str, Any]] = [
    (TypeError, "graph: got DGLGraph", lambda g: ShardedEmbedding(to_dgl(shop()), "user", 3)),
    (ValueError, "'nobody', expected one of .*tag", lambda g: ShardedEmbedding(g, "nobody", 3)),
    (ValueError, "dim: got 0", lambda g: ShardedEmbedding(g, "user", 0)),
    (ValueError, "max_norm: got -1", lambda g: clip_grad_norm_(nn.Linear(1, 1), -1)),
    (TypeError, "max_norm: got str", lambda g: clip_grad_norm_(nn.Linear(1, 1), "1")),
    (TypeError, "model: got NoneType", lambda g: sar.sync_params(None)),
]


def test_bad_arguments(partitioned: Cutter) -> None:
    def case(group: Any, path: str) -> None:
        graph = sar.construct_full_graph(sar.load_dgl_partition_data(path, group.rank, "cpu"))
        for kind, words, call in BAD:
            with pytest.raises(kind, match=words):
                call(graph)

    run_threads(2, case, partitioned(shop(), 2, "random"))


def test_the_trainer_writes_no_rows_that_it_would_not_find(tmp_path: Path) -> None:
    """Those of tables it does: tests/test_train_hetero.py."""
    model = nn.Module()
    model.rows = ShardedParameter(torch.zeros(3, 2))
    nodes = NodeData(torch.zeros(1, 1), torch.zeros(1).long(), {}, 2, False)
    with pytest.raises(sar.NotSupportedError, match="'rows', whose rows .* no ShardedEmbedding"):
        Trainer(model, None, nodes, TrainOptions(), checkpoint=tmp_path)
