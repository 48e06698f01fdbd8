"""Scripts in the style of IntelLabs SAR: its names, arguments and meaning, against DGL."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import assert_close, assert_gradients_close, run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, looped, to_dgl
from harness.parts import Cutter, Partitioned, joined, load_all
from torch import Tensor, nn

import sar
from sar.comm import Group

dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2

SUBMODULES = {
    "comm": "all_reduce all_to_all comm_device exchange_single_tensor exchange_tensors "
    "gather_grads initialize_comms nfs_ip_init rank sync_params world_size",
    "common_tuples": "PartitionData ShardEdgesAndFeatures",
    "config": "Config",
    "construct_shard_manager": "construct_full_graph construct_mfgs convert_dist_graph",
    "core": "DataLoader DistNeighborSampler DistributedBlock GraphShardManager "
    "HeteroGraphShardManager message_has_parameters",
    "core.full_partition_block": "DistributedBlock",
    "core.graphshard": "GraphShardManager HeteroGraphShardManager",
    "core.sampling": "DataLoader DistNeighborSampler",
    "core.sar_aggregation": "message_has_parameters",
    "data_loading": "load_dgl_partition_data suffix_key_lookup",
    "distributed_bn": "DistributedBN1D MeanOp VarOp",
    "edge_softmax": "edge_softmax",
    "logging_setup": "logger logging_setup",
    "patch_dgl": "RelGraphConv patch_dgl patched_edge_softmax",
}
TOP_LEVEL = (
    "initialize_comms nfs_ip_init rank world_size comm_device sync_params gather_grads "
    "load_dgl_partition_data suffix_key_lookup construct_full_graph construct_mfgs "
    "convert_dist_graph GraphShardManager HeteroGraphShardManager DistributedBlock "
    "message_has_parameters patch_dgl patched_edge_softmax RelGraphConv edge_softmax "
    "DistributedBN1D Config logging_setup logger DistNeighborSampler DataLoader"
).split()


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("module", SUBMODULES)
def test_submodules_hold_the_same_objects_as_the_top_level(module: str) -> None:
    found = importlib.import_module(f"sar.{module}")
    for name in SUBMODULES[module].split():
        value = getattr(found, name)
        if name in TOP_LEVEL:
            assert value is getattr(sar, name)


def test_dgl_is_prepared_without_patching_it() -> None:
    sar.patch_dgl()
    assert dgl.nn.pytorch.conv.gatconv.edge_softmax is sar.patched_edge_softmax
    assert dgl.nn.RelGraphConv is sar.RelGraphConv


def test_parameters_need_no_declaration() -> None:
    class Layer(nn.Module):
        @sar.message_has_parameters(lambda self: tuple(self.parameters()))
        def message(self, edges):
            return "as it was"

    assert Layer().message(None) == "as it was"
    with pytest.raises(TypeError, match="param_foo: got int"):
        sar.message_has_parameters(3)


@pytest.mark.parametrize("hybrid", [False, True])
def test_sampled_blocks(hybrid: bool, partitioned: Cutter) -> None:
    """With all neighbors the logits of DGL's layers on the whole graph; features where the
    original puts them."""
    whole = looped()
    reference = to_dgl(whole)
    torch.manual_seed(0)
    layers = [dgl.nn.SAGEConv(a, b, "mean").double() for a, b in ((6, 5), (5, 3))]
    x = reference.ndata["feat"].double()
    want = layers[1](reference, layers[0](reference, x).relu()).detach()

    def case(group: Group, path: str) -> int:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        original = data.node_features["_N/orig_id"]
        sampler = sar.DistNeighborSampler(
            [-1, -1],
            input_node_features={"x": data.node_features["_N/feat"].double()},
            output_node_features={"id": original},
            use_hybrid_partitioning=hybrid,
        )
        start, end = data.book.part_ranges[group.rank]
        seen = 0
        loader = sar.DataLoader(graph, torch.arange(start, end), sampler, batch_size=8)
        for blocks in loader:
            assert set(blocks[0].srcdata) == {"_ID", "x"}
            rows = layers[1](blocks[1], layers[0](blocks[0], blocks[0].srcdata["x"]).relu())
            torch.testing.assert_close(rows, want[blocks[-1].dstdata["id"]])
            assert (blocks[-1].dstdata["_ID"] - start < end - start).all()
            seen += len(rows)
        loader.close()
        return seen

    for size in (1, 3):
        assert sum(run_threads(size, case, partitioned(whole, size))) == 57


def test_sampling_graph(partitioned: Cutter) -> None:
    """All nodes by global id, this rank's edges and their columns, as DGL's samplers take them."""
    whole = looped()
    index = torch.stack(whole.edges[ETYPE_HOMO])

    def case(group: Group, path: str) -> int:
        parts = load_all(path, group.size)
        graph = sar.construct_full_graph(parts[group.rank])
        for name in ("weight", "orig_eid"):
            graph.edata[name] = parts[group.rank].edge_features[f"_N:_E:_N/{name}"]
        local = graph.sampling_graph
        original = torch.cat([one.node_features["_N/orig_id"] for one in parts])
        eid = local.edata["orig_eid"]
        assert local.num_nodes() == 57
        assert torch.equal(original[torch.stack(local.edges())], index[:, eid])
        assert torch.equal(local.edata["weight"], whole.edge_data[ETYPE_HOMO]["weight"][eid])
        own = torch.arange(*parts[group.rank].book.part_ranges[group.rank])
        drawn = dgl.sampling.sample_neighbors(local, own, 3)
        assert drawn.num_edges() == drawn.in_degrees(own).sum() > 0
        return local.num_edges()

    for size in (1, 3):
        assert sum(run_threads(size, case, partitioned(whole, size))) == index.shape[1]


# ---------------------------------------------------------------- looking features up


@pytest.mark.parametrize(
    "names, key, expected",
    [
        (["_N/feat", "_N/label"], "feat", "_N/feat"),
        (["_N/features"], "features", "_N/features"),
        (["_N/orig_feat", "_N/feat"], "feat", "_N/feat"),
        (["paper/feat", "author/feat"], "paper/feat", "paper/feat"),
        (["_N/node_labels"], "labels", "_N/node_labels"),
        (["bare"], "bare", "bare"),
    ],
)
def test_lookup(names: list[str], key: str, expected: str) -> None:
    features = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    assert sar.suffix_key_lookup(features, key) is features[expected]


def test_lookup_of_nothing_and_of_too_much() -> None:
    features = {"paper/feat": torch.ones(1), "author/feat": torch.ones(2)}
    missing = sar.suffix_key_lookup(features, "label")
    assert missing.dtype == torch.int64 and len(missing) == 0
    with pytest.raises(ValueError, match="'feat' fits author/feat, paper/feat"):
        sar.suffix_key_lookup(features, "feat")


def test_lookup_expanded_to_all_nodes() -> None:
    features = {
        "paper/x": torch.tensor([[1.0], [2.0]]),
        "_TYPE": torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32),
    }
    types = ["author", "paper", "venue"]
    expanded = sar.suffix_key_lookup(features, "x", expand_to_all=True, type_list=types)
    assert expanded.tolist() == [[0.0], [0.0], [1.0], [2.0], [0.0]]
    with pytest.raises(ValueError, match="type_list: got None"):
        sar.suffix_key_lookup(features, "x", expand_to_all=True)
    with pytest.raises(ValueError, match="hold 'paper'"):
        sar.suffix_key_lookup(features, "x", True, ["author", "venue"])
    homogeneous = {"_N/x": torch.ones(3), "_TYPE": torch.zeros(3)}
    assert len(sar.suffix_key_lookup(homogeneous, "x", True, ["_N"])) == 3


# ---------------------------------------------------------------- logging


@pytest.fixture
def logger():
    found = logging.getLogger("sar")
    before = found.level, found.propagate, list(found.handlers)
    yield found
    for handler in set(found.handlers) - set(before[2]):
        found.removeHandler(handler)
        handler.close()
    found.level, found.propagate = before[:2]


def test_logging_starts_silent_and_is_set_up_once(logger, tmp_path: Path) -> None:
    assert sar.logger is logger and not logger.handlers
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    sar.logging_setup(logging.INFO, 0, 4, log_file=str(first))
    sar.logging_setup(logging.getLevelName("WARNING"), 2, 4, str(second))
    logger.info("too low")
    logger.getChild("comm").warning("hello")
    assert first.read_text() == ""
    assert second.read_text() == "3 / 4 - sar.comm - WARNING - hello\n"


# ---------------------------------------------------------------- graphs to train on


def random_heterograph() -> GraphArrays:
    rng = torch.Generator().manual_seed(2)
    nodes = {"author": 30, "paper": 50, "venue": 8}
    etypes = [
        ("author", "writes", "paper"),
        ("paper", "cites", "paper"),
        ("paper", "in", "venue"),
        ("paper", "written_by", "author"),
        ("venue", "has", "paper"),
    ]
    edges = {
        t: (
            torch.randint(0, nodes[t[0]], (120,), generator=rng),
            torch.randint(0, nodes[t[2]], (120,), generator=rng),
        )
        for t in etypes
    }
    paper = {
        "features": torch.randn(50, 6, generator=rng, dtype=torch.float64),
        "labels": torch.randint(0, 4, (50,), generator=rng),
        "train_mask": torch.rand(50, generator=rng) < 0.5,
    }
    others = {
        t: {"x": torch.randn(nodes[t], 6, generator=rng, dtype=torch.float64)}
        for t in ("author", "venue")
    }
    return GraphArrays("hetero", nodes, edges, {"paper": paper, **others}).with_orig_ids()


class Sage(nn.Module):
    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [dgl.nn.SAGEConv(in_dim, 8, "mean"), dgl.nn.SAGEConv(8, out_dim, "mean")]
        )

    def forward(self, blocks: list, features: Tensor) -> Tensor:
        for index, (conv, block) in enumerate(zip(self.convs, blocks)):
            features = conv(block, features)
            if index < len(self.convs) - 1:
                features = F.relu(features, inplace=True)
        return features


class Relational(nn.Module):
    """Two layers with a weight per relation and per node type, as the original's example has."""

    def __init__(self, graph, width: int, out_dim: int) -> None:
        super().__init__()
        dims = [width, 8, out_dim]
        names = sorted(set(graph.etypes))
        self.convs, self.loops = nn.ModuleList(), nn.ModuleList()
        for left, right in zip(dims[:-1], dims[1:]):
            convs = {n: dgl.nn.GraphConv(left, right, norm="right", bias=False) for n in names}
            self.convs.append(dgl.nn.HeteroGraphConv(convs))
            self.loops.append(nn.ModuleDict({t: nn.Linear(left, right) for t in graph.ntypes}))

    def forward(self, blocks: list, h: dict[str, Tensor]) -> dict[str, Tensor]:
        for conv, loop, block in zip(self.convs, self.loops, blocks):
            with block.local_scope():
                own = {t: v[: block.number_of_dst_nodes(t)] for t, v in h.items()}
                sums = conv(block, h)
            h = {t: torch.tanh(v + loop[t](own[t])) for t, v in sums.items()}
        return h


def seeded_model(make, *args) -> nn.Module:
    torch.manual_seed(3)
    return make(*args).double()


def copied_model(model: nn.Module, make, *args) -> nn.Module:
    """A model made by a rank's script, with the weights of ``model``."""
    mine = make(*args).double()
    mine.load_state_dict(model.state_dict())
    return mine


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def script_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss as old scripts write it: a sum, divided by the training nodes of all ranks."""
    count = torch.LongTensor([len(labels)])
    sar.comm.all_reduce(count, op=dist.ReduceOp.SUM, move_to_comm_device=True)
    return F.cross_entropy(logits, labels, reduction="sum") / count.item()


# ---------------------------------------------------------------- training scripts


@pytest.mark.parametrize("mode", ["SAR", "SA", "one_shot_aggregation"])
def test_full_batch_script(partitioned: Partitioned, mode: str, monkeypatch) -> None:
    graph = looped()
    path = partitioned(graph, RANKS)
    data = graph.node_data["_N"]
    model = seeded_model(Sage, 6, 4)
    reference = model([to_dgl(graph)] * 2, data["feat"].double())
    mask = data["train_mask"]
    F.cross_entropy(reference[mask], data["label"][mask]).backward()
    monkeypatch.setattr(sar.Config, "disable_sr", mode == "SA")

    def script(group) -> tuple:
        part = sar.load_dgl_partition_data(path, sar.rank(), torch.device("cpu"))
        train = sar.suffix_key_lookup(part.node_features, "train_mask").nonzero().view(-1)
        labels = sar.suffix_key_lookup(part.node_features, "label").long()
        num_labels = labels.max() + 1
        sar.comm.all_reduce(num_labels, dist.ReduceOp.MAX, move_to_comm_device=True)
        features = sar.suffix_key_lookup(part.node_features, "feat").double()
        orig = sar.suffix_key_lookup(part.node_features, "orig_id")
        manager = sar.construct_full_graph(part)
        if mode == "one_shot_aggregation":
            manager = manager.get_full_partition_graph()
            assert isinstance(manager, sar.DistributedBlock)
        manager = manager.to("cpu")
        del part
        assert isinstance(manager, sar.GraphShardManager)
        assert isinstance(manager, sar.HeteroGraphShardManager)
        mine = copied_model(model, Sage, features.size(1), num_labels.item())
        sar.sync_params(mine)
        logits = mine([manager] * 2, features)
        script_loss(logits[train], labels[train]).backward()
        sar.gather_grads(mine)
        return logits.detach(), orig, gradients(mine)

    logits, orig, grads = zip(*run_threads(RANKS, script))
    assert_close(joined(logits, orig, 57), reference.detach(), "logits", torch.float64)
    for each in grads:
        assert_gradients_close(each, gradients(model), torch.float64)


@pytest.mark.parametrize("one_shot", [False, True])
def test_message_flow_graph_script(partitioned: Partitioned, one_shot: bool) -> None:
    graph = looped()
    path = partitioned(graph, RANKS)
    data = graph.node_data["_N"]
    model = seeded_model(Sage, 6, 4)
    reference = model([to_dgl(graph)] * 2, data["feat"].double()).detach()

    def script(group) -> tuple[Tensor, Tensor, Tensor]:
        part = sar.load_dgl_partition_data(path, sar.rank(), torch.device("cpu"))
        features = sar.suffix_key_lookup(part.node_features, "feat").double()
        seeds = sar.suffix_key_lookup(part.node_features, "train_mask").nonzero().view(-1)
        orig = sar.suffix_key_lookup(part.node_features, "orig_id")
        start = part.node_ranges[sar.comm.rank()][0]
        blocks = sar.construct_mfgs(part, seeds.flip(0) + start, 2)
        if one_shot:
            blocks = [block.get_full_partition_graph() for block in blocks]
            assert all(isinstance(block, sar.DistributedBlock) for block in blocks)
        blocks = [block.to("cpu") for block in blocks]
        mine = copied_model(model, Sage, 6, 4)
        assert blocks[0].input_nodes[: blocks[0].num_dst_nodes()].equal(blocks[0].dstnodes())
        logits = mine(blocks, features[blocks[0].input_nodes])
        return logits.detach(), orig[seeds], blocks[1].seeds - start

    for logits, orig, seeds in run_threads(RANKS, script):
        assert_close(logits, reference[orig], "logits of the sorted seeds", torch.float64)
        assert seeds.equal(seeds.sort().values) and len(seeds) == len(orig)


@pytest.mark.parametrize("blocks", [False, True])
def test_heterogeneous_script(partitioned: Partitioned, blocks: bool) -> None:
    graph = random_heterograph()
    path = partitioned(graph, RANKS)
    inputs = {t: data.get("features", data.get("x")) for t, data in graph.node_data.items()}
    paper = graph.node_data["paper"]
    model = seeded_model(Relational, to_dgl(graph), 6, 4)
    reference = model([to_dgl(graph)] * 2, inputs)["paper"]
    mask = paper["train_mask"]
    F.cross_entropy(reference[mask], paper["labels"][mask]).backward()

    def script(group) -> tuple:
        part = sar.load_dgl_partition_data(path, sar.rank(), torch.device("cpu"))
        types, stored = part.node_type_names, part.node_features
        stored["paper/features"] = stored["paper/features"].float().double()
        local = sar.suffix_key_lookup(stored, "train_mask", type_list=types)
        everywhere = sar.suffix_key_lookup(stored, "train_mask", True, types)
        labels = sar.suffix_key_lookup(stored, "labels", False, types).long()
        names = {t: "paper/features" if t == "paper" else f"{t}/x" for t in types}
        inputs = {t: stored[name] for t, name in names.items()}
        if blocks:
            seeds = everywhere.nonzero().view(-1) + part.node_ranges[sar.rank()][0]
            layers = sar.construct_mfgs(part, seeds, 2)
        else:
            layers = [sar.construct_full_graph(part)] * 2
        assert part.partition_book.ntypes == layers[0].srctypes == list(graph.num_nodes)
        assert layers[0].tgt_in_src
        mine = copied_model(model, Relational, layers[0], 6, 4)
        rows = {t: inputs[t][layers[0].srcnodes(t)] for t in layers[0].srctypes}
        logits = mine(layers, rows)["paper"]
        logits = logits if blocks else logits[local]
        script_loss(logits, labels[local]).backward()
        sar.gather_grads(mine)
        return logits.detach(), stored["paper/orig_id"][local], gradients(mine)

    for logits, orig, grads in run_threads(RANKS, script):
        assert_close(logits, reference[orig].detach(), "logits", torch.float32)
        assert_gradients_close(grads, gradients(model), torch.float32)


def test_propagation_script(partitioned: Partitioned) -> None:
    """Degrees, edge weights kept outside of their scope, and propagation without a layer."""
    graph = looped()
    path = partitioned(graph, RANKS)

    def weights(g) -> Tensor:
        with g.local_scope():
            g.ndata["in_deg"] = g.in_degrees().double().pow(-0.5)
            g.ndata["out_deg"] = g.out_degrees().double().pow(-0.5)
            g.apply_edges(fn.u_mul_v("out_deg", "in_deg", "weight"))
            g.update_all(fn.copy_e("weight", "msg"), fn.sum("msg", "norm"))
            g.apply_edges(fn.e_div_v("weight", "norm", "weight"))
            return g.edata["weight"]

    def propagated(g, features: Tensor) -> Tensor:
        with torch.no_grad():
            g.edata["weight"] = weights(g)
            g.ndata["feat_0"] = features
            for hop in (1, 2):
                g.update_all(
                    fn.u_mul_e(f"feat_{hop - 1}", "weight", "msg"), fn.sum("msg", f"feat_{hop}")
                )
            assert "norm" not in g.ndata and "in_deg" not in g.ndata
            return torch.cat([g.ndata.pop(f"feat_{hop}") for hop in range(3)], 1)

    def script(group) -> tuple[Tensor, Tensor]:
        part = sar.load_dgl_partition_data(path, sar.rank(), torch.device("cpu"))
        features = sar.suffix_key_lookup(part.node_features, "feat").double()
        orig = sar.suffix_key_lookup(part.node_features, "orig_id")
        return propagated(sar.construct_full_graph(part), features), orig

    got, orig = zip(*run_threads(RANKS, script))
    want = propagated(to_dgl(graph), graph.node_data["_N"]["feat"].double())
    assert_close(joined(got, orig, 57), want, "propagated features", torch.float64)


def test_normalization_of_features_over_ranks() -> None:
    from sar.distributed_bn import MeanOp, VarOp

    x = torch.randn(9, 3, dtype=torch.float64) + 2

    def script(group) -> tuple[Tensor, Tensor]:
        rows = x.split([4, 5])[group.rank]
        return MeanOp.apply(rows), VarOp.apply(rows)

    for mean, square in run_threads(RANKS, script):
        assert_close(mean, x.mean(0), "mean", torch.float64)
        assert_close(square, (x * x).mean(0), "mean of squares", torch.float64)
    with pytest.raises(NotImplementedError, match="DistributedBN1D"):
        MeanOp.apply(x.clone().requires_grad_())


# ---------------------------------------------------------------- communication


def test_conversion_of_dgls_parts(partitioned: Partitioned) -> None:
    """What a DistGraph holds on each of several hosts gives the edges that our reader gives."""
    graph = random_heterograph()
    path = partitioned(graph, RANKS)
    parts = [dgl.distributed.load_partition(path, rank) for rank in range(RANKS)]
    cites = to_dgl(graph)["cites"]
    cites.srcdata["h"] = graph.node_data["paper"]["features"]
    cites.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))

    def script(group) -> tuple[Tensor, Tensor]:
        local, _, _, book, name, _, _ = parts[group.rank]
        theirs = SimpleNamespace(
            local_partition=local, graph_name=name, get_partition_book=lambda: book
        )
        g = sar.convert_dist_graph(theirs)
        data = sar.load_dgl_partition_data(path, sar.rank())
        ours = sar.construct_full_graph(data)
        for etype in ours.canonical_etypes:
            assert g.edata["_ID"][etype].equal(ours.edata["_ID"][etype])
            assert g.in_degrees(etype=etype).equal(ours.in_degrees(etype=etype))
        rows = data.node_features["paper/features"]
        return g["cites"].aggregate(rows), data.node_features["paper/orig_id"]

    got, orig = zip(*run_threads(RANKS, script))
    assert_close(joined(got, orig, 50), cites.dstdata["out"], "sums", torch.float64)


CONVERT = """
    import sys
    import dgl
    import dgl.function as fn
    import torch
    import sar

    dgl.distributed.initialize("unused")
    theirs = dgl.distributed.DistGraph("looped", part_config=sys.argv[1])
    graph = sar.convert_dist_graph(theirs).to("cpu")
    assert graph.num_nodes() == theirs.num_nodes() and graph.num_edges() == theirs.num_edges()
    assert graph.ntypes == theirs.ntypes and graph.etypes == theirs.etypes
    rows = theirs.get_partition_book().partid2nids(sar.comm.current_group().rank)
    graph.srcdata["h"] = theirs.ndata["feat"][rows].double()
    graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
    torch.save([graph.dstdata["h"], theirs.ndata["orig_id"][rows]], sys.argv[2])
"""


@pytest.mark.system
def test_conversion_of_dgls_distributed_graph(tmp_path: Path) -> None:
    graph = looped()
    path = sar.partition_graph(graph, tmp_path / "p", 1, name="looped")
    out = tmp_path / "out.pt"
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CONVERT), path, str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DGL_DIST_MODE": "standalone"},
        check=True, timeout=60,
    )  # fmt: skip
    got, orig = torch.load(out, weights_only=True)
    full = to_dgl(graph)
    full.srcdata["h"] = graph.node_data["_N"]["feat"].double()
    full.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
    assert_close(got, full.dstdata["h"][orig], "means", torch.float64)


def test_conversion_refuses_other_graphs() -> None:
    with pytest.raises(TypeError, match="dist_graph: got DGLGraph, expected"):
        sar.convert_dist_graph(dgl.graph(([0], [1])))
