"""Models on sharded graphs: which code computes their layers, what that costs, what they keep.

And the library's own models, stacks of SAGE, GCN, GIN, GAT and R-GCN (:func:`build_model`). What a
front end says of another library's layers is in :mod:`sar.models.choice`.
"""

from sar.models.activations import set_activations
from sar.models.build import (
    build_model,
    call_of,
    find_maker,
    for_several_types,
    prepare_graph,
    try_own,
)
from sar.models.calling import Call, read_call
from sar.models.choice import Adapter, LayerOptions, choose, fingerprint, options_of, standing
from sar.models.convs import GATConv, GINConv, GraphConv, SAGEConv
from sar.models.explain import Explanation, LayerRow, explain, layers_logged
from sar.models.front_end import LAYERS, SampledBlock
from sar.models.known import Layers
from sar.models.prepare import optimize, prepare
from sar.models.stack import RelationalStack, Stack
from sar.models.tracing import mark_layers, trace
from sar.models.validation import Validation, validate
from sar.run_options import ModelOptions

__all__ = [
    "Adapter",
    "Call",
    "Explanation",
    "GATConv",
    "GINConv",
    "GraphConv",
    "LAYERS",
    "LayerOptions",
    "LayerRow",
    "Layers",
    "ModelOptions",
    "RelationalStack",
    "SAGEConv",
    "SampledBlock",
    "Stack",
    "Validation",
    "build_model",
    "call_of",
    "choose",
    "explain",
    "find_maker",
    "fingerprint",
    "for_several_types",
    "layers_logged",
    "mark_layers",
    "optimize",
    "options_of",
    "prepare",
    "prepare_graph",
    "read_call",
    "set_activations",
    "standing",
    "trace",
    "try_own",
    "validate",
]
