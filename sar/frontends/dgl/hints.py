"""What to do in place of a member of DGL's graph that a sharded graph does not have."""

from __future__ import annotations

_BEFORE = "change the graph before it is cut: sar.partition_graph takes the result"
_SAMPLE = "sar.sampling makes mini-batches and subgraphs from the same partitions"
_EDGES = "edges stay with the rank of their destination; use update_all and apply_edges"
_WHOLE = "use it on a graph that is not partitioned"

_HINTS = {
    _BEFORE: ("add_edges", "add_nodes", "remove_edges", "remove_nodes", "clone", "reverse"),
    _SAMPLE: (
        "sample_neighbors", "subgraph", "edge_subgraph", "in_subgraph", "out_subgraph",
        "node_subgraph", "sample_etype_neighbors",
    ),
    _EDGES: (
        "adj", "adjacency_matrix", "adj_tensors", "adj_external", "find_edges", "edge_ids",
        "has_edges_between", "in_edges", "out_edges", "predecessors", "successors",
    ),
    _WHOLE: ("batch_num_nodes", "batch_num_edges", "get_etype_id", "get_ntype_id", "_graph"),
}  # fmt: skip
_HINT_OF = {name: hint for hint, names in _HINTS.items() for name in names}


def missing_member(name: str) -> str:
    hint = _HINT_OF.get(name)
    return f"a sharded graph has no member {name!r}" + (f"; {hint}" if hint else "")
