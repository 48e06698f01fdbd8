"""The library's own models, which need no other library: stacks of SAGE, GCN, GIN, GAT and R-GCN.

:func:`build_model` makes them, or a model of the user's own, from options.
"""

from sar.models.blocks import SampledBlock
from sar.models.build import build_model, call_of, for_several_types, prepare_graph
from sar.models.calling import Call, read_call
from sar.models.convs import GATConv, GINConv, GraphConv, SAGEConv
from sar.models.own import find_maker, try_own
from sar.models.stack import RelationalStack, Stack
from sar.run_options import ModelOptions

__all__ = [
    "Call",
    "GATConv",
    "GINConv",
    "GraphConv",
    "ModelOptions",
    "RelationalStack",
    "SAGEConv",
    "SampledBlock",
    "Stack",
    "build_model",
    "call_of",
    "find_maker",
    "for_several_types",
    "prepare_graph",
    "read_call",
    "try_own",
]
