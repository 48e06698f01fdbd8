"""Dropout whose masks stay with the node or edge, however the graph is cut and streamed."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import GATConv, HeteroGraphConv
from dgl.nn.functional import edge_softmax
from harness import run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, hetero, looped, mixed
from harness.parts import Cutter, joined
from harness.rows import eager
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.ops.randomness import keyed_dropout, keyed_uniform, reference_dropout

CUTS = [
    (1, "random", {"block_bytes": 4096}),
    (3, "random", {"rounds": 1}),
    (3, "coarsen", {"block_bytes": 2048}),
    (4, "random", {}),
    (4, "coarsen", {"rounds": 2, "rematerialize": False}),
    (4, "adversarial", {"rounds": 3}),
]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def for_any_cut(
    case: Any, graph: GraphArrays, partitioned: Cutter, *given: Any, first: Any = None
) -> dict[Any, Tensor]:
    """What ``case`` finds on one rank, in the order of original ids; on all cuts the same: masks
    bit for bit, other numbers to 1e-12.

    Args:
        case: (group, path, policy, *given) -> by name (rows, their ids), or (what all ranks have,
            ``None``); "mask" in the name of a mask.
        first: given to the one rank in place of ``given``.
    """

    def found(size: int, method: str, policy: dict, given: Any) -> dict[Any, Tensor]:
        parts = run_threads(size, case, partitioned(graph, size, method), policy, *given)
        joint = {}
        for key, (rows, ids) in parts[0].items():
            every = [part[key] for part in parts]
            if ids is not None:
                ids = torch.cat([each for _, each in every])
                rows = torch.cat([each for each, _ in every])[torch.argsort(ids)]
            joint[key] = rows
        return joint

    want = found(1, "random", {}, given if first is None else first)
    for cut in CUTS:
        got = found(*cut, given)
        for key, rows in want.items():
            if "mask" in key:
                assert torch.equal(got[key], rows), (key, cut)
            else:
                assert relative(got[key], rows) <= 1e-12, (key, cut)
    return want


def learned(part: Rank, out: Tensor, x: Tensor) -> dict[str, Any]:
    """The result and the gradient of ``x`` of a loss that differs from node to node."""
    (out.sin() * part.nodes().view(-1, 1).cos()).sum().backward()
    return {"out": (out.detach(), part.nodes()), "x": (x.grad, part.nodes())}


class Rank:
    """A rank's part, its graph and the original ids of its rows."""

    def __init__(self, group: Any, path: str, **policy: Any) -> None:
        self.data = sar.load_dgl_partition_data(path, group.rank)
        self.graph = sar.construct_full_graph(self.data, sar.Policy(**policy))

    def nodes(self, ntype: str = "_N") -> Tensor:
        return self.data.node_features[f"{ntype}/orig_id"]

    def edges(self, etype: tuple[str, str, str] = ETYPE_HOMO) -> Tensor:
        return self.data.edge_features[f"{':'.join(etype)}/orig_eid"]

    def feat(self, ntype: str = "_N") -> Tensor:
        return self.data.node_features[f"{ntype}/feat"].double()


def edge_mask(graph: Any, shape: tuple[int, ...] = (3,), etype: Any = None) -> Tensor:
    """What dropout leaves of ones, by local edge; drawn on a lazy tensor."""
    graph = graph if etype is None else graph[etype]
    with graph.local_scope():
        graph.srcdata["one"] = torch.ones(graph.num_src_nodes(), *shape, dtype=torch.float64)
        graph.apply_edges(dgl.function.copy_u("one", "ones"))
        dropped = F.dropout(graph.edata["ones"], 0.4)
        return dropped.materialize()  # it is lazy


# Edges.


def case_gat(group: Any, path: str, policy: dict, layers: nn.ModuleList) -> dict:
    part = Rank(group, path, **policy)
    sar.manual_seed(11)
    layers = copy.deepcopy(layers)
    x = part.feat().requires_grad_()
    h, weights = x, []
    for layer in layers:
        h, weight = layer(part.graph, h, get_attention=True)
        h = h.flatten(1)
        weights.append(weight)
    found = learned(part, h, x)
    sar.gather_grads(layers)
    found |= {f"mask {i}": (eager(w).detach() == 0, part.edges()) for i, w in enumerate(weights)}
    return found | {name: (p.grad, None) for name, p in layers.named_parameters()}


def test_attention_dropout_does_not_depend_on_the_cut(partitioned: Cutter) -> None:
    torch.manual_seed(0)
    sizes = ((6, 3, 2), (6, 4, 1))
    layers = [dgl.nn.GATConv(*size, attn_drop=p) for size, p in zip(sizes, (0.4, 0.6))]
    want = for_any_cut(case_gat, looped(), partitioned, nn.ModuleList(layers).double())
    for layer, p in enumerate((0.4, 0.6)):
        assert abs(float(want[f"mask {layer}"].double().mean()) - p) < 0.1


def test_edges_of_several_types_and_added_loops(partitioned: Cutter) -> None:
    """Every relation's mask is its own and the cut's no part of it; loops have keys of nodes."""
    graph = hetero()

    def case(group: Any, path: str, policy: dict) -> dict:
        part = Rank(group, path, **policy)
        sar.manual_seed(3)
        found = {f"mask {e}": (edge_mask(part.graph, (2,), e), part.edges(e)) for e in graph.edges}
        looped_twice = part.graph.add_self_loop("follows").add_self_loop("follows")
        count, users = part.graph.num_nodes("user"), part.nodes("user")
        loops = edge_mask(looped_twice, (2,), "follows")[-2 * count :]
        found |= {"mask": (loops[:count], users), "again mask": (loops[count:], users)}
        keys = [looped_twice[e].scope().relation.keys.long() for e in graph.edges]
        return found | {"mask of keys": (torch.cat(keys),) * 2}

    want = for_any_cut(case, graph, partitioned)
    assert not torch.equal(want["mask"], want["again mask"])
    keys = want["mask of keys"]
    assert len(keys) == graph.total_edges + 2 * graph.num_nodes["user"] == len(keys.unique())


def test_a_cut_without_original_ids_uses_its_own(partitioned: Cutter) -> None:
    """Partitions of DGL's own: masks do not depend on rounds and blocks, but on the cut."""

    def case(group: Any, path: str, policy: dict) -> Tensor:
        data = sar.load_dgl_partition_data(path, group.rank)
        del data.edge_features["_N:_E:_N/orig_eid"]
        graph = sar.construct_full_graph(data, sar.Policy(**policy))
        sar.manual_seed(3)
        assert torch.equal(graph.scope().relation.keys.long(), graph.edata["_ID"])
        return edge_mask(graph)

    path = partitioned(mixed(), 3, "random")
    results = [
        run_threads(3, case, path, policy)
        for policy in ({"rounds": 1}, {"rounds": 2, "block_bytes": 2048})
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Seeds.


def test_masks_of_a_run_without_a_seed(partitioned: Cutter) -> None:
    """Are those of torch's; later ones differ, and none depends on the cut."""

    def case(group: Any, path: str, policy: dict) -> dict:
        part = Rank(group, path, **policy)
        return {f"mask {i}": (edge_mask(part.graph), part.edges()) for i in range(2)}

    torch.manual_seed(2**64 - 5)
    want = for_any_cut(case, mixed(), partitioned)
    assert not torch.equal(*want.values())


@pytest.mark.parametrize(
    ("seed", "error", "match"),
    [
        (lambda rank: rank, ValueError, "seed: rank 1 got 1, rank 0 got 0; expected the same"),
        (lambda rank: "a" if rank else 1, TypeError, "seed: got str, expected an int"),
        (lambda rank: True, TypeError, "seed: got bool"),
        (lambda rank: 2**64, ValueError, "got 18446744073709551616, expected an int from -922"),
    ],
)
def test_bad_seeds(seed: Any, error: type, match: str) -> None:
    def case(group: Any) -> None:
        with pytest.raises(error, match=match):
            sar.manual_seed(seed(group.rank))

    run_threads(3, case)


# Masks.


def test_masks_look_random() -> None:
    """Rate, and no correlation between columns, edges, seeds; edges beside each other included."""
    keys = torch.arange(40_000)
    group = sar.comm.LocalGroup()
    group.seeds.restart(0)
    masks = [keyed_uniform(keys, 6, group.seeds.draw(group)) >= 0.3 for _ in range(3)]
    columns = torch.cat([m.double() for m in masks], 1)  # 18 columns of 3 dropouts
    assert (columns.mean(0) - 0.7).abs().max() < 0.01
    assert torch.corrcoef(columns.T).fill_diagonal_(0).abs().max() < 0.025
    for shift in (1, 2, 64, 1000):  # edges that follow each other, as multi-edges do
        pairs = torch.stack([columns[shift:].flatten(), columns[:-shift].flatten()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.005
    counts = torch.bincount(columns[:, :6].sum(1).long(), minlength=7) / len(keys)
    binomial = torch.distributions.Binomial(6, torch.tensor(0.7)).log_prob(torch.arange(7.0)).exp()
    assert (counts - binomial).abs().max() < 0.01


def attended(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    graph.srcdata["k"], graph.dstdata["q"] = x @ weight, x
    graph.apply_edges(dgl.function.u_dot_v("k", "q", "z"))
    graph.edata["a"] = F.dropout(edge_softmax(graph, graph.edata["z"]), 0.5)
    graph.update_all(dgl.function.u_mul_e("k", "a", "m"), dgl.function.sum("m", "out"))
    return graph.dstdata["out"]


def test_gradcheck_through_keyed_dropout(partitioned: Cutter) -> None:
    """The backward replays the mask: central differences of one fixed mask are the gradient."""

    def case(group: Any) -> bool:
        part = Rank(group, partitioned(looped(), 1), block_bytes=4096)
        x = part.feat()[:, :2].requires_grad_()
        weight = torch.eye(2, dtype=torch.float64).requires_grad_()

        def run(x: Tensor, weight: Tensor) -> Tensor:
            sar.manual_seed(1)
            return attended(part.graph, x, weight)

        return torch.autograd.gradcheck(run, (x, weight), fast_mode=True)

    assert run_threads(1, case) == [True]


@pytest.mark.parametrize("function", [F.dropout, torch.dropout])
def test_ways_to_call_it(function: Any, partitioned: Cutter) -> None:
    """Positional, by name, in place, in evaluation and at p = 0."""

    def case(group: Any) -> None:
        graph = Rank(group, partitioned(mixed(), 1)).graph
        flag = "train" if function is torch.dropout else "training"
        graph.srcdata["x"] = torch.ones(graph.num_nodes(), 2)
        graph.apply_edges(dgl.function.copy_u("x", "e"))
        e, masks = graph.edata["e"], []
        for call in (
            lambda: function(e, 0.5, True),
            lambda: function(input=e, p=0.5, **{flag: True}),
            lambda: F.dropout(e * 1, 0.5, True, True),
        ):
            sar.manual_seed(6)
            masks.append(call().materialize())
        assert all(torch.equal(mask, masks[0]) for mask in masks) and (masks[0] == 0).any()
        assert function(e, 0.5, False) is e and function(e, 0.0, True) is e
        written = e * 1
        assert F.dropout(written, 0.5, inplace=True) is written
        assert (written.materialize() == 0).any()
        for p in (-0.1, 1.5):
            with pytest.raises(ValueError, match="p: got .*, expected a probability"):
                function(e, p, True)

    run_threads(1, case)


def case_udf(group: Any, path: str, policy: dict, drop: nn.Module) -> dict:
    """Two dropouts on edges, one that is not on edges and one that is switched off."""
    part = Rank(group, path, **policy)
    sar.manual_seed(2)
    x = part.feat().requires_grad_()
    weight = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6).requires_grad_()
    drop, quiet = copy.deepcopy(drop), nn.Dropout(0.9).eval()

    def message(edges: Any) -> dict:
        some = torch.dropout(edges.src["x"] * 2, 0.5, True).tanh()
        both = drop(some @ weight) + quiet(edges.dst["x"])
        return {"m": drop(both)}

    part.graph.srcdata["x"] = part.graph.dstdata["x"] = x
    part.graph.update_all(message, dgl.function.sum("m", "out"))
    drop.eval(), quiet.train()  # after the forward: nothing to backward
    found = learned(part, part.graph.dstdata["out"], x)
    return found | {"weight": (group.all_reduce(weight.grad), None)}


@pytest.mark.parametrize("kind", [nn.Dropout, sar.nn.Dropout, partial(nn.Dropout, inplace=True)])
def test_dropout_in_a_users_message(kind: Any, partitioned: Cutter) -> None:
    plain = sar.nn.Dropout if kind is sar.nn.Dropout else nn.Dropout
    want = for_any_cut(case_udf, mixed(), partitioned, kind(0.3), first=[plain(0.3)])
    again = for_any_cut(case_udf, mixed(), partitioned, nn.Dropout(0.0))
    assert relative(again["out"], want["out"]) > 0.1


def case_pieces(group: Any, path: str, policy: dict) -> dict:
    """A column for some of the edges, which one that is made of another such is put over."""
    part = Rank(group, path, **policy)
    sar.manual_seed(4)
    x = part.feat().requires_grad_()
    graph, edges = part.graph, part.edges()
    eids, fewer = ((edges % n == 1).nonzero().view(-1) for n in (3, 6))
    graph.ndata["x"] = x
    graph.apply_edges(lambda e: {"a": F.dropout(e.src["x"] * 2, 0.5)}, eids)
    graph.apply_edges(lambda e: {"a": F.dropout(e.data["a"], 0.2, True, True) + 1}, fewer)
    graph.update_all(dgl.function.copy_e("a", "m"), dgl.function.sum("m", "out"))
    return learned(part, graph.ndata["out"], x)


def test_dropout_in_columns_of_some_edges(partitioned: Cutter) -> None:
    for_any_cut(case_pieces, mixed(), partitioned)


# Nodes.


class Net(nn.Module):
    """Dropout in front, inside (features, attention) and between layers; whole graph or blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.GATConv(6, 3, 2, feat_drop=0.3, attn_drop=0.4)
        self.second = dgl.nn.SAGEConv(6, 5, "mean", feat_drop=0.2)
        self.drop = nn.Dropout(0.5)

    def forward(self, graphs: Any, x: Tensor) -> Tensor:
        first, second = graphs if isinstance(graphs, list) else (graphs, graphs)
        h = self.drop(self.first(first, self.drop(x)).flatten(1).relu())
        return self.drop(self.second(second, h))


def case_net(group: Any, path: str, policy: dict, net: Net, how: str) -> dict:
    part = Rank(group, path, **policy)
    net, x, ids = copy.deepcopy(net), part.feat(), part.nodes()
    graphs: Any = part.graph
    if how == "blocks":
        chosen = ids % 3 == 0
        graphs = sar.construct_mfgs(part.data, part.graph.ndata["_ID"][chosen], 2)
        x, ids = x[graphs[0].input_nodes], ids[chosen] // 3
    net = sar.convert_dropout(net, graphs if how == "bound" else None)
    x.requires_grad_()
    sar.manual_seed(21)
    found: dict[str, Any] = {}
    for step in range(2):
        out = net(graphs, x)
        (out.sin() * ids.view(-1, 1).cos()).sum().backward()
        found |= {f"out {step}": (out.detach(), ids), f"mask {step}": (out.detach() == 0, ids)}
    sar.gather_grads(net)
    return found | {name: (p.grad, None) for name, p in net.named_parameters()}


@pytest.mark.parametrize("how", ["bound", "found", "blocks"])
def test_converted_dropout_does_not_depend_on_the_cut(how: str, partitioned: Cutter) -> None:
    """Masks are the last dropout's zeros."""
    torch.manual_seed(0)
    want = for_any_cut(case_net, looped(), partitioned, Net().double(), how)
    assert not torch.equal(want["out 0"], want["out 1"])


def test_node_types_edge_types_and_ids(partitioned: Cutter) -> None:
    """The rows of every type, found by their number or named, keep their mask under every cut."""
    graph = hetero()

    def case(group: Any, path: str, policy: dict) -> dict:
        part = Rank(group, path, **policy)
        drop = sar.nn.Dropout(0.5, part.graph)
        keys = torch.cat([part.data.keys.nodes(t).long() for t in graph.num_nodes])
        assert len(keys.unique()) == len(keys) == sum(map(part.graph.num_nodes, graph.num_nodes))
        sar.manual_seed(8)
        found = {}
        for ntype in graph.num_nodes:
            ids, ones = part.nodes(ntype), torch.ones(part.graph.num_nodes(ntype), 2, 3)
            found[f"named mask {ntype}"] = drop(ones, rows=ntype), ids
            found[f"counted mask {ntype}"] = drop(ones), ids
            found[f"mask by ids {ntype}"] = drop(ones, rows=ids), ids
        for etype in graph.edges:
            ones = torch.ones(part.graph.num_edges(etype), 4)
            found[f"mask {etype}"] = drop(ones, rows=etype), part.edges(etype)
        return found

    want = for_any_cut(case, graph, partitioned)
    assert not torch.equal(want["named mask user"], want["counted mask user"])


def test_types_with_as_many_rows(partitioned: Cutter) -> None:
    """As many on one rank: the others know. As many on all: an error, unless the type is named."""
    edges = {("a", "to", "b"): (torch.tensor([0, 1]), torch.tensor([0, 1]))}

    def case(group: Any, path: str) -> list[Tensor]:
        part = Rank(group, path)
        drop = sar.nn.Dropout(0.5, part.graph)
        sar.manual_seed(8)
        return [drop(torch.ones(part.graph.num_nodes(t), 9)) for t in ("a", "b")]

    def refused(group: Any, path: str) -> None:
        part = Rank(group, path)
        drop = sar.nn.Dropout(0.5, part.graph)
        ones = torch.ones(part.graph.num_nodes("a"), 9)
        with pytest.raises(ValueError, match="may be those of a or of b.*rows=type"):
            drop(ones)
        assert drop(ones, rows="a").shape == ones.shape

    graph = GraphArrays("two", {"a": 5, "b": 6}, edges).with_orig_ids()
    path = partitioned(graph, 2, [0, 0, 0, 1, 1] + [0, 0, 0, 1, 1, 1])
    want = run_threads(1, case, partitioned(graph, 1))[0]
    parts = run_threads(2, case, path)
    assert all(torch.equal(torch.cat([p[i] for p in parts]), want[i]) for i in range(2))
    same = GraphArrays("same", {"a": 4, "b": 4}, edges).with_orig_ids()
    run_threads(2, refused, partitioned(same, 2, [0, 0, 0, 1] * 2))
    # a rank without rows takes part without knowing what they would be
    for cut in ([0, 0, 0, 1, 1] + [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1] + [0, 0, 0, 1, 1, 1]):
        empty = run_threads(3, case, partitioned(graph, 3, cut))
        assert torch.equal(torch.cat([p[1] for p in empty]), want[1])


def test_a_layer_of_one_relation_says_what_rows_are(partitioned: Cutter) -> None:
    """Two node types and a relation have as many rows everywhere: the layer was called with them,
    as sources and as destinations."""
    ids = torch.arange(4)
    edges = {("a", "into", "b"): (ids, ids), ("b", "back", "a"): (ids, (ids + 1) % 4)}
    graph = GraphArrays("same", {"a": 4, "b": 4}, edges).with_orig_ids()

    def case(group: Any, path: str, bound: bool) -> dict[str, Tensor]:
        part = Rank(group, path)
        model = HeteroGraphConv(copy.deepcopy(convs))
        model = sar.convert_dropout(model, part.graph if bound else None)
        sar.manual_seed(8)
        x = {t: torch.ones(part.graph.num_nodes(t), 16) for t in ("a", "b")}
        return {t: rows.detach() for t, rows in model(part.graph, x).items()}

    convs = {name: GATConv((16, 16), 3, 2, feat_drop=0.5) for name in ("into", "back")}
    want = run_threads(1, case, partitioned(graph, 1), False)[0]
    for bound in (False, True):
        parts = run_threads(2, case, partitioned(graph, 2, [0, 0, 1, 1] * 2), bound)
        for ntype, rows in want.items():
            torch.testing.assert_close(torch.cat([p[ntype] for p in parts]), rows)


def test_nodes_decide_where_relations_have_as_many_rows(partitioned: Cutter) -> None:
    """A right model is not refused: its layers drop rows of nodes."""
    ids = torch.arange(6)
    edges = {("a", name, "a"): (ids, (ids + step) % 6) for step, name in enumerate(("r", "s"), 1)}
    graph = GraphArrays("rings", {"a": 6}, edges).with_orig_ids()

    def case(group: Any, path: str) -> tuple[Tensor, Tensor]:
        part = Rank(group, path)
        model = sar.convert_dropout(nn.Sequential(nn.Dropout(0.5)), part.graph)
        sar.manual_seed(8)
        return model(torch.ones(part.graph.num_nodes("a"), 9)), part.nodes("a")

    def refused(group: Any, path: str) -> None:
        part = Rank(group, path)
        ones = torch.ones(part.graph.num_edges("r"), 9)
        with pytest.raises(ValueError, match="may be those of .*'r'.* or of .*'s'"):
            sar.nn.Dropout(0.5, part.graph)(ones)

    want, _ = run_threads(1, case, partitioned(graph, 1))[0]
    assert 0 < int((want == 0).sum()) < want.numel()
    for size, cut in ((2, [0, 0, 0, 1, 1, 1]), (3, [0, 0, 1, 1, 2, 2]), (3, [0, 0, 0, 0, 0, 1])):
        parts = run_threads(size, case, partitioned(graph, size, cut))
        assert torch.equal(joined([p[0] for p in parts], [p[1] for p in parts], 6), want)
    more = GraphArrays("rings", {"a": 7}, edges).with_orig_ids()
    run_threads(1, refused, partitioned(more, 1))


def test_what_is_kept_is_divided_by_its_chance(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        graph = Rank(group, partitioned(mixed(), 1)).graph
        ones = sar.nn.Dropout(0.75, graph)(torch.ones(graph.num_nodes(), 3))
        assert ones.unique().tolist() == [0, 4]

    run_threads(1, case)


def test_module_behaviour(partitioned: Cutter) -> None:
    """Evaluation and p = 0 change nothing; inplace writes; copies share the graph, pickles do not;
    shared modules stay shared; converting twice is converting once."""

    def case(group: Any) -> None:
        import pickle

        part = Rank(group, partitioned(mixed(), 1))
        x = part.feat()
        drop = sar.nn.Dropout(0.5, part.graph)
        assert isinstance(drop, nn.Dropout) and drop.eval()(x) is x
        assert sar.nn.Dropout(0.0)(x) is x
        other = copy.deepcopy(drop.train())
        assert other._bound.rows is drop._bound.rows and (other(x) == 0).any()
        with pytest.raises(ValueError, match="graph: got none, expected one"):
            pickle.loads(pickle.dumps(drop))(x)
        y = x.clone()
        assert sar.nn.Dropout(0.5, part.graph, inplace=True)(y) is y and not torch.equal(x, y)
        assert (sar.nn.Dropout(1.0, part.graph)(x) == 0).all()
        shared = nn.Dropout(0.5)
        model = sar.convert_dropout(nn.ModuleList([shared, nn.Sequential(shared)]).eval())
        assert model[0] is model[1][0] and type(model[0]) is sar.nn.Dropout
        assert not model[0].training and model is sar.convert_dropout(model)
        assert len(model._forward_pre_hooks) == 1
        assert type(sar.convert_dropout(nn.Dropout(0.25))) is sar.nn.Dropout
        with sar.nn.dropout_rows(part.graph):
            assert (sar.nn.Dropout(0.5)(x) == 0).any()
        with pytest.raises(ValueError, match="graph: got none"):
            sar.nn.Dropout(0.5)(x)

    run_threads(1, case)


def test_a_model_that_fails_leaves_no_graph_behind(partitioned: Cutter) -> None:
    class Fails(nn.Module):
        def forward(self, graph: Any) -> None:
            raise RuntimeError("stop")

    def case(group: Any) -> None:
        graph = Rank(group, partitioned(mixed(), 1)).graph
        model = sar.convert_dropout(Fails())
        with pytest.raises(RuntimeError, match="stop"):
            model(graph)
        with pytest.raises(ValueError, match="graph: got none"):
            sar.nn.Dropout(0.5)(torch.ones(graph.num_nodes(), 1))

    run_threads(1, case)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda drop, x: drop(x[1:]), ValueError, r"shape \(56, 6\).*row for each.*57 of _N"),
        (lambda drop, x: drop(x[0, 0]), ValueError, r"shape \(\), expected a row"),
        (lambda drop, x: drop(x.long()), TypeError, "got torch.int64, expected a floating"),
        (lambda drop, x: drop(x, rows="user"), ValueError, "no type 'user'"),
        (lambda drop, x: drop(x, rows=torch.arange(3)), ValueError, "got 3 ids, expected 57"),
        (lambda drop, x: drop(x, rows=x[:, 0]), TypeError, "expected integers"),
        (lambda drop, x: drop(x, "graph"), TypeError, "graph: got str"),
        (lambda drop, x: drop(x, []), TypeError, "graph: got list"),
        (lambda drop, x: sar.nn.Dropout(0.5, True), TypeError, "graph: got bool"),
        (lambda drop, x: sar.nn.Dropout(1.5), ValueError, "between 0 and 1"),
    ],
)
def test_bad_input_of_dropout(call: Any, error: type, match: str, partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        part = Rank(group, partitioned(mixed(), 1))
        with pytest.raises(error, match=match):
            call(sar.nn.Dropout(0.5, part.graph), part.feat())

    run_threads(1, case)


# The compiled kernel and its gradient.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    for shape in ((0, 3), (5, 0), (7,), (301, 2, 3), (4000, 70)):
        x = torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
        x.view(-1)[1:2] = float("nan")
        for keys in (torch.arange(len(x)).int(), -1 - torch.arange(len(x)) * 2**40):
            for p in (1e-9, 0.25, 0.7, 1 - 2**-53, 1.0):
                seed = int(torch.randint(2**62, (1,), generator=rng)) * 2 - 7
                got = keyed_dropout(x, keys, seed, p)
                want = reference_dropout(x, keys, seed, p)
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(got.nan_to_num().signbit(), want.nan_to_num().signbit())


def test_gradcheck_of_the_dropout_itself() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return keyed_dropout(x.T.contiguous().T, torch.arange(5), 77, 0.5) ** 2

    assert torch.autograd.gradcheck(run, x) and torch.autograd.gradgradcheck(run, x)


# Recomputed forward passes, training runs.


def test_a_recomputed_forward_has_the_same_masks(partitioned: Cutter) -> None:
    from torch.utils.checkpoint import checkpoint

    def case(group: Any, recompute: bool) -> list[Tensor]:
        part = Rank(group, partitioned(looped(), 2, "random"))
        sar.manual_seed(4)
        drop, x = sar.nn.Dropout(0.5, part.graph), part.feat()[:, :2].requires_grad_()
        weight = torch.eye(2, dtype=torch.float64).requires_grad_()

        def layer(x: Tensor) -> Tensor:
            return attended(part.graph, drop(x), weight)

        def twice(x: Tensor) -> Tensor:
            if not recompute:
                return layer(layer(x))
            options = {"use_reentrant": False, "context_fn": sar.nn.same_dropout}
            return checkpoint(layer, checkpoint(layer, x, **options), **options)

        out = twice(x)
        after = drop(torch.ones_like(out))
        (out * after).sin().sum().backward()
        return [out.detach(), x.grad, weight.grad, after, drop(after)]

    want, got = (run_threads(2, case, recompute) for recompute in (False, True))
    for one, other in zip(want, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_recomputed_forward_with_other_masks_is_refused(partitioned: Cutter) -> None:
    from torch.utils.checkpoint import checkpoint

    def case(group: Any) -> None:
        part = Rank(group, partitioned(mixed(), 1))
        drop, x = sar.nn.Dropout(0.5, part.graph), part.feat().requires_grad_()
        y = checkpoint(drop, x, use_reentrant=False)
        with pytest.raises(sar.SarError, match="drawn again in backward.*same_dropout"):
            (y * y).sum().backward()

    run_threads(1, case)
