"""The only autograd functions: streamed reductions, messages, and reductions over ranks."""

from sar.ops.aggregate import aggregate
from sar.ops.mailbox import run_mailbox
from sar.ops.message_blocks import Inputs, Messages
from sar.ops.messages import run_messages
from sar.ops.relation import Relation, build_relation, join_relations

__all__ = [
    "Inputs",
    "Messages",
    "Relation",
    "aggregate",
    "build_relation",
    "join_relations",
    "run_mailbox",
    "run_messages",
]
