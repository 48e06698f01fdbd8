"""The only autograd functions: streamed reductions, messages, and reductions over ranks."""

from sar.ops.aggregate import aggregate
from sar.ops.mailbox import run_mailbox
from sar.ops.message_blocks import Inputs, Messages, Weighting
from sar.ops.messages import run_messages, swap_sides
from sar.ops.relation import (
    AnyRelation,
    Relation,
    ReversedRelation,
    as_stored,
    build_relation,
    join_relations,
    reverse_relation,
)
from sar.ops.wanted import agree_wanted

__all__ = [
    "AnyRelation",
    "Inputs",
    "Messages",
    "Relation",
    "ReversedRelation",
    "Weighting",
    "aggregate",
    "agree_wanted",
    "as_stored",
    "build_relation",
    "join_relations",
    "reverse_relation",
    "run_mailbox",
    "run_messages",
    "swap_sides",
]
