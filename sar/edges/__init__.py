"""The edges of a rank: kept once, compressed by round, and what is derived from them."""

from sar.edges.build import build_relation, join_relations
from sar.edges.relation import (
    AnyRelation,
    Relation,
    ReversedRelation,
    as_stored,
    reverse_relation,
)

__all__ = [
    "AnyRelation",
    "Relation",
    "ReversedRelation",
    "as_stored",
    "build_relation",
    "join_relations",
    "reverse_relation",
]
