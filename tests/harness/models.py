"""Two-layer models of every layer that runs, built from unmodified ``dgl.nn`` modules.

A model is called as ``model(graphs, x, edges)``: one graph (or block) a layer, input rows by node
type, and one dictionary a layer with the edge data by edge type. It returns rows by node type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.graphs import EDGE_TYPES, NUM_CLASSES, NUM_FEATURES
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO

HIDDEN = 7
Edges = dict[tuple[str, str, str], dict[str, Tensor]]


@dataclass(frozen=True)
class Layer:
    """How a layer is built and called.

    Attributes:
        build: (in_width, out_width) -> module.
        call: (module, graph, x, edge data, x of the first layer) -> rows.
        blocks: whether DGL lets the layer run on a block.
        graph: the sample graph it is tested on.
        project: linear layers around it, for layers that keep the width.
        width: between those linear layers.
        adam: whether Adam's steps are comparable (no gradient that is zero in exact arithmetic).
        narrow: whether bfloat16 leaves digits of every gradient; one scalar for all nodes has none.
    """

    build: Callable[[int, int], nn.Module]
    call: Callable[..., Tensor] = lambda layer, graph, x, edge, first: layer(graph, x)
    blocks: bool = True
    graph: str = "mixed"
    project: bool = False
    width: int = HIDDEN
    adam: bool = True
    narrow: bool = True


def given(*places: str, heads: bool = False, **named: Any) -> Callable[..., Tensor]:
    """A call with more arguments, by these names; of results with heads their mean."""

    def call(layer: nn.Module, graph: Any, x: Tensor, edge: dict, first: Tensor) -> Tensor:
        known: dict[Any, Any] = {
            **edge, "column": edge["weight"].unsqueeze(1), "rows": _edge_rows(edge),
            "first": first, "place": first[:, :3], "parity": graph.in_degrees() % 2,
        }  # fmt: skip
        more = {key: known.get(value, value) for key, value in named.items()}
        rows = layer(graph, x, *(known[place] for place in places), **more)
        return rows.mean(1) if heads else rows

    return call


class Stack(nn.Module):
    """Two layers with a smooth nonlinearity between; smooth, so that rounding cannot flip it."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        widths = (NUM_FEATURES, HIDDEN, NUM_CLASSES)
        if layer.project:
            widths = (layer.width,) * 3
            self.before = nn.Linear(NUM_FEATURES, layer.width)
            self.after = nn.Linear(layer.width, NUM_CLASSES)
        self.first = layer.build(widths[0], widths[1])
        self.second = layer.build(widths[1], widths[2])
        self.layer = layer

    def forward(self, graphs: list[Any], x: dict[str, Tensor], edges: list[Edges]) -> dict:
        call, h = self.layer.call, x[NTYPE_HOMO]
        if self.layer.project:
            h = F.elu(self.before(h))
        first = h
        h = F.elu(call(self.first, graphs[0], h, edges[0][ETYPE_HOMO], first))
        h = call(self.second, graphs[1], h, edges[1][ETYPE_HOMO], first)
        return {NTYPE_HOMO: self.after(F.elu(h)) if self.layer.project else h}


def _layers() -> dict[str, Layer]:
    from dgl import nn as dglnn

    def conv(norm: str) -> Callable[[int, int], nn.Module]:
        return lambda i, o: dglnn.GraphConv(i, o, norm=norm, allow_zero_in_degree=True)

    def sage(kind: str) -> Callable[[int, int], nn.Module]:
        return lambda i, o: dglnn.SAGEConv(i, o, kind)

    def gin(kind: str) -> Callable[[int, int], nn.Module]:
        return lambda i, o: dglnn.GINConv(nn.Linear(i, o), kind, learn_eps=True)

    def edge_conv(norm: bool) -> Callable[[int, int], nn.Module]:
        return lambda i, o: dglnn.EdgeConv(i, o, norm, allow_zero_in_degree=True)

    def gated(types: int) -> Callable[[int, int], nn.Module]:
        return lambda i, o: dglnn.GatedGraphConv(i, o, 2, types)

    def rel(kind: str | None, bases: int) -> Callable[[int, int], nn.Module]:
        return lambda i, o: dglnn.RelGraphConv(i, o, EDGE_TYPES, kind, bases)

    layers = {f"GraphConv-{norm}": Layer(conv(norm)) for norm in ("none", "both", "left", "right")}
    layers |= {
        f"GraphConv-{norm}-weighted": Layer(conv(norm), given(edge_weight="weight"))
        for norm in ("none", "both")
    }
    layers |= {f"SAGEConv-{kind}": Layer(sage(kind)) for kind in ("mean", "gcn", "pool")}
    layers |= {
        f"SAGEConv-{kind}-weighted": Layer(sage(kind), given(edge_weight="weight"))
        for kind in ("mean", "gcn")
    }
    # GIN's eps is one number for all nodes; rounded on each rank, its sum's terms cancel.
    layers["GINConv-sum"] = Layer(gin("sum"), narrow=False)
    layers |= {f"GINConv-{kind}": Layer(gin(kind)) for kind in ("mean", "max")}
    layers["GraphConv-looped"] = Layer(lambda i, o: dglnn.GraphConv(i, o), graph="looped")
    layers["SGConv"] = Layer(
        lambda i, o: dglnn.SGConv(i, o, k=2, allow_zero_in_degree=True), blocks=False
    )
    layers["TAGConv"] = Layer(lambda i, o: dglnn.TAGConv(i, o, k=2), blocks=False)
    layers["APPNPConv"] = Layer(lambda i, o: dglnn.APPNPConv(3, 0.2), blocks=False, project=True)
    layers["GCN2Conv"] = Layer(
        lambda i, o: dglnn.GCN2Conv(i, 1, alpha=0.3, allow_zero_in_degree=True),
        given("first"), blocks=False, project=True,
    )  # fmt: skip
    layers["GCN2Conv-two-weights"] = Layer(
        lambda i, o: dglnn.GCN2Conv(
            i, 2, project_initial_features=False, allow_zero_in_degree=True
        ),
        given("first"), blocks=False, project=True,
    )  # fmt: skip
    layers["GatedGraphConv-1"] = Layer(gated(1), blocks=False, project=True)
    layers["GatedGraphConv-3"] = Layer(gated(3), given("type"), blocks=False, project=True)
    layers["EdgeConv"] = Layer(edge_conv(False))
    # Its biases stand before the batch norm.
    layers["EdgeConv-norm"] = Layer(edge_conv(True), graph="looped", adam=False)
    layers["RelGraphConv-basis"] = Layer(rel("basis", 2), given("type"))
    layers["RelGraphConv-bdd"] = Layer(_bdd(dglnn), given("type", "column"), project=True)
    # A block of DGL's does not keep the order of edges, so sorted types are for full graphs.
    layers["RelGraphConv-presorted"] = Layer(
        rel("basis", 2), given("type", presorted=True), blocks=False, graph="typed"
    )
    return layers | _edge_layers(dglnn) | _mailbox_layers(dglnn) | _further_layers(dglnn)


def _edge_layers(dglnn: Any) -> dict[str, Layer]:
    """Attention and other layers that compute on edges."""
    zero = {"allow_zero_in_degree": True}

    def heads(kind: Any, **options: Any) -> Callable[[int, int], nn.Module]:
        return lambda i, o: kind(i, o, 2, **zero, **options)

    def with_attention(
        layer: nn.Module, graph: Any, x: Tensor, edge: dict, first: Tensor
    ) -> Tensor:
        rows, attention = layer(graph, x, get_attention=True)
        return rows.mean(1) + 0 * attention.sum()

    return {
        "GATConv": Layer(heads(dglnn.GATConv, residual=True), given(heads=True)),
        "GATConv-weighted": Layer(
            heads(dglnn.GATConv, residual=True), given(edge_weight="weight", heads=True)
        ),
        "GATConv-attention": Layer(heads(dglnn.GATConv), with_attention, blocks=False),
        "GATv2Conv": Layer(heads(dglnn.GATv2Conv), given(heads=True)),
        "AGNNConv": Layer(lambda i, o: dglnn.AGNNConv(**zero), project=True, narrow=False),
        "DotGatConv": Layer(heads(dglnn.DotGatConv), given(heads=True)),
        "EdgeGATConv": Layer(
            lambda i, o: dglnn.EdgeGATConv(i, 3, o, 2, **zero), given("rows", heads=True)
        ),
        "NNConv": Layer(lambda i, o: dglnn.NNConv(i, o, nn.Linear(3, i * o)), given("rows")),
        "CFConv": Layer(lambda i, o: dglnn.CFConv(i, 3, 4, o), given("rows")),
        "GMMConv": Layer(lambda i, o: dglnn.GMMConv(i, o, 3, 2, "mean", **zero), given("rows")),
    }


def _mailbox_layers(dglnn: Any) -> dict[str, Layer]:
    """Layers whose reduction is a function over a mailbox."""
    scalers = ["identity", "amplification", "attenuation"]
    # PNA and DGN end in a batch norm, before which their biases stand. Their variances and
    # derivatives are differences of nearly equal numbers: bfloat16 leaves no digits.
    normed: dict[str, Any] = {"blocks": False, "adam": False, "narrow": False}

    def pna(aggregators: list[str], edges: int = 0) -> Callable[[int, int], nn.Module]:
        return lambda i, o: dglnn.PNAConv(i, o, aggregators, scalers, 1.5, edge_feat_size=edges)

    def dgn(i: int, o: int) -> nn.Module:
        kinds = ["mean", "dir1-av", "dir2-dx", "dir3-av"]
        return dglnn.DGNConv(i, o, kinds, scalers, 1.5, edge_feat_size=3)

    return {
        "SAGEConv-lstm": Layer(lambda i, o: dglnn.SAGEConv(i, o, "lstm")),
        "PNAConv": Layer(pna(["mean", "max", "min"]), **normed),
        "PNAConv-edges": Layer(pna(["sum", "var", "moment4"], 3), given("rows"), **normed),
        "DGNConv": Layer(dgn, given("rows", eig_vec="place"), **normed),
        "AtomicConv": Layer(_Atomic, given("column"), blocks=False, narrow=False),
        "mailbox": Layer(_Attentive),
        "mailbox-weighted": Layer(_Attentive, given("column")),
    }


class _Atomic(nn.Module):
    """AtomicConv, whose width is that of its input times its filters, and a linear layer."""

    def __init__(self, in_width: int, out_width: int) -> None:
        from dgl.nn import AtomicConv

        super().__init__()
        cutoffs, means = torch.tensor([1.1, 1.6, 2.0]), torch.tensor([0.5, 0.9, 1.3])
        self.conv = AtomicConv(cutoffs, means, torch.tensor([1.0, 2.0, 0.5]))
        self.linear = nn.Linear(3 * in_width, out_width)

    def forward(self, graph: Any, x: Tensor, distances: Tensor) -> Tensor:
        return self.linear(self.conv(graph, x, distances))


class _Attentive(nn.Module):
    """A layer of a user: every node attends to its mailbox and learns what stands out in it."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(in_width, 4), nn.Linear(in_width, 4)
        self.value, self.last = nn.Linear(in_width, out_width), nn.Linear(in_width, out_width)

    def message(self, edges: Any) -> dict[str, Tensor]:
        scale = edges.data["scale"]
        return {"k": self.key(edges.src["h"]) * scale, "h": edges.src["h"], "scale": scale}

    def reduce(self, nodes: Any) -> dict[str, Tensor]:
        rows = nodes.mailbox["h"]
        scores = (nodes.mailbox["k"] * self.query(nodes.data["x"]).unsqueeze(1)).sum(-1)
        weights = torch.softmax(scores, 1).unsqueeze(2)
        spread = (rows - rows.mean(1, keepdim=True)).square().mean(1)
        return {
            "out": (weights * self.value(rows)).sum(1) + self.last(rows[:, -1] * spread),
            "first": rows[:, 0] * nodes.batch_size() ** 0,
        }

    def forward(self, graph: Any, x: Tensor, scale: Tensor | None = None) -> Tensor:
        with graph.local_scope():
            graph.srcdata["h"] = x
            graph.dstdata["x"] = x[: graph.num_dst_nodes()]
            graph.edata["scale"] = x.new_ones(graph.num_edges(), 1) if scale is None else scale
            graph.update_all(self.message, self.reduce)
            return graph.dstdata["out"] + graph.dstdata["first"].sum(1, keepdim=True)


class EdgeRows(nn.Module):
    """EGATConv with use of both outputs: edge rows go through a layer and to the nodes."""

    def __init__(self, i: int, o: int) -> None:
        from dgl import nn as dglnn

        super().__init__()
        self.conv = dglnn.EGATConv(i, 3, o, 4, 2)
        self.on_edges = nn.Linear(8, o)

    def forward(self, graph: Any, x: Tensor, edge: Tensor) -> Tensor:
        x, rows = self.conv(graph, x, edge)
        return x.mean(1) + received(graph, self.on_edges(F.elu(rows.flatten(1))))


def received(graph: Any, rows: Tensor) -> Tensor:
    """The mean of the edge rows at their destinations."""
    import dgl.function as fn

    with graph.local_scope():
        graph.edata["rows"] = rows
        graph.update_all(fn.copy_e("rows", "m"), fn.mean("m", "out"))
        return graph.dstdata["out"]


class Jump(nn.Module):
    """Three layers of which all outputs are used."""

    def __init__(self, i: int, o: int, mode: str) -> None:
        from dgl import nn as dglnn

        super().__init__()
        self.convs = nn.ModuleList(dglnn.SAGEConv(width, o, "mean") for width in (i, o, o))
        self.jump = dglnn.JumpingKnowledge(mode, o, 3)
        self.last = nn.Linear(o, o)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        rows = []
        for conv in self.convs:
            x = F.elu(conv(graph, x))
            rows.append(x)
        return self.last(self.jump(rows))


class Weighted(nn.Module):
    """Edge weights that are normalized over the graph, then used."""

    def __init__(self, i: int, o: int, norm: str) -> None:
        from dgl import nn as dglnn

        super().__init__()
        self.norm = dglnn.EdgeWeightNorm(norm, eps=0.1)
        self.conv = dglnn.GraphConv(i, o, norm="none", allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Tensor, weight: Tensor) -> Tensor:
        return self.conv(graph, x, edge_weight=self.norm(graph, weight))


def _further_layers(dglnn: Any) -> dict[str, Layer]:
    """Layers with several outputs, with a part of their own, or that change the graph."""
    zero = {"allow_zero_in_degree": True}

    def both_sides(layer: nn.Module, graph: Any, x: Tensor, edge: dict, first: Tensor) -> Tensor:
        pair = (x, x[: graph.num_dst_nodes()])
        x, rows = layer(graph, pair, _edge_rows(edge), edge_weight=edge["weight"])
        return x.mean(1) + received(graph, rows.mean((1, 2)).unsqueeze(1))

    def places(layer: nn.Module, graph: Any, x: Tensor, edge: dict, first: Tensor) -> Tensor:
        x, place = layer(graph, x, first[:, :3], _edge_rows(edge))
        return x + place.sum(1, keepdim=True) * torch.linspace(0, 1, x.shape[1]).to(x)

    def as_wide(layer: nn.Module, graph: Any, x: Tensor, edge: dict, first: Tensor) -> Tensor:
        scale = torch.linspace(0, 1, x.shape[1]).to(x)
        return layer(graph, x, edge["weight"].unsqueeze(1) * scale - 1)

    def typed_rows(layer: nn.Module, graph: Any, x: Tensor, edge: dict, first: Tensor) -> Tensor:
        rows = layer(x, graph.in_degrees() % 3)
        return rows + received(graph, _edge_rows(edge)).mean(1, keepdim=True)

    def twirls(**options: Any) -> Layer:
        return Layer(
            lambda i, o: dglnn.TWIRLSConv(i, o, HIDDEN, 2, **options), blocks=False, adam=False
        )

    def jump(mode: str) -> Layer:
        return Layer(lambda i, o: Jump(i, o, mode), blocks=False)

    def weights(norm: str) -> Layer:
        return Layer(lambda i, o: Weighted(i, o, norm), given("weight"))

    return {
        "EGATConv": Layer(EdgeRows, given("rows"), blocks=False, graph="looped"),
        "EGATConv-sides": Layer(
            lambda i, o: dglnn.EGATConv((i, i), 3, o, 4, 2), both_sides, graph="looped"
        ),
        "EGNNConv": Layer(
            lambda i, o: dglnn.EGNNConv(i, HIDDEN, o, 3), places, blocks=False, graph="loopless"
        ),
        "GINEConv": Layer(
            lambda i, o: dglnn.GINEConv(nn.Linear(i, o), 2, learn_eps=True), as_wide,
            narrow=False,
        ),
        "ChebConv": Layer(lambda i, o: dglnn.ChebConv(i, o, 3, F.elu), blocks=False),
        "TWIRLSConv-attention": twirls(attention=True, tau=0.3, T=4, use_eta=False),
        "TWIRLSConv-unfolded": twirls(precond=False, attn_bef=True, num_mlp_after=2),
        "GroupRevRes": Layer(
            lambda i, o: dglnn.GroupRevRes(
                dglnn.GraphConv(4, 4, norm="both", **zero), 2
            ),
            blocks=False, project=True, width=8,
        ),
        "EdgeGATConv-sides": Layer(
            lambda i, o: dglnn.EdgeGATConv((i, i), 3, o, 2, residual=False, bias=False, **zero),
            lambda layer, graph, x, edge, first: layer(
                graph, (x, x[: graph.num_dst_nodes()]), _edge_rows(edge)
            ).mean(1),
        ),
        "HGTConv": Layer(
            lambda i, o: dglnn.HGTConv(i, 4, 2, 2, EDGE_TYPES, 0.0, use_norm=True),
            given("parity", "type"), blocks=False, project=True, width=8,
        ),
        "JumpingKnowledge-max": jump("max"),
        "JumpingKnowledge-lstm": jump("lstm"),
        "EdgeWeightNorm-both": weights("both"),
        "EdgeWeightNorm-right": weights("right"),
        "TypedLinear": Layer(lambda i, o: dglnn.TypedLinear(i, o, 3), typed_rows, blocks=False),
    }  # fmt: skip


def _edge_rows(edge: dict[str, Tensor]) -> Tensor:
    """[E, 3] edge features."""
    weight = edge["weight"]
    return torch.stack([weight, weight * weight, 1 - weight], dim=1)


def _bdd(dglnn: Any) -> Callable[[int, int], nn.Module]:
    """Block diagonal weights: as many blocks as divide the width."""
    return lambda i, o: dglnn.RelGraphConv(i, o, EDGE_TYPES, "bdd", HIDDEN)


class HeteroStack(nn.Module):
    """Two HeteroGraphConv layers, a different module for each relation."""

    def __init__(self, aggregate: str) -> None:
        from dgl import nn as dglnn

        super().__init__()

        def modules(i: int, o: int) -> dict[str, nn.Module]:
            return {
                "buys": dglnn.SAGEConv(i, o, "mean"),
                "bought_by": dglnn.GraphConv(i, o, norm="both"),
                "marks": dglnn.GINConv(nn.Linear(i, o), "max"),
                "follows": dglnn.SAGEConv(i, o, "pool"),
            }

        # A type without incoming relations has no rows after a layer: it is mapped beside it.
        self.tags = nn.Linear(NUM_FEATURES, HIDDEN)
        self.first = dglnn.HeteroGraphConv(modules(NUM_FEATURES, HIDDEN), aggregate)
        self.second = dglnn.HeteroGraphConv(modules(HIDDEN, NUM_CLASSES), aggregate)

    def forward(self, graphs: list[Any], x: dict[str, Tensor], edges: list[Edges]) -> dict:
        h = {ntype: F.elu(rows) for ntype, rows in self.first(graphs[0], x).items()}
        h["tag"] = F.elu(self.tags(x["tag"][: graphs[1].num_src_nodes("tag")]))
        return self.second(graphs[1], h)


class ShopStack(nn.Module):
    """Two HeteroGraphConv layers of one kind over every relation of the graph ``shop``.

    Args:
        name: the kind of layer and how relations are aggregated: ``"Shop-GATConv-mean"``.
    """

    RELATIONS = ("bought_by", "carries", "marks", "buys", "follows")

    def __init__(self, name: str) -> None:
        from dgl import nn as dglnn

        super().__init__()
        _, kind, aggregate = name.split("-")

        def layer(i: int, o: int) -> nn.Module:
            if kind == "SAGEConv":
                return dglnn.SAGEConv(i, o, "mean")
            if kind == "GraphConv":
                return dglnn.GraphConv(i, o, norm="both")
            return getattr(dglnn, kind)(i, o, 2)

        def conv(i: int, o: int) -> nn.Module:
            return dglnn.HeteroGraphConv({r: layer(i, o) for r in self.RELATIONS}, aggregate)

        self.first, self.second = conv(NUM_FEATURES, HIDDEN), conv(HIDDEN, NUM_CLASSES)

    def forward(self, graphs: list[Any], x: dict[str, Tensor], edges: list[Edges]) -> dict:
        h = {t: F.elu(_mean_of_parts(rows)) for t, rows in self.first(graphs[0], x).items()}
        return {t: _mean_of_parts(rows) for t, rows in self.second(graphs[1], h).items()}


def _mean_of_parts(rows: Tensor) -> Tensor:
    """[n, width] of what has heads, or stacked relations, between nodes and features."""
    return rows.flatten(1, -2).mean(1) if rows.dim() > 2 else rows


class HeteroRows(HeteroStack):
    """Features through HeteroLinear, plus a HeteroEmbedding's row that their sign chooses."""

    def __init__(self) -> None:
        from dgl import nn as dglnn

        super().__init__("sum")
        types = ("item", "tag", "user")
        self.linear = dglnn.HeteroLinear(dict.fromkeys(types, NUM_FEATURES), NUM_FEATURES)
        self.embedding = dglnn.HeteroEmbedding(dict.fromkeys(types, 2), NUM_FEATURES)

    def forward(self, graphs: list[Any], x: dict[str, Tensor], edges: list[Edges]) -> dict:
        known = self.embedding({t: (rows[:, 0] > 0).long() for t, rows in x.items()})
        mapped = self.linear(x)
        return super().forward(graphs, {t: mapped[t] + known[t] for t in x}, edges)


def layers() -> dict[str, Layer]:
    """All homogeneous layers by name."""
    if not _known:
        _known.update(_layers())
    return _known


_known: dict[str, Layer] = {}
SHOP = ("Shop-GraphConv-sum", "Shop-SAGEConv-stack", "Shop-GATConv-mean", "Shop-GATv2Conv-max")
HETERO = (
    "HeteroGraphConv-sum",
    "HeteroGraphConv-mean",
    "HeteroGraphConv-max",
    "HeteroLinear",
    *SHOP,
)


@contextmanager
def default_dtype(name: str, dtype: torch.dtype) -> Iterator[None]:
    """APPNPConv and TWIRLSConv make edge weights in torch's default dtype."""
    before = torch.get_default_dtype()
    makes_weights = name == "APPNPConv" or name.startswith("TWIRLS")
    torch.set_default_dtype(dtype if makes_weights else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(name: str, seed: int = 0) -> nn.Module:
    """The model by name; the same parameters each time, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(name)


def make(name: str) -> nn.Module:
    """The model with whatever parameters come; safe in threads, unlike :func:`build`."""
    if name in SHOP:
        return ShopStack(name)
    if name == "HeteroLinear":
        return HeteroRows()
    if name in HETERO:
        return HeteroStack(name.split("-")[1])
    return Stack(layers()[name])


def sample_graph(name: str) -> str:
    """Name of the graph that the model is tested on, see :mod:`harness.graphs`."""
    if name in SHOP:
        return "shop"
    return "hetero" if name in HETERO else layers()[name].graph


def runs_on_blocks(name: str) -> bool:
    return name in HETERO or layers()[name].blocks


def runs_in_bfloat16(name: str) -> bool:
    if name in HETERO:
        return name != "HeteroLinear"  # one more layer: DGL's own rounding is at the bound
    return layers()[name].narrow


def comparable_with_adam(name: str) -> bool:
    return name in HETERO or layers()[name].adam


# Relative errors of input gradients in float32 that are DGL's own: with the edges in another order
# it differs from its float64 result by as much.
ROUNDING = {"TWIRLSConv-unfolded": 1.6e-5}


def takes_a_maximum(name: str) -> bool:
    """Whether messages or types compete somewhere in the model."""
    return name in HETERO or any(word in name for word in ("pool", "max", "EdgeConv"))
