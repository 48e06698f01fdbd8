"""The autograd functions: streamed reductions, messages, and reductions over ranks."""

from sar.ops.aggregate import aggregate
from sar.ops.capture import Captures
from sar.ops.mailbox import run_mailbox
from sar.ops.message_blocks import Inputs, Messages, Weighting
from sar.ops.messages import run_messages, swap_sides

__all__ = [
    "Captures",
    "Inputs",
    "Messages",
    "Weighting",
    "aggregate",
    "run_mailbox",
    "run_messages",
    "swap_sides",
]
