"""Link prediction over many ranks against plain torch on the whole graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.compare import assert_close, assert_gradients_close
from harness.graphs import ETYPE_HOMO, GraphArrays, hetero, homogeneous, sample, sparse_hetero
from harness.parts import Cutter
from harness.rows import EDGE_KEY, Part, join_edges, join_nodes, whole
from harness.threads import run_threads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sar
from sar.kernels.keyed import keyed_uniform
from sar.nn import (
    DistMultScorer,
    DotScorer,
    LinkScorer,
    MLPScorer,
    NegativeSampler,
    hits_at,
    link_loss,
    negative_ranks,
    rank_links,
    ranking_metrics,
    score_edges,
)
from sar.tracing.lazy import eager

DIM, TYPES, K, SEED = 5, 3, 3, 11
CUTS = [(1, "random"), (3, "coarsen"), (4, "random"), (4, "adversarial"), (3, "adversarial")]
SCORERS = ["dot", "distmult", "mlp"]
METHODS = ["uniform", "per_source", "per_destination"]


def scorer_of(name: str, dtype: torch.dtype = torch.float64) -> LinkScorer:
    """The same parameters everywhere; threads share torch's own generator."""
    if name == "dot":
        return DotScorer()
    scorer = DistMultScorer(TYPES, DIM) if name == "distmult" else MLPScorer(2 * DIM, 7)
    rng = torch.Generator().manual_seed(3)
    for parameter in scorer.to(dtype).parameters():
        values = torch.rand(parameter.shape, generator=rng, dtype=torch.float64)
        parameter.data.copy_(values - 0.5)
    return scorer


@cache
def linked(name: str) -> GraphArrays:
    """A sample graph by name; "halves" has edges into its first nodes only."""
    if name == "halves":
        rng = torch.Generator().manual_seed(4)
        src, dst = torch.randint(20, (60,), generator=rng), torch.randint(6, (60,), generator=rng)
        return homogeneous("halves", 20, src, dst)
    return sample(name)


def rows_of(graph: GraphArrays, seed: int = 5) -> Tensor:
    return whole(graph.total_nodes, (DIM,), seed)


def drawn(graph: GraphArrays, method: str, step: int, k: int = K) -> dict[str, Tensor]:
    """The negatives as their definition says, without any sampler."""
    ((src, dst),), total = graph.edges.values(), graph.total_nodes
    eids = torch.arange(len(src))
    ends = {"src": src.repeat_interleave(k), "dst": dst.repeat_interleave(k)}
    for number, side in enumerate(ends):
        kept = {"per_source": "src", "per_destination": "dst"}.get(method)
        if side != kept:
            seed = int(keyed_uniform(torch.tensor([2 * step + number]), 1, SEED) * 2.0**53)
            ends[side] = (keyed_uniform(eids, k, seed) * total).floor().long().view(-1)
    types = graph.edge_data[ETYPE_HOMO]["type"].repeat_interleave(k)
    return {"key": torch.arange(len(src) * k), **ends, "type": types}


# ---------------------------------------------------------------- negatives


def ends_of(graph: Any, nodes: Any) -> Tensor:
    """[E, 2] original ids of the local edges' end points; ``nodes``: those of the nodes."""
    pair = nodes if isinstance(nodes, tuple) else (nodes, nodes)
    with graph.local_scope():
        graph.srcdata["id"], graph.dstdata["id"] = pair[0].double(), pair[1].double()
        if pair[0] is pair[1]:
            graph.ndata["id"] = pair[0].double()
        graph.apply_edges(lambda edges: {"u": edges.src["id"], "v": edges.dst["id"]})
        return torch.stack([eager(graph.edata["u"]), eager(graph.edata["v"])], 1).long()


def case_negatives(group: Any, path: str, method: str, step: int) -> Tensor:
    """[m, 4] key, original source and destination, and type of this rank's negatives."""
    part = Part(group, path)
    part.graph.edata["type"] = part.data.edge_features[f"{EDGE_KEY}/type"]
    sampler = NegativeSampler(part.graph, K, method, seed=SEED, columns=["type"])
    sampler(step + 1)  # no draw depends on another
    negatives = sampler(step)
    assert negatives.num_edges_global() == K * part.graph.num_edges_global()
    ids = [eager(negatives.edata[name]).unsqueeze(1) for name in ("_ID", "type")]
    return torch.cat([ids[0], ends_of(negatives, part.nodes), ids[1]], 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mixed", "halves"])
def test_negatives_do_not_depend_on_the_cut(name: str, method: str, partitioned: Cutter) -> None:
    graph = linked(name)
    want = drawn(graph, method, step=2)
    for size, cut in CUTS:
        parts = run_threads(size, case_negatives, partitioned(graph, size, cut), method, 2)
        found = torch.cat(parts)
        found = found[found[:, 0].argsort()]
        assert torch.equal(found, torch.stack(list(want.values()), 1)), (size, cut)


# ---------------------------------------------------------------- scores and loss


def case_loss(group: Any, path: str, name: str, setting: tuple) -> dict[str, Tensor]:
    method, policy = setting
    part = Part(group, path, policy)
    graph, scorer = part.graph, scorer_of(name)
    graph.edata["type"] = part.data.edge_features[f"{EDGE_KEY}/type"]
    edge_type = "type" if name == "distmult" else None
    h = part.node_rows(whole(part.graph.num_nodes_global(), (DIM,), 5))
    scores = score_edges(graph, scorer, h, edge_type=edge_type)
    columns = ["type"] if edge_type else []
    negatives = [
        NegativeSampler(graph, K, one, seed=SEED, columns=columns)(1) for one in both(method)
    ]
    loss = link_loss(graph, negatives, scorer, h, edge_type=edge_type)
    loss.backward()
    sar.gather_grads(scorer)
    result = {"nodes": part.nodes, "edges": part.edges, "scores": scores.detach(), "h": h.grad}
    result |= {name: parameter.grad for name, parameter in scorer.named_parameters()}
    return {**result, "loss": loss.detach()}


def both(method: str) -> list[str]:
    return ["per_source", "per_destination"] if method == "both" else [method]


def mean_loss(positive: Tensor, negative: Tensor) -> Tensor:
    return (F.softplus(-positive).mean() + F.softplus(negative).mean()) / 2


def expected_loss(graph: GraphArrays, name: str, method: str) -> dict[str, Tensor]:
    ((src, dst),), scorer = graph.edges.values(), scorer_of(name)
    h = rows_of(graph).requires_grad_()
    types = graph.edge_data[ETYPE_HOMO]["type"]
    positive = scorer(h[src], h[dst], types)
    false = [drawn(graph, one, step=1) for one in both(method)]
    negative = torch.cat([scorer(h[d["src"]], h[d["dst"]], d["type"]) for d in false])
    loss = mean_loss(positive, negative)
    loss.backward()
    found = {"scores": positive.detach(), "h": h.grad, "loss": loss.detach()}
    return found | {key: parameter.grad for key, parameter in scorer.named_parameters()}


POLICIES = [None, sar.Policy(rounds=1), sar.Policy(block_bytes=1), sar.Policy(rematerialize=False)]


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("graph", ["mixed", "halves", "repeated"])
def test_loss_and_gradients(graph: str, name: str, partitioned: Cutter) -> None:
    arrays = linked(graph)
    for number, (size, cut) in enumerate(CUTS):
        method = [*METHODS, "both"][(number + SCORERS.index(name)) % 4]
        setting = (method, POLICIES[number % len(POLICIES)])
        parts = run_threads(size, case_loss, partitioned(arrays, size, cut), name, setting)
        want = expected_loss(arrays, name, method)
        scores, loss = want.pop("scores"), want.pop("loss")
        assert_close(join_edges(parts, "scores", len(scores)), scores, "scores", torch.float64)
        for part in parts:
            assert_close(part["loss"], loss, "loss", torch.float64)
        got = {key: parts[0][key] for key in want}
        got["h"] = join_nodes(parts, "h", arrays.total_nodes)
        assert_gradients_close(got, want, torch.float64)


def test_only_the_scorer_learns(partitioned: Cutter) -> None:
    """Also on a rank that has no edge to score."""
    arrays = linked("halves")
    want = expected_loss(arrays, "mlp", "per_source")

    def case(group: Any, path: str) -> None:
        part, scorer = Part(group, path), scorer_of("mlp")
        h = part.node_rows(whole(part.graph.num_nodes_global(), (DIM,), 5), grad=False)
        link_loss(part.graph, NegativeSampler(part.graph, K, seed=SEED)(1), scorer, h).backward()
        assert all(parameter.grad is not None for parameter in scorer.parameters())
        sar.gather_grads(scorer)
        found = {name: parameter.grad for name, parameter in scorer.named_parameters()}
        assert_gradients_close(found, {name: want[name] for name in found}, torch.float64)

    run_threads(4, case, partitioned(arrays, 4, "adversarial"))


def case_hetero(group: Any, path: str, etype: tuple) -> dict[str, Any]:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data)[etype]
    ids = tuple(data.node_features[f"{ntype}/orig_id"] for ntype in (etype[0], etype[2]))
    counts = [graph.num_nodes_global(ntype) for ntype in (etype[0], etype[2])]
    h = tuple(
        whole(count, (DIM,), seed)[rows].requires_grad_()
        for count, seed, rows in zip(counts, (1, 2), ids)
    )
    negatives = NegativeSampler(graph, K, "per_source", seed=SEED)(0)
    scorer = MLPScorer(2 * DIM, 7).double()
    sar.sync_params(scorer)
    loss = link_loss(graph, negatives, scorer, h)
    loss.backward()
    sar.gather_grads(scorer)
    grads = [parameter.grad for parameter in scorer.parameters()]
    with torch.no_grad():
        ranks = rank_links(graph, scorer, h, torch.ones(graph.num_edges()).bool())
    key = f"{':'.join(etype)}/orig_eid"
    return {
        "ids": ids, "h": [rows.grad for rows in h], "loss": loss.detach(), "scorer": scorer,
        "grads": grads, "ends": ends_of(negatives, ids), "keys": negatives.edata["_ID"],
        "ranks": ranks, "edges": data.edge_features[key],
    }  # fmt: skip


@pytest.mark.parametrize("etype", [("user", "buys", "item"), ("tag", "marks", "item")])
def test_relations_between_two_types(etype: tuple, partitioned: Cutter) -> None:
    arrays = hetero()
    src, dst = arrays.edges[etype]
    for size, cut in [(1, "random"), (3, "random"), (4, "adversarial")]:
        parts = run_threads(size, case_hetero, partitioned(arrays, size, cut), etype)
        scorer = parts[0]["scorer"]
        scorer.zero_grad()
        h = [
            whole(arrays.num_nodes[ntype], (DIM,), seed).requires_grad_()
            for ntype, seed in ((etype[0], 1), (etype[2], 2))
        ]
        ends = torch.cat([part["ends"] for part in parts])
        order = torch.cat([part["keys"] for part in parts]).argsort()
        assert torch.equal(ends[order, 0], src.repeat_interleave(K))
        positive = scorer(h[0][src], h[1][dst])
        negative = scorer(h[0][ends[:, 0]], h[1][ends[:, 1]])
        loss = mean_loss(positive, negative)
        loss.backward()
        assert_close(parts[0]["loss"], loss.detach(), "loss", torch.float64)
        for side in (0, 1):
            got = torch.empty_like(h[side])
            for part in parts:
                got[part["ids"][side]] = part["h"][side]
            assert_close(got, h[side].grad, f"rows of side {side}", torch.float64)
        for got, parameter in zip(parts[0]["grads"], scorer.parameters()):
            assert_close(got, parameter.grad, "parameter", torch.float64)
        want = brute_ranks(scorer, h, torch.stack([src, dst, torch.zeros_like(src)], 1))
        assert torch.equal(join_edges(parts, "ranks", len(src)), want)


def case_no_edges(group: Any, path: str) -> list[str]:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data)["bought_by"]
    h = (torch.ones(graph.num_src_nodes(), DIM), torch.ones(graph.num_dst_nodes(), DIM))
    assert len(score_edges(graph, DotScorer(), h)) == 0
    negatives = NegativeSampler(graph, K)(0)
    assert negatives.num_edges_global() == 0
    ranks = rank_links(graph, DotScorer(), h, torch.ones(0, dtype=torch.bool))
    assert ranks.shape == (0, 2) and str(ranking_metrics(ranks)["mrr"]) == "nan"
    with pytest.raises(ValueError, match="no edge on any rank"):
        link_loss(graph, negatives, DotScorer(), h)
    return [str(negatives)]


def test_a_relation_without_edges(partitioned: Cutter) -> None:
    run_threads(3, case_no_edges, partitioned(sparse_hetero(), 3, "random"))


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation makes, of floats only or of all dtypes."""

    def __init__(self, floats: bool = True) -> None:
        super().__init__()
        self.floats, self.elements = floats, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for out in tree_leaves(result):
            if isinstance(out, Tensor) and (out.is_floating_point() or not self.floats):
                self.elements = max(self.elements, out.untyped_storage().nbytes() // 8)
        return result


def case_largest(group: Any, path: str) -> int:
    part = Part(group, path, sar.Policy(block_bytes=1 << 15))
    h = part.node_rows(whole(part.graph.num_nodes_global(), (DIM,), 5))
    negatives = NegativeSampler(part.graph, 20, seed=SEED)(0)
    assert negatives.num_edges() > 10 * 256
    with Largest() as watch:
        link_loss(part.graph, negatives, MLPScorer(2 * DIM, 7).double(), h).backward()
    return watch.elements


def test_no_tensor_is_larger_than_what_is_owned(partitioned: Cutter) -> None:
    """Blocks of 256 edges or 32 KiB of rows bound a loss over 5,000 negatives."""
    (elements,) = run_threads(1, case_largest, partitioned(linked("mixed"), 1))
    assert elements <= 4096


# ---------------------------------------------------------------- ranks


def brute_ranks(scorer: nn.Module, h: list[Tensor], edges: Tensor, filtered: bool = True) -> Tensor:
    """[E, 2] ranks, one candidate at a time, on rows of sources and of destinations."""
    known = set(map(tuple, edges.tolist()))
    ranks = torch.empty(len(edges), 2, dtype=torch.float64)
    with torch.no_grad():
        for number, edge in enumerate(edges.tolist()):
            for side in (0, 1):
                count = len(h[side])
                ends = [torch.full((count,), edge[0]), torch.full((count,), edge[1])]
                ends[side] = torch.arange(count)
                kinds = torch.full((count,), edge[2])
                scores = scorer(h[0][ends[0]], h[1][ends[1]], kinds).float()
                truth = scores[edge[side]]
                keep = torch.ones(count, dtype=torch.bool)
                for other in range(count):
                    candidate = (*edge[:side], other, *edge[side + 1 :])
                    keep[other] = other != edge[side] and not (filtered and candidate in known)
                better, level = scores[keep] > truth, scores[keep] == truth
                ranks[number, side] = 1 + better.sum() + level.sum() / 2
    return ranks


def case_ranks(group: Any, path: str, name: str, filtered: bool, tied: bool) -> dict[str, Any]:
    part = Part(group, path)
    part.graph.edata["type"] = part.data.edge_features[f"{EDGE_KEY}/type"]
    rows = whole(part.graph.num_nodes_global(), (DIM,), 5)
    if tied:
        rows = rows[:1].expand_as(rows)
    edge_type = "type" if name == "distmult" else None
    ranks = rank_links(
        part.graph, scorer_of(name), part.node_rows(rows.clone()), part.edges % 2 == 0,
        edge_type=edge_type, filtered=filtered,
    )  # fmt: skip
    chosen = part.edges[part.edges % 2 == 0] // 2
    return {"ranks": ranks, "edges": chosen, "metrics": ranking_metrics(ranks)}


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("name", SCORERS)
def test_ranks_equal_brute_force(
    name: str, filtered: bool, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sar.nn.ranking._BATCH", 16)  # several batches, several blocks
    monkeypatch.setattr("sar.nn.ranking._SCORES", 64)
    graph = linked("mixed")
    edges = edges_of(graph, typed=name == "distmult")
    want = brute_ranks(scorer_of(name), [rows_of(graph)] * 2, edges, filtered)[::2]
    for size, cut in CUTS:
        parts = run_threads(size, case_ranks, partitioned(graph, size, cut), name, filtered, False)
        assert torch.equal(join_edges(parts, "ranks", len(want)), want), (size, cut)
        for part in parts:
            assert abs(part["metrics"]["mrr"] - float((1 / want).mean())) < 1e-12
            for k in (1, 3, 10):
                expected = float((want <= k).double().mean())
                assert abs(part["metrics"][f"hits@{k}"] - expected) < 1e-12


def edges_of(graph: GraphArrays, typed: bool) -> Tensor:
    ((src, dst),), types = graph.edges.values(), graph.edge_data[ETYPE_HOMO]["type"]
    return torch.stack([src, dst, types if typed else torch.zeros_like(types)], 1)


@pytest.mark.parametrize("name", SCORERS)
def test_all_nodes_tied(name: str, partitioned: Cutter) -> None:
    """Half of the competitors, on any number of ranks."""
    graph = linked("mixed")
    edges = edges_of(graph, typed=name == "distmult")
    h = [rows_of(graph)[:1].expand(graph.total_nodes, -1)] * 2
    want = brute_ranks(scorer_of(name), h, edges)[::2]
    assert float(want.min()) > 10
    for size, cut in [(1, "random"), (4, "adversarial"), (3, "coarsen")]:
        parts = run_threads(size, case_ranks, partitioned(graph, size, cut), name, True, True)
        assert torch.equal(join_edges(parts, "ranks", len(want)), want)


def test_a_broken_model_ranks_last(partitioned: Cutter) -> None:
    def case(group: Any, path: str) -> tuple[float, float]:
        part = Part(group, path)
        rows = torch.full((len(part.nodes), DIM), float("nan"))
        ranks = rank_links(part.graph, DotScorer(), rows, torch.ones(len(part.edges)).bool())
        given = negative_ranks(torch.tensor([float("nan")]), torch.ones(1, 4))
        return float(ranks.min()), float(given)

    for least, given in run_threads(2, case, partitioned(linked("loops"), 2, "random")):
        assert least > 5 and given == 5


# ---------------------------------------------------------------- given negatives


def ogb_ranks(positive: Tensor, negative: Tensor) -> Tensor:
    optimist = (negative > positive.unsqueeze(1)).sum(1)
    pessimist = (negative >= positive.unsqueeze(1)).sum(1)
    return 1 + (optimist + pessimist).double() / 2


def case_given(group: Any, positive: Tensor, negative: Tensor) -> dict[str, Any]:
    """Links and negatives lie on any rank, in any order."""
    count, k = negative.shape
    rng = torch.Generator().manual_seed(8)
    home = torch.randint(group.size, (count,), generator=rng)
    away = torch.randint(group.size, (count * k,), generator=rng)
    mine = (home == group.rank).nonzero().view(-1).flip(0)
    others = (away == group.rank).nonzero().view(-1).flip(0)
    flat = negative.reshape(-1)[others]
    ranks = negative_ranks(positive[mine], flat, mine * 7, others // k * 7)
    return {
        "edges": mine, "ranks": ranks, "metrics": ranking_metrics(ranks),
        "hits": [hits_at(positive[mine], flat, k) for k in (1, 5, 50, 1000)],
        "aligned": negative_ranks(positive[mine], negative[mine]),
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 4])
def test_given_negatives(size: int) -> None:
    rng = torch.Generator().manual_seed(6)
    positive = torch.randint(8, (13,), generator=rng).double()  # many ties
    negative = torch.randint(8, (13, 9), generator=rng).double()
    parts = run_threads(size, case_given, positive, negative)
    want = ogb_ranks(positive, negative)
    for key in ("ranks", "aligned"):
        assert torch.equal(join_edges(parts, key, 13), want)
    assert abs(parts[0]["metrics"]["mrr"] - float((1 / want).mean())) < 1e-12
    best = negative.view(-1).sort(descending=True).values
    shares = [float((positive > best[k - 1]).double().mean()) for k in (1, 5, 50)]
    assert all(part["hits"] == [*shares, 1.0] for part in parts)


def test_ids_of_negatives_are_exact_and_known() -> None:
    """float64 does not tell the first two ids apart."""
    links = torch.tensor([2**53 + 2, 2**53 + 3, 5])
    positive, negative = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 4.0, 4.0])

    def case(group: Any) -> list[float]:
        mine = slice(0, 3) if group.rank == 0 else slice(0, 0)
        theirs = slice(0, 3) if group.rank == 1 else slice(0, 0)
        twice = links[[0, 0, 2]]
        for words, of, to in (
            (f"positive_ids: got {2**53 + 2} more than once", twice, links),
            ("negative_ids: got 6, expected one of positive_ids", links, torch.full((3,), 6)),
            (r"negative_ids: got torch.int32 \(\d,\), expected int64", links, links.int()),
        ):
            with pytest.raises(ValueError, match="rank 0: .*" + words):
                negative_ranks(positive[mine], negative[theirs], of[mine], to[theirs])
        to = links[[0, 1, 1]]
        return negative_ranks(positive[mine], negative[theirs], links[mine], to[theirs]).tolist()

    assert run_threads(2, case) == [[2.0, 3.0, 1.0], []]


# ---------------------------------------------------------------- bad input


class Wrong(nn.Module):
    """Keeps the width of the rows."""

    def forward(self, src: Tensor, dst: Tensor, edge_type: Tensor | None) -> Tensor:
        return src * dst


class Failing(DotScorer):
    """A user's scorer that does not run on one rank."""

    def forward(self, src: Tensor, dst: Tensor, edge_type: Tensor | None) -> Tensor:
        assert sar.comm.current_group().rank == 0, "only here"
        return super().forward(src, dst, edge_type)


def case_bad(group: Any, path: str) -> None:
    part = Part(group, path)
    graph = part.graph
    graph.edata["type"] = part.data.edge_features[f"{EDGE_KEY}/type"]
    graph.edata["far"] = torch.full((len(part.edges),), TYPES + 4 * (group.rank == 1) - 1)
    h = torch.ones(len(part.nodes), DIM)
    short = h[1:] if group.rank == 1 else h  # wrong on one rank only
    distmult, every = scorer_of("distmult", torch.float32), torch.ones(len(part.edges)).bool()
    bad = [
        (ValueError, "rank 1: .*h: got shape", lambda: score_edges(graph, DotScorer(), short)),
        (TypeError, "got torch.int64", lambda: score_edges(graph, DotScorer(), h.long())),
        (ValueError, "edge_type: got None", lambda: score_edges(graph, distmult, h)),
        (KeyError, "nowhere", lambda: score_edges(graph, distmult, h, edge_type="nowhere")),
        (ValueError, "rank 1: .*types from 6 to 6, expected 0 to 2",
         lambda: score_edges(graph, distmult, h, edge_type="far")),
        (RuntimeError, "size", lambda: score_edges(graph, distmult, h[:, 1:], edge_type="type")),
        (TypeError, "scorer: got builtin", lambda: score_edges(graph, max, h)),
        (ValueError, "scorer: returned", lambda: score_edges(graph, Wrong(), h)),
        (AssertionError, "rank 1: .*only here", lambda: score_edges(graph, Failing(), h)),
        (ValueError, "rank 1: .*queries: got shape",
         lambda: rank_links(graph, DotScorer(), h, every[group.rank :])),
        (ValueError, "graph: got a reversed", lambda: score_edges(graph.reverse(), DotScorer(), h)),
        (ValueError, "k: got 0", lambda: NegativeSampler(graph, 0)),
        (ValueError, "method: got 'all'", lambda: NegativeSampler(graph, 1, "all")),
        (TypeError, "seed", lambda: NegativeSampler(graph, 1, seed=0.5)),
        (KeyError, "nowhere", lambda: NegativeSampler(graph, 1, columns=["nowhere"])),
        (ValueError, "k: got 0", lambda: hits_at(h[0], h[0], 0)),
        (ValueError, "negative_ids", lambda: negative_ranks(h[0], h[0], torch.arange(DIM), None)),
        (ValueError, "edges: got", lambda: graph.edge_subgraph(every[group.rank :])),
        (ValueError, "edges: got NoneType", lambda: graph.edge_subgraph(None)),
        (TypeError, "negatives: got NoneType", lambda: link_loss(graph, None, DotScorer(), h)),
    ]  # fmt: skip
    for kind, words, call in bad:
        with pytest.raises(kind, match=words):
            call()


def test_bad_input_is_told_on_every_rank(partitioned: Cutter) -> None:
    run_threads(2, case_bad, partitioned(linked("mixed"), 2, "random"))


# ---------------------------------------------------------------- subgraphs


def case_subgraph(group: Any, path: str) -> dict[str, Tensor]:
    part = Part(group, path)
    graph = part.graph
    graph.edata["weight"] = part.data.edge_features[f"{EDGE_KEY}/weight"].double()
    keep = part.edges % 3 > 0
    graph.apply_edges(lambda edges: {"keep": edges.data["weight"]})  # lazy
    graph.edge_subgraph(graph.edata["keep"] > 1)
    smaller = graph.edge_subgraph(keep)
    x = part.node_rows(whole(part.graph.num_nodes_global(), (DIM,), 5))
    out = smaller.aggregate(x, "sum", edge_weight=eager(smaller.edata["weight"]))
    out.square().sum().backward()
    assert torch.equal(smaller.edata["_ID"], graph.edata["_ID"][keep])
    assert smaller.num_edges() == int(keep.sum()) and graph.num_edges() == len(keep)
    return {
        "nodes": part.nodes, "out": out.detach(), "x": x.grad, "in": smaller.in_degrees(),
        "outd": smaller.out_degrees(),
    }  # fmt: skip


def test_edge_subgraph(partitioned: Cutter) -> None:
    graph = linked("mixed")
    ((src, dst),), total = graph.edges.values(), graph.total_nodes
    keep = torch.arange(len(src)) % 3 > 0
    src, dst, weight = src[keep], dst[keep], graph.edge_data[ETYPE_HOMO]["weight"][keep].double()
    x = rows_of(graph).requires_grad_()
    out = torch.zeros_like(x).index_add(0, dst, x[src] * weight.unsqueeze(1))
    out.square().sum().backward()
    for size, cut in CUTS:
        parts = run_threads(size, case_subgraph, partitioned(graph, size, cut))
        assert_close(join_nodes(parts, "out", total), out.detach(), "out", torch.float64)
        assert_close(join_nodes(parts, "x", total), x.grad, "x", torch.float64)
        for key, ends in (("in", dst), ("outd", src)):
            got = join_nodes(parts, key, total)
            assert torch.equal(got.long(), torch.bincount(ends, minlength=total))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_distmult_equals_its_formula(dtype: torch.dtype) -> None:
    """Scores and gradients, and the gradient of a gradient."""
    generator = torch.Generator().manual_seed(2)
    scorer = DistMultScorer(4, 7).to(dtype)
    src, dst = (torch.randn(30, 7, generator=generator).to(dtype) for _ in range(2))
    kinds = torch.randint(3, (30,), generator=generator)  # the last type has no edge
    leaves = [src.requires_grad_(), dst.requires_grad_(), scorer.weight]
    factor = torch.randn(30, generator=generator).to(dtype)
    got = scorer(src, dst, kinds)
    want = (src * scorer.weight[kinds] * dst).sum(1)
    bound = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    for again in (False, True):
        found, expected = (
            torch.autograd.grad((s * factor).sum(), leaves, create_graph=again, retain_graph=True)
            for s in (got, want)
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=bound, atol=4 * bound)
    second = [torch.autograd.grad(rows[0].square().sum(), dst)[0] for rows in (found, expected)]
    torch.testing.assert_close(*second, rtol=10 * bound, atol=10 * bound)
