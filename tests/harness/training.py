"""One training run, written once: DGL on the whole graph, or every rank on its part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness import models
from harness.compare import TOLERANCE, assert_close, assert_gradients_close, relative_error
from harness.graphs import sample, to_dgl
from sar.partition.arrays import GraphArrays

STEPS = 3  # the last meets what is kept of constant inputs


@dataclass(frozen=True)
class Setting:
    """What a training run is done with.

    Attributes:
        model: a name of :mod:`harness.models`.
        rounds: of the policy; None is strict.
        mfgs: on message flow graphs of the training nodes instead of the full graph.
        optimizers: three further steps are made with each of these.
        graph: name of the graph; by default the one that suits the model.
    """

    model: str
    rounds: int | None = None
    mfgs: bool = False
    rematerialize: bool = True
    dtype: torch.dtype = torch.float64
    optimizers: tuple[str, ...] = ()
    graph: str = ""

    @property
    def sample(self) -> GraphArrays:
        return sample(self.graph or models.sample_graph(self.model))


@dataclass
class Outcome:
    """Rows are by node type, in the order of ``out_ids`` and ``in_ids`` (original ids)."""

    loss: float
    logits: dict[str, Tensor]
    out_ids: dict[str, Tensor]
    input_grads: dict[str, Tensor]
    in_ids: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    stepped: dict[str, dict[str, Tensor]]
    collectives: int = 0


@dataclass
class Inputs:
    """What a model is trained on: one graph a layer, and rows by node type."""

    graphs: list[Any]
    edges: list[models.Edges]
    x: dict[str, Tensor]
    in_ids: dict[str, Tensor]
    labels: dict[str, Tensor]
    masks: dict[str, Tensor]
    out_ids: dict[str, Tensor]


def train(
    model: nn.Module,
    inputs: Inputs,
    mean: Callable[[Tensor, Tensor], Tensor],
    gather: Callable[[nn.Module], None],
    optimizers: Iterable[str],
) -> Outcome:
    """A forward and a backward pass, then three steps of each optimizer, each from the start."""

    def loss_of(net: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        logits = net(inputs.graphs, inputs.x, inputs.edges)
        parts = [
            mean(F.cross_entropy(logits[t], inputs.labels[t], reduction="none"), inputs.masks[t])
            for t in sorted(logits)
        ]
        return torch.stack(parts).sum(), logits

    stepped = {}
    for name in optimizers:
        net = copy.deepcopy(model)
        stepped[name] = _steps(net, lambda net=net: loss_of(net)[0], gather, name)
    for rows in inputs.x.values():
        rows.requires_grad_()
        rows.grad = None
    loss, logits = loss_of(model)
    loss.backward()
    gather(model)
    return Outcome(
        loss=loss.item(),
        logits={t: rows.detach() for t, rows in logits.items()},
        out_ids={t: inputs.out_ids[t] for t in logits},
        input_grads={t: _or_zeros(rows) for t, rows in inputs.x.items()},
        in_ids=inputs.in_ids,
        grads={n: p.grad for n, p in model.named_parameters()},
        stepped=stepped,
    )


def _or_zeros(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


def _steps(
    net: nn.Module, loss: Callable[[], Tensor], gather: Callable[[nn.Module], None], name: str
) -> dict[str, Tensor]:
    if name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        gather(net)
        optimizer.step()
    return {n: p.detach() for n, p in net.named_parameters()}


# The reference.


def reference(setting: Setting) -> Outcome:
    """DGL in one process in float64, on the same (possibly rounded) numbers; computed once."""
    rounded = torch.bfloat16 if setting.dtype == torch.bfloat16 else torch.float64
    optimizers = ("sgd", "adam") if models.comparable_with_adam(setting.model) else ("sgd",)
    if not setting.optimizers:
        optimizers = ()
    return _reference(
        Setting(
            setting.model,
            mfgs=setting.mfgs,
            dtype=rounded,
            optimizers=optimizers,
            graph=setting.graph,
        )
    )


@cache
def _reference(setting: Setting, compute: torch.dtype = torch.float64) -> Outcome:
    """``setting.dtype`` rounds the inputs and the parameters; ``compute`` is what DGL runs in."""
    whole = to_dgl(setting.sample)
    model = models.build(setting.model).to(setting.dtype).to(compute)
    graphs = whole_blocks(whole, train_nodes(whole), 2) if setting.mfgs else [whole, whole]

    def values(data: Any) -> dict[str, Tensor]:
        return {
            k: v.to(setting.dtype).to(compute) if v.is_floating_point() else v
            for k, v in data.items()
        }

    src, dst = graphs[0], graphs[1]
    feats = {t: values(src.srcnodes[t].data)["feat"] for t in src.srctypes}
    inputs = Inputs(
        graphs,
        [{e: values(g.edges[e].data) for e in g.canonical_etypes} for g in graphs],
        feats,
        {t: src.srcnodes[t].data["orig_id"] for t in src.srctypes},
        {t: dst.dstnodes[t].data["label"] for t in dst.dsttypes},
        {t: dst.dstnodes[t].data["train_mask"] for t in dst.dsttypes},
        {t: dst.dstnodes[t].data["orig_id"] for t in dst.dsttypes},
    )

    def mean(rows: Tensor, mask: Tensor) -> Tensor:
        return rows[mask].mean()

    with models.default_dtype(setting.model, compute):
        return train(model, inputs, mean, lambda net: None, setting.optimizers)


@cache
def rounding_of_dgl(model: str, mfgs: bool) -> tuple[float, float]:
    """Relative errors of logits and of gradients when DGL itself runs the model in bfloat16.

    Dense layers and the loss round too: two layers of most models leave 1e-2 behind before any
    row has crossed a wire.
    """
    setting = Setting(model, mfgs=mfgs, dtype=torch.bfloat16)
    want = reference(setting)
    got = _reference(replace(setting, optimizers=()), torch.bfloat16)
    logits = [relative_error(got.logits[t], rows) for t, rows in want.logits.items()]
    errors = [relative_error(got.input_grads[t], g) for t, g in want.input_grads.items()]
    largest = max(float(g.abs().max()) for g in want.grads.values() if g is not None)
    for key, grad in want.grads.items():
        if grad is not None and float(grad.abs().max()) > 1e-9 * largest:
            errors.append(relative_error(got.grads[key], grad))
    return max(logits), max(errors)


def train_nodes(whole: Any) -> dict[str, Tensor]:
    return {t: whole.nodes[t].data["train_mask"].nonzero().view(-1) for t in whole.ntypes}


def whole_blocks(
    whole: Any, seeds: dict[str, Tensor], num_layers: int, keep_seeds: bool = True
) -> list[Any]:
    """DGL's message flow graphs of all in-edges, with node and edge data."""
    import dgl

    blocks = []
    for _ in range(num_layers):
        below = dgl.in_subgraph(whole, seeds)
        block = dgl.to_block(below, seeds, include_dst_in_src=keep_seeds)
        for etype in block.canonical_etypes:
            eids = below.edges[etype].data[dgl.EID][block.edges[etype].data[dgl.EID]]
            for key, value in whole.edges[etype].data.items():
                block.edges[etype].data[key] = value[eids]
        for ntype in whole.ntypes:
            for frame in (block.srcnodes[ntype].data, block.dstnodes[ntype].data):
                ids = frame[dgl.NID]
                for key, value in whole.nodes[ntype].data.items():
                    frame[key] = value[ids]
        seeds = {t: block.srcnodes[t].data[dgl.NID] for t in block.srctypes}
        blocks.insert(0, block)
    return blocks


# The ranks.


def case_train(group: Any, json_path: str, setting: Setting, state: dict[str, Tensor]) -> Outcome:
    """Train on this rank's part as a user does, with the parameters of ``state``."""
    import sar

    data = sar.load_dgl_partition_data(json_path, group.rank, "cpu")
    policy = sar.Policy(rounds=setting.rounds, rematerialize=setting.rematerialize)
    model = sar.convert_batch_norm(models.make(setting.model))
    model.load_state_dict(state)
    model.to(setting.dtype)
    before = group.counters.collectives
    outcome = train(
        model,
        part_inputs(data, setting, policy),
        lambda values, mask: sar.global_mean(values, mask),
        sar.gather_grads,
        setting.optimizers,
    )
    return replace(outcome, collectives=group.counters.collectives - before)


def part_inputs(data: Any, setting: Setting, policy: Any) -> Inputs:
    """This rank's graphs and rows."""
    import dgl

    import sar

    if setting.mfgs:
        seeds = local_train_nodes(data)
        graphs = [g.with_policy(policy) for g in sar.construct_mfgs(data, seeds, 2)]
    else:
        graphs = [sar.construct_full_graph(data, policy)] * 2

    def rows(key: str, ntype: str, idx: Tensor) -> Tensor:
        return data.node_features[f"{ntype}/{key}"][idx]

    def edge_rows(graph: Any, etype: tuple[str, str, str]) -> dict[str, Tensor]:
        start = int(data.book.edge_ranges[etype][data.part_id, 0])
        position = graph[etype].edata[dgl.EID].long() - start
        names = ("weight", "type")
        found = {n: data.edge_features[":".join(etype) + "/" + n][position] for n in names}
        return {n: v.to(setting.dtype) if n == "weight" else v for n, v in found.items()}

    first, last = graphs[0], graphs[-1]
    src = {t: first.srcnodes(t) for t in first.srctypes}
    dst = {t: last.dstnodes(t) for t in last.dsttypes}
    return Inputs(
        graphs,
        [{e: edge_rows(g, e) for e in g.canonical_etypes} for g in graphs],
        {t: rows("feat", t, ids).to(setting.dtype) for t, ids in src.items()},
        {t: rows("orig_id", t, ids) for t, ids in src.items()},
        {t: rows("label", t, ids) for t, ids in dst.items()},
        {t: rows("train_mask", t, ids).bool() for t, ids in dst.items()},
        {t: rows("orig_id", t, ids) for t, ids in dst.items()},
    )


def local_train_nodes(data: Any) -> Tensor:
    """Global ids of this part's training nodes, all types."""
    found = []
    for ntype in data.book.ntypes:
        mask = data.node_features[f"{ntype}/train_mask"].bool()
        start = int(data.book.node_ranges[ntype][data.part_id, 0])
        found.append(mask.nonzero().view(-1) + start)
    return torch.cat(found)


def start_state(setting: Setting) -> dict[str, Tensor]:
    """The parameters that the reference starts from."""
    return models.build(setting.model).state_dict()


# The comparison.


def check(setting: Setting, ranks: list[Outcome]) -> None:
    """Every rank's outcome against the reference, within the bounds of the dtype.

    In bfloat16 also within a small multiple of what DGL's own bfloat16 is off. Which message is the
    largest may hang on the last bit there, so gradients through a maximum are not compared.
    """
    want, dtype = reference(setting), setting.dtype
    at_least = rows_at_least = 0.0
    gradients = True
    if dtype == torch.bfloat16:
        rows_at_least, at_least = rounding_of_dgl(setting.model, setting.mfgs)
        rows_at_least, at_least = 1.5 * rows_at_least, 3 * at_least
        gradients = not models.takes_a_maximum(setting.model)
    elif dtype == torch.float32:
        at_least = models.ROUNDING.get(setting.model, 0.0)
    for ntype, rows in want.logits.items():
        got = gathered([r.logits[ntype] for r in ranks], [r.out_ids[ntype] for r in ranks])
        expected = gathered([rows], [want.out_ids[ntype]])
        assert_close(got, expected, f"logits of {ntype}", dtype, at_least=rows_at_least)
    got_inputs = {
        t: gathered([r.input_grads[t] for r in ranks], [r.in_ids[t] for r in ranks])
        for t in want.input_grads
    }
    want_inputs = {t: gathered([g], [want.in_ids[t]]) for t, g in want.input_grads.items()}
    if gradients:
        assert_gradients_close(got_inputs, want_inputs, dtype, "gradient of the input", at_least)
    for rank, outcome in enumerate(ranks):
        assert outcome.loss == ranks[0].loss, f"rank {rank} has its own loss"
        error = abs(outcome.loss - want.loss) / abs(want.loss)
        assert error <= TOLERANCE[dtype], f"loss: relative error {error:.3g}"
        assert outcome.grads.keys() == want.grads.keys()
        if gradients:
            assert_gradients_close(outcome.grads, want.grads, dtype, at_least=at_least)
        for name, stepped in outcome.stepped.items():
            _check_stepped(name, stepped, want.stepped[name], dtype)


def _check_stepped(name: str, got: dict, want: dict, dtype: torch.dtype) -> None:
    largest = max(float(value.abs().max()) for value in want.values())
    for key, value in want.items():
        if name == "adam":
            error = float((got[key] - value).abs().max()) / float(value.abs().max())
            assert error <= 1e-9, f"{key} after {STEPS} Adam steps: {error:.3g}"
        else:
            scale = None if float(value.abs().max()) > 1e-11 * largest else largest
            assert_close(got[key], value, f"{key} after {STEPS} SGD steps", dtype, scale)


def gathered(rows: list[Tensor], ids: list[Tensor]) -> Tensor:
    """Rows of all ranks by ascending original id."""
    order = torch.cat(ids).sort()
    assert len(order.values.unique()) == len(order.values), "a node came twice"
    return torch.cat(rows)[order.indices]


def typed_graph(
    path: str, rank: int, policy: Any, block: bool
) -> tuple[Any, Any, dict[str, Tensor], dict[str, Tensor]]:
    """A rank's partition, its graph or first block, and the original ids of both ends by type."""
    import sar

    data = sar.load_dgl_partition_data(path, rank, "cpu")
    if block:
        graph = sar.construct_mfgs(data, local_train_nodes(data), 1)[0].with_policy(policy)
    else:
        graph = sar.construct_full_graph(data, policy)
    ids = {t: data.node_features[f"{t}/orig_id"] for t in data.book.ntypes}
    src = {t: ids[t][graph.srcnodes(t)] for t in graph.srctypes}
    dst = {t: ids[t][graph.dstnodes(t)] for t in graph.dsttypes}
    return data, graph, src, dst
