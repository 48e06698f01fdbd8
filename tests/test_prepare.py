"""``sar.prepare``: one call in place of several, which says what it did."""

from __future__ import annotations

import copy
import logging
import pickle
from functools import partial
from typing import Any

import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.graphs import NUM_CLASSES, NUM_FEATURES, hetero, mixed
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.comm import Group


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(NUM_FEATURES, 8, "mean", feat_drop=0.5)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = dgl.nn.DotGatConv(8, NUM_CLASSES, 1, allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(graph, x)).relu())
        return self.last(graph, hidden).squeeze(1)


def part(path: str) -> tuple[Any, Tensor, Tensor]:
    """The graph, features and original ids of this rank."""
    data = sar.load_partition_data(path)
    nodes = data.node_features
    return sar.construct_full_graph(data), nodes["_N/feat"], nodes["_N/orig_id"]


def test_a_prepared_model_is_the_same_on_any_number_of_ranks(partitioned: Cutter) -> None:
    def case(group: Group, path: str, prepared: bool) -> tuple[Tensor, Tensor]:
        graph, x, ids = part(path)
        model = copy.deepcopy(models[group.rank])
        params = list(model.parameters())
        if prepared:
            assert sar.prepare(model, graph) is model
            assert sar.prepare(model, graph) is model, "twice is once"
        else:
            model = sar.convert_dropout(sar.convert_batch_norm(model), graph)
            sar.sync_params(model)
        assert [id(p) for p in model.parameters()] == [id(p) for p in params]
        sar.manual_seed(3)
        return model(graph, x).detach(), ids

    def joined(size: int, prepared: bool) -> Tensor:
        path = partitioned(mixed(), size, "random")
        found = run_threads(size, case, path, prepared)
        return torch.cat([rows for rows, _ in found])[torch.cat([i for _, i in found]).argsort()]

    models = [Model() for _ in range(3)]  # each rank begins with others
    want = joined(1, prepared=False)
    for size in (1, 2, 3):
        torch.testing.assert_close(joined(size, prepared=True), want, rtol=1e-4, atol=1e-5)


def test_it_says_once_what_it_did(partitioned: Cutter, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nobody has set up logging, unless somebody silences the library's logger."""
    path, logger = partitioned(mixed(), 2, "random"), logging.getLogger("sar")

    def case(group: Group) -> None:
        graph, *_ = part(path)
        model = Model()
        for _ in range(2):
            sar.prepare(model, graph)
        sar.prepare(copy.deepcopy(model), graph)
        assert len(pickle.loads(pickle.dumps(model))._forward_pre_hooks) == 2

    def heard() -> str:
        run_threads(2, case)
        return capsys.readouterr().err

    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    root.handlers.clear()  # pytest's own
    try:
        text = heard()
        logger.setLevel(logging.WARNING)
        assert heard() == ""
    finally:
        root.handlers[:] = handlers
        logger.setLevel(logging.NOTSET)
    number = sum(p.numel() for p in Model().parameters())
    first, *layers = text.splitlines()
    assert first == (
        f"Model on 2 ranks: {number} parameters in 6 tensors synchronized from rank 0, "
        "batch norms converted: 1, dropouts converted: 2"
    )
    assert layers == [
        "  SAGEConv x 1: fused where graph and inputs allow",
        "  DotGatConv x 1: its own code: no fused layer stands for it",
    ]


def test_strict_refuses_what_is_not_fused(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 1)

    def case(group: Group) -> None:
        graph, *_ = part(path)
        layer = dgl.nn.GraphConv(2, 2)
        layer.forward = lambda graph, x: x
        with pytest.raises(sar.NotSupportedError, match="a forward of its own"):
            sar.prepare(nn.ModuleList([layer]), graph, strict=True)
        for model, given, match in (
            (len, graph, "model: got builtin"),
            (layer, 3, "graph: got int, expected a sharded graph or a list of blocks"),
            (layer, [], "graph: got list"),
        ):
            with pytest.raises(TypeError, match=match):
                sar.prepare(model, given)  # type: ignore[type-var]

    run_threads(1, case)


def test_blocks_and_graphs_at_the_call(partitioned: Cutter) -> None:
    """A model that was prepared with the whole graph is called with blocks as well, and without
    any graph: dropout knows the rows."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.conv = dgl.nn.SAGEConv(NUM_FEATURES, NUM_CLASSES, "mean")

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return self.conv(graph[0] if isinstance(graph, list) else graph, self.drop(x))

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"]
        model = sar.prepare(Blocks(), graph)
        first = data.node_ranges[group.rank][0]
        seeds = torch.arange(first, first + 5)
        blocks = sar.construct_mfgs(data, seeds, 1)
        sar.manual_seed(1)
        whole = model(graph, x)
        sar.manual_seed(1)
        some = model(blocks, x[blocks[0].input_nodes])
        torch.testing.assert_close(some, whole[:5])
        sar.manual_seed(1)
        alone = model.drop(x)
        sar.manual_seed(1)
        assert torch.equal(alone, sar.nn.Dropout(0.5, graph)(x)) and (alone == 0).any()

    run_threads(2, case, partitioned(mixed(), 2, "random"))


def test_graphs_of_several_types(partitioned: Cutter) -> None:
    def case(group: Group, path: str) -> list[int]:
        graph = sar.construct_full_graph(sar.load_partition_data(path))
        layer = partial(dgl.nn.SAGEConv, NUM_FEATURES, NUM_CLASSES, "mean", feat_drop=0.5)
        model = dgl.nn.HeteroGraphConv({etype: layer() for etype in graph.etypes})
        sar.prepare(model, graph)
        sar.check(model)
        x = {name: torch.ones(graph.num_nodes(name), NUM_FEATURES) for name in graph.ntypes}
        return [rows.shape[1] for rows in model(graph, x).values()]

    found = run_threads(2, case, partitioned(hetero(), 2, "random"))
    assert found[0] == found[1] and set(found[0]) == {NUM_CLASSES}
