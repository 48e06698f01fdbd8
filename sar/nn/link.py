"""Link prediction: scores of edges, a loss over them, and the negative edges it is made with.

A scorer sees the rows of both end points of a block's edges, [e, D] each; remote rows stream as in
a layer, and in backward the blocks are scored again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar import expect
from sar.edges import as_stored
from sar.graph import GraphView, graph_of
from sar.graph.directory import NodeDirectory, directory_of
from sar.graph.edge_graph import edge_graph, global_ends
from sar.kernels import wide_dtype
from sar.kernels.keyed import keyed_uniform
from sar.nn.losses import global_mean
from sar.nn.scorers import LinkScorer
from sar.ops import Inputs, Messages, run_messages
from sar.ops.message_blocks import Rows
from sar.ops.randomness import unchanged
from sar.tracing.capture import TORCH_CAPTURES
from sar.tracing.chunks import Sample, refuse_chunked

Ends = Tensor | tuple[Tensor, Tensor]

# Which ends of an edge are replaced by random nodes: source, destination.
_REPLACED = {
    "uniform": (True, True),
    "per_source": (False, True),
    "per_destination": (True, False),
}


def score_edges(
    graph: GraphView, scorer: LinkScorer, h: Ends, *, edge_type: str | None = None
) -> Tensor:
    """The score of every local edge; collective.

    Args:
        graph: of one relation, or a slice ``graph[etype]``; whole, not a block.
        scorer: also any module called alike, ``scorer(src, dst, edge_type)``.
        h: [N, D] float rows of this rank's nodes; a pair for source and destination nodes.
        edge_type: name of the int64 column of ``graph.edata`` that the scorer gets.

    Returns:
        [E] in the dtype of ``h``, in the order of ``graph.edata``.

    Raises, on every rank:
        ValueError, TypeError, KeyError: rows, types or scores that do not fit.
    """
    graph = graph_of(graph)
    inputs = link_inputs(graph, scorer, h, edge_type)

    def scores(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Rows:
        return [_scored(scorer, src, dst, edge).to(inputs.src[0].dtype)]

    return _run(graph, scorer, scores, "edges", inputs, inputs.src[0].dtype)


def link_loss(
    graph: GraphView,
    negatives: GraphView | Sequence[GraphView],
    scorer: LinkScorer,
    h: Ends,
    *,
    edge_type: str | None = None,
) -> Tensor:
    """Binary cross entropy of edges against negative edges over all ranks; collective.

    L = (mean over edges of softplus(-s) + mean over negatives of softplus(s)) / 2: both classes
    weigh the same, however many negatives there are.

    No score is kept: each block adds its losses to those of the edges' destinations. As with
    :func:`sar.global_mean` parameter gradients are this rank's share, for ``gather_grads`` to sum,
    and gradients of ``h`` are whole.

    Args:
        graph, scorer, h, edge_type: as in :func:`score_edges`; ``graph`` has the true edges.
        negatives: graphs of the edges that are taken for false, as
            :class:`sar.nn.NegativeSampler` draws them.

    Returns:
        A scalar, equal on every rank.

    Raises ``ValueError`` on every rank when there is no edge or no negative, and what
    :func:`score_edges` raises.
    """
    graph, negatives = graph_of(graph), graph_of(negatives)
    false = [negatives] if isinstance(negatives, GraphView) else negatives
    if not isinstance(false, Sequence) or not all(isinstance(g, GraphView) for g in false):
        raise expect.wrong_type(negatives, "negatives", "sharded graphs")
    on_edges = _mean_loss([graph], scorer, h, edge_type, -1)
    return (on_edges + _mean_loss(list(false), scorer, h, edge_type, 1)) / 2


def _mean_loss(
    graphs: list[GraphView], scorer: LinkScorer, h: Ends, edge_type: str | None, sign: int
) -> Tensor:
    """Mean of softplus(sign * score) over the edges of all graphs and ranks."""
    count = sum(graph.num_edges_global() for graph in graphs)
    if not count:
        what = "negatives" if sign > 0 else "graph"
        raise ValueError(f"{what}: got no edge on any rank, expected some to score")
    sums = torch.stack([_losses(graph, scorer, h, edge_type, sign) for graph in graphs]).sum(0)
    num_rows = graphs[0].num_nodes_global(graphs[0].dsttypes[0])
    return global_mean(sums, group=graphs[0].group) * (num_rows / count)


def _losses(
    graph: GraphView, scorer: LinkScorer, h: Ends, edge_type: str | None, sign: int
) -> Tensor:
    """[num_dst] sums of softplus(sign * score) over the edges into each owned row."""
    inputs = link_inputs(graph, scorer, h, edge_type)
    wide = wide_dtype(inputs.src[0].dtype)

    def losses(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Rows:
        return [F.softplus(sign * _scored(scorer, src, dst, edge).to(wide))]

    return _run(graph, scorer, losses, "sum", inputs, wide)


def _run(
    graph: GraphView,
    scorer: LinkScorer,
    function: Callable[[Rows, Rows, Rows, Tensor], Rows],
    reduce: str,
    inputs: Inputs,
    dtype: torch.dtype,
) -> Tensor:
    scope = graph.scope()
    learned = tuple(p for p in scorer.parameters() if p.requires_grad)
    messages = Messages(function, is_udf=True, capturing=TORCH_CAPTURES, captures=learned)
    like = torch.empty(0, dtype=dtype, device=scope.device)
    (out,) = run_messages(scope.relation, messages, reduce, scope.policy, inputs, [like])
    return out


def _scored(scorer: LinkScorer, src: Rows, dst: Rows, edge: Rows) -> Tensor:
    return scorer(src[0], dst[0], edge[0] if edge else None)


def link_inputs(graph: GraphView, scorer: LinkScorer, h: Ends, edge_type: str | None) -> Inputs:
    """A scorer's inputs, checked on every rank; collective."""
    with graph.group.agreed("link scores"):
        inputs = _inputs(graph, h, edge_type)
        _probe(scorer, inputs)
    return inputs


def of_one_relation(graph: GraphView) -> None:
    """Raise ``ValueError`` for a block, or a graph of several relations."""
    if len(graph.canonical_etypes) != 1 or graph.is_block:
        raise ValueError(
            f"graph: got {graph!r}, expected a whole graph of one relation; "
            f"choose with graph[etype] among {graph.canonical_etypes}"
        )


def _inputs(graph: GraphView, h: Ends, edge_type: str | None) -> Inputs:
    of_one_relation(graph)
    as_stored(graph.scope().relation, "graph")
    pair = h if isinstance(h, tuple) else (h, h)
    counts = (graph.num_src_nodes(), graph.num_dst_nodes())
    for rows, count in zip(pair, counts, strict=True):
        expect.tensor(rows, "h", floating=True, shape=(count, "D"))
    if edge_type is None:
        return Inputs([pair[0]], [pair[1]], [])
    return Inputs([pair[0]], [pair[1]], [_column(graph, edge_type, "edge_type")])


def _probe(scorer: LinkScorer, inputs: Inputs) -> None:
    """Score two blank edges, so that what does not fit fails on ranks without edges, too."""
    expect.instance(scorer, "scorer", nn.Module, "a module")
    num_types = getattr(scorer, "num_types", None)
    if num_types is not None:
        if not inputs.edge:
            raise ValueError(f"edge_type: got None, expected the column of {num_types} types")
        expect.indices(inputs.edge[0], "edge_type", "types", num_types)
    blank = [[rows.new_zeros((2, *rows.shape[1:])) for rows in side] for side in inputs]
    with torch.no_grad(), unchanged():
        scores = _scored(scorer, *blank)
    if not isinstance(scores, Tensor) or scores.shape != (2,):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scorer: returned {got} for 2 edges, expected a tensor of shape (2,)")
    sides = {side: rows[0] for side, rows in zip("uve", inputs, strict=True) if rows}

    def run(rows: slice) -> dict[str, Tensor]:
        some = Sample(sides, rows)
        return {"": _scored(scorer, [some["u"]], [some["v"]], [some["e"]] if "e" in sides else [])}

    refuse_chunked(run, f"scorer {type(scorer).__name__}", "edges")


class NegativeSampler:
    """Draws ``k`` negative edges for each edge of a graph; made collectively.

    Negative j of the edge with original id e takes the node whose original id is
    floor(N x uniform(seed, step, end, e, j)) of the N of its type (:mod:`sar.kernels.keyed`):
    neither the cut nor the number of ranks plays a part. Nobody looks whether it is a true edge.

    A negative belongs to the rank that owns its destination, as edges do. Drawing costs, in time
    and memory, in proportion to this rank's edges, negatives and the rows these need; what a rank
    holds of the graph's nodes is its share.

    Args:
        graph: its edges are the true ones; of one relation, or a slice ``graph[etype]``.
        k: negatives for each edge.
        method: ``"per_source"`` keeps the edge's source, ``"per_destination"`` its destination,
            ``"uniform"`` neither.
        seed: int, the same on all ranks.
        columns: int64 columns of ``graph.edata`` that negatives get from their edge, such as types.

    Raises, on every rank:
        ValueError, TypeError, KeyError: an argument that does not fit, or original ids that are not
            the numbers below N.
    """

    def __init__(
        self,
        graph: GraphView,
        k: int = 1,
        method: str = "per_source",
        *,
        seed: int = 0,
        columns: Sequence[str] = (),
    ) -> None:
        graph = graph_of(graph)
        alike = {"k": k, "method": method, "seed": seed, "columns": list(columns)}
        with graph.group.agreed("NegativeSampler", alike):
            of_one_relation(graph)
            expect.integer(k, "k", at_least=1)
            expect.one_of(method, "method", _REPLACED)
            expect.integer(seed, "seed")
            self.columns = {name: _column(graph, name, "columns").cpu() for name in columns}
        self.graph, self.k, self.method, self.seed = graph, k, method, seed
        self.keys = graph.scope().relation.keys.long().cpu()
        types = (graph.srctypes[0], graph.dsttypes[0])
        ends = global_ends(graph)
        self.sides: list[NodeDirectory | Tensor] = []
        for replaced, ntype, end in zip(_REPLACED[method], types, ends, strict=True):
            self.sides.append(directory_of(graph, ntype) if replaced else end)

    def __call__(self, step: int) -> GraphView:
        """The negatives of a step, as a graph over the same nodes; collective.

        Its ``edata["_ID"]`` is k times the edge's original id plus j; it has the columns that were
        asked for. Drawn anew, the same step gives the same negatives.
        """
        src, dst = (self._end(side, number, step) for number, side in enumerate(self.sides))
        eids = (self.keys.unsqueeze(1) * self.k + torch.arange(self.k)).view(-1)
        columns = {name: value.repeat_interleave(self.k) for name, value in self.columns.items()}
        return edge_graph(self.graph, src, dst, eids, columns)

    def _end(self, side: NodeDirectory | Tensor, number: int, step: int) -> Tensor:
        """int64 [E * k] global ids of one end of the negatives."""
        if isinstance(side, Tensor):
            return side.repeat_interleave(self.k)
        seed = _mixed(self.seed, 2 * step + number)
        share = keyed_uniform(self.keys, self.k, seed).mul_(side.num_nodes)
        return side.nids(share.long().view(-1))


def _mixed(seed: int, word: int) -> int:
    """A seed from (``seed``, ``word``) that is unlike that of the next word."""
    return int(keyed_uniform(torch.tensor([word]), 1, seed) * 2.0**53)


def _column(graph: GraphView, name: str, argument: str) -> Tensor:
    column = graph.edge_column(name)
    if column.dtype != torch.int64 or column.dim() != 1:
        raise TypeError(
            f"{argument}: column {name!r} is {column.dtype} {tuple(column.shape)}, "
            "expected int64 [E]"
        )
    return column
