"""Every layer of ``torch_geometric.nn.conv`` in the forms that its arguments give it.

A case is (make, call): ``make()`` builds the layer for rows of ``WIDTH`` numbers, ``call(layer, x,
edge_index, columns)`` computes rows; ``columns`` has ``weight`` [E], ``attr`` [E, 3] and ``type``
[E] of three types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn import aggr as aggrs

WIDTH = 6
Call = Callable[[Any, Tensor, Any, Any], Tensor]


def mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, out), nn.Tanh(), nn.Linear(out, out))


def made(kind: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(pyg, kind)(*args, **options)


def plain(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges)


def weighted(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges, columns["weight"])


def attributed(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges, columns["attr"])


def named(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges, edge_attr=columns["attr"])


def typed(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges, columns["type"])


def both_ends(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer((x, x * 0.3), edges)


def sources(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer((x, None), edges)


def placed(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, x[:, :3], edges)


def normals(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, x[:, :3], x[:, 3:6], edges)


def initial(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, x * 0.5, edges)


def twice(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges) + layer(x * 0.5, edges)


def signed(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(torch.cat([x, x * 0.4], 1), edges, edges.flip([0]))


def hyper(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges, hyperedge_attr=x * 0.3)


def with_kinds(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges, (x[:, 0] > 0).long(), columns["type"], columns["attr"])


def layers_of_rows(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(torch.stack([x, x.sin()], 1), edges)


def numbered(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    ids = (x[:, 0] * 1000).long() % 60
    return layer(ids, edges, columns["type"]) + x[:, :5]


def with_weights(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    out, (_, alpha) = layer(x, edges, return_attention_weights=True)
    return out


W = WIDTH
POOLED = [("mean", "max", "min", "std"), ("identity", "amplification", "attenuation")]
HISTOGRAM = torch.tensor([3, 10, 20, 10, 3])

CONVS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "GCN": (made("GCNConv", W, 5), plain),
    "GCN weighted": (made("GCNConv", W, 5), weighted),
    "GCN improved": (made("GCNConv", W, 5, improved=True), plain),
    "GCN without loops": (made("GCNConv", W, 5, add_self_loops=False), weighted),
    "GCN to sources": (made("GCNConv", W, 5, flow="target_to_source"), plain),
    "GCN cached": (made("GCNConv", W, 5, cached=True), twice),
    "GCN sum": (made("GCNConv", W, 5, normalize=False, bias=False), weighted),
    "GCN in parts": (made("GCNConv", W, 6, decomposed_layers=2), plain),
    "SAGE": (made("SAGEConv", W, 5), plain),
    "SAGE max": (made("SAGEConv", W, 5, aggr="max"), plain),
    "SAGE min": (made("SAGEConv", W, 5, aggr="min"), plain),
    "SAGE sum": (made("SAGEConv", W, 5, aggr="sum", root_weight=False), plain),
    "SAGE var": (made("SAGEConv", W, 5, aggr="var"), plain),
    "SAGE project": (made("SAGEConv", W, 5, project=True, normalize=True), plain),
    "SAGE softmax": (made("SAGEConv", W, 5, aggr="softmax", aggr_kwargs={"learn": True}), plain),
    "SAGE several": (made("SAGEConv", W, 5, aggr=["mean", "max", "std"]), plain),
    "SAGE to sources": (made("SAGEConv", W, 5, flow="target_to_source"), plain),
    "SAGE both ends": (made("SAGEConv", (W, W), 5), both_ends),
    "SAGE sources": (made("SAGEConv", (W, W), 5, aggr="max"), sources),
    "Graph": (made("GraphConv", W, 5), weighted),
    "Graph mean": (made("GraphConv", (W, W), 5, aggr="mean"), both_ends),
    "Graph max": (made("GraphConv", W, 5, aggr="max"), weighted),
    "Graph variance": (
        lambda: pyg.GraphConv(W, 5, aggr=aggrs.VariancePreservingAggregation()),
        plain,
    ),
    "GIN": (lambda: pyg.GINConv(mlp(W, 5), train_eps=True), plain),
    "GIN sources": (lambda: pyg.GINConv(mlp(W, 5)), sources),
    "GINE": (lambda: pyg.GINEConv(mlp(W, 5), edge_dim=3), attributed),
    "GatedGraph": (made("GatedGraphConv", 8, 3), weighted),
    "ResGated": (made("ResGatedGraphConv", W, 5, edge_dim=3), attributed),
    "ResGated both ends": (made("ResGatedGraphConv", (W, W), 5), both_ends),
    "SG": (made("SGConv", W, 5, K=2), plain),
    "SG cached": (made("SGConv", W, 5, K=3, cached=True), twice),
    "SSG": (made("SSGConv", W, 5, alpha=0.1, K=2), weighted),
    "TAG": (made("TAGConv", W, 5), weighted),
    "TAG sum": (made("TAGConv", W, 5, normalize=False), plain),
    "APPNP": (made("APPNP", 3, 0.1), plain),
    "APPNP weighted": (made("APPNP", 3, 0.1, add_self_loops=False), weighted),
    "APPNP cached": (made("APPNP", 2, 0.1, cached=True), twice),
    "ARMA": (made("ARMAConv", W, 5, num_stacks=2, num_layers=2), plain),
    "ARMA shared": (
        made("ARMAConv", W, 5, num_stacks=2, num_layers=3, shared_weights=True, act=None),
        weighted,
    ),
    "Cheb": (made("ChebConv", W, 5, 3), plain),
    "Cheb walk": (made("ChebConv", W, 5, 3, normalization="rw"), weighted),
    "Cheb unscaled": (
        made("ChebConv", W, 5, 4, normalization=None),
        lambda layer, x, e, c: layer(x, e, c["weight"], lambda_max=3.0),
    ),
    "LG": (made("LGConv"), plain),
    "LG weighted": (made("LGConv"), weighted),
    "LG sum": (made("LGConv", normalize=False), weighted),
    "LE": (made("LEConv", W, 5), weighted),
    "GCN2": (made("GCN2Conv", W, 0.1), initial),
    "GCN2 cached": (
        made("GCN2Conv", W, 0.1, theta=0.5, layer=2, shared_weights=False, cached=True), initial
    ),
    "MixHop": (made("MixHopConv", W, 5), plain),
    "MixHop weighted": (made("MixHopConv", W, 5, [0, 2], add_self_loops=False), weighted),
    "ClusterGCN": (made("ClusterGCNConv", W, 5, diag_lambda=0.3), plain),
    "MF": (made("MFConv", W, 5, max_degree=4), plain),
    "MF both ends": (made("MFConv", (W, W), 5, max_degree=3), both_ends),
    "EG": (made("EGConv", W, 8, num_heads=4, num_bases=2), plain),
    "EG several": (
        made("EGConv", W, 8, ["sum", "mean", "max", "std", "symnorm", "var", "min"], num_heads=2),
        plain,
    ),
    "FA": (made("FAConv", W), initial),
    "FA cached": (made("FAConv", W, cached=True, add_self_loops=False), initial),
    "FA weighted": (
        made("FAConv", W, normalize=False),
        lambda layer, x, e, c: layer(x, x * 0.5, e, c["weight"]),
    ),
    "Simple": (made("SimpleConv", "mean", combine_root="cat"), weighted),
    "Simple loops": (made("SimpleConv", "sum", combine_root="self_loop"), plain),
    "Simple max": (made("SimpleConv", "max", combine_root="sum"), plain),
    "WLContinuous": (made("WLConvContinuous"), weighted),
    "Signed first": (
        made("SignedConv", W, 5, True), lambda layer, x, e, c: layer(x, e, e.flip([0]))
    ),
    "Signed": (made("SignedConv", W, 5, False), signed),
    "AntiSymmetric": (
        lambda: pyg.AntiSymmetricConv(W, pyg.GATConv(W, W), num_iters=2), plain
    ),
    "DirGNN": (lambda: pyg.DirGNNConv(pyg.GCNConv(W, 5)), plain),
    "DirGNN SAGE": (
        lambda: pyg.DirGNNConv(pyg.SAGEConv(W, 5), root_weight=False), plain
    ),
    "Hypergraph": (
        made("HypergraphConv", W, 5), lambda layer, x, e, c: layer(x, e, x[:, 0].sigmoid())
    ),
    "Hypergraph attention": (made("HypergraphConv", W, 5, use_attention=True, heads=2), hyper),
    "Hypergraph attention of edges": (
        made(
            "HypergraphConv", W, 5, use_attention=True, heads=2, concat=False,
            attention_mode="edge",
        ),
        hyper,
    ),
    "PDN": (made("PDNConv", W, 5, 3, 7), attributed),
    "PDN sum": (made("PDNConv", W, 5, 3, 7, normalize=False, add_self_loops=False), attributed),
    "DNA": (made("DNAConv", W, 2), layers_of_rows),
    "DNA groups": (made("DNAConv", W, 2, 2), layers_of_rows),
    "GAT": (made("GATConv", W, 5, heads=2), plain),
    "GAT attributes": (made("GATConv", W, 5, heads=2, edge_dim=3, concat=False), attributed),
    "GAT one attribute": (made("GATConv", W, 5, edge_dim=1, fill_value="add"), weighted),
    "GAT fill": (
        made("GATConv", W, 5, edge_dim=3, fill_value=torch.tensor([1.0, 2.0, 0.3]).double()),
        attributed,
    ),
    "GAT residual": (made("GATConv", W, 5, heads=2, residual=True), with_weights),
    "GAT both ends": (made("GATConv", (W, W), 5, heads=2, add_self_loops=False), both_ends),
    "GATv2": (made("GATv2Conv", W, 5, heads=2), plain),
    "GATv2 attributes": (
        made("GATv2Conv", W, 5, heads=2, edge_dim=3, fill_value="max"), attributed
    ),
    "GATv2 shared": (
        made("GATv2Conv", W, 5, heads=2, share_weights=True, concat=False, residual=True), plain
    ),
    "GATv2 both ends": (made("GATv2Conv", (W, W), 5, add_self_loops=False), both_ends),
    "Transformer": (made("TransformerConv", W, 5, heads=2, beta=True), plain),
    "Transformer attributes": (
        made("TransformerConv", W, 5, heads=2, edge_dim=3, concat=False), attributed
    ),
    "Transformer both ends": (
        made("TransformerConv", (W, W), 5, heads=3, root_weight=False), both_ends
    ),
    "AGNN": (made("AGNNConv"), plain),
    "AGNN fixed": (made("AGNNConv", requires_grad=False, add_self_loops=False), plain),
    "RGAT": (made("RGATConv", W, 5, 3, heads=2), typed),
    "RGAT bases": (
        made("RGATConv", W, 5, 3, num_bases=2, edge_dim=3, heads=2),
        lambda layer, x, e, c: layer(x, e, c["type"], c["attr"]),
    ),
    "RGAT multiplicative": (
        made(
            "RGATConv", W, 5, 3, heads=2, mod="f-scaled", dim=1,
            attention_mode="multiplicative-self-attention",
        ),
        typed,
    ),
    "RGAT across": (
        made(
            "RGATConv", W, 5, 3, heads=2, concat=False, mod="additive",
            attention_mechanism="across-relation",
        ),
        typed,
    ),
    "HEAT": (made("HEATConv", W, 5, 2, 3, 4, 3, 4, heads=2), with_kinds),
    "FeaSt": (made("FeaStConv", W, 5, heads=3), plain),
    "FeaSt both ends": (made("FeaStConv", W, 5, heads=3, add_self_loops=False), both_ends),
    "General": (made("GeneralConv", W, 5, 3, heads=2, attention=True), named),
    "General sum": (made("GeneralConv", W, 5), plain),
    "General products": (
        made(
            "GeneralConv", W, 5, 3, heads=2, attention=True, attention_type="dot_product",
            skip_linear=True, directed_msg=False,
        ),
        named,
    ),
    "PointTransformer": (
        lambda: pyg.PointTransformerConv(W, 5, pos_nn=mlp(3, 5), attn_nn=mlp(5, 5)),
        placed,
    ),
    "SuperGAT": (lambda: pyg.SuperGATConv(W, 5, heads=2).eval(), plain),
    "SuperGAT SD": (
        lambda: pyg.SuperGATConv(W, 5, heads=2, attention_type="SD").eval(), plain
    ),
    "Edge": (lambda: pyg.EdgeConv(mlp(2 * W, 5)), plain),
    "Edge both ends": (lambda: pyg.EdgeConv(mlp(2 * W, 5), aggr="mean"), both_ends),
    "NN": (lambda: pyg.NNConv(W, 5, mlp(3, W * 5)), attributed),
    "NN mean": (
        lambda: pyg.NNConv((W, W), 5, mlp(3, W * 5), aggr="mean"),
        lambda layer, x, e, c: layer((x, x * 0.3), e, c["attr"]),
    ),
    "CG": (made("CGConv", W, 3), attributed),
    "CG max": (made("CGConv", W, aggr="max"), plain),
    "PNA": (
        made(
            "PNAConv", W, 8, *map(list, POOLED), HISTOGRAM, edge_dim=3, towers=2,
            divide_input=True,
        ),
        attributed,
    ),
    "PNA linear": (
        made("PNAConv", W, 8, ["sum", "var"], ["linear", "inverse_linear"], HISTOGRAM), plain
    ),
    "GEN": (made("GENConv", W, 5, edge_dim=3, learn_t=True, norm=None), attributed),
    "GEN powers": (
        made(
            "GENConv", W, 5, aggr="powermean", learn_p=True, msg_norm=True, norm="layer",
            learn_msg_scale=True,
        ),
        plain,
    ),
    "GEN sum": (made("GENConv", (W, W), 5, aggr="add", norm=None, bias=True), both_ends),
    "GMM": (made("GMMConv", W, 5, 3, 2), attributed),
    "GMM separate": (
        made("GMMConv", (W, W), 5, 3, 2, separate_gaussians=True),
        lambda layer, x, e, c: layer((x, x * 0.3), e, c["attr"]),
    ),
    "FiLM": (made("FiLMConv", W, 5, 3), typed),
    "FiLM one": (made("FiLMConv", W, 5), plain),
    "PointNet": (lambda: pyg.PointNetConv(mlp(W + 3, 5)), placed),
    "PointNet places": (
        made("PointNetConv", add_self_loops=False),
        lambda layer, x, e, c: layer(None, x[:, :3], e),
    ),
    "PPF": (lambda: pyg.PPFConv(mlp(W + 4, 5), mlp(5, 4)), normals),
    "PointGNN": (
        lambda: pyg.PointGNNConv(mlp(W, 3), mlp(W + 3, 5), mlp(5, W)), placed
    ),
    "RGCN": (made("RGCNConv", W, 5, 3), typed),
    "RGCN blocks": (made("RGCNConv", W, 6, 3, num_blocks=2), typed),
    "RGCN bases": (
        made("RGCNConv", (W, W), 6, 3, num_bases=2, root_weight=False),
        lambda layer, x, e, c: layer((x, x * 0.3), e, c["type"]),
    ),
    "RGCN max": (made("RGCNConv", W, 5, 3, aggr="max"), typed),
    "RGCN of nodes": (made("RGCNConv", 60, 5, 3), numbered),
    "FastRGCN": (made("FastRGCNConv", W, 5, 3), typed),
    "FastRGCN blocks": (made("FastRGCNConv", W, 6, 3, num_blocks=3), typed),
    "FastRGCN bases": (made("FastRGCNConv", W, 6, 3, num_bases=2, aggr="sum"), typed),
}  # fmt: skip
