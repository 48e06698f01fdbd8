"""The model that options describe: the library's, or one's own."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar.graph import GraphView, graphs_among
from sar.models.calling import Call, read_call
from sar.models.convs import GATConv, GINConv, GraphConv, SAGEConv
from sar.models.stack import RelationalStack, Stack
from sar.nn import DistributedBN1D
from sar.options import closest
from sar.partition.arrays import NTYPE_HOMO
from sar.run_options import ModelOptions

Maker = Callable[..., nn.Module]
_WIDTH = 16  # of a trial


def call_of(options: ModelOptions, model: nn.Module) -> Call:
    """How the model that these options made is called."""
    if not options.is_own:
        return Call()
    return read_call(model, options.call, options.front_end, options.edge_features or ())


def prepare_graph(graph: Any, options: ModelOptions) -> Any:
    """GCN and GAT want one self loop at each node (arXiv 1609.02907, 1710.10903)."""
    if options.model not in ("gcn", "gat"):
        return graph
    return graph.remove_self_loop().add_self_loop()


def build_model(
    options: ModelOptions,
    in_feats: int | dict[str, int],
    num_classes: int,
    *,
    graph: GraphView | None = None,
    target_type: str = NTYPE_HOMO,
) -> nn.Module:
    """The model that ``options`` describe, with fresh parameters from torch's generator.

    Args:
        in_feats: columns of the features; in a graph of several types by node type.
        graph: this rank's; ``rgcn`` asks for it, and a model of one's own may.
        target_type: the node type that the logits are of.

    Raises ``ValueError`` where the model is not for such a graph, or one's own cannot be made.
    """
    if options.is_own:
        offered = _offered(in_feats, num_classes, graph, target_type)
        model = build_own(options.model, options.args, offered)
        expect_logits(model, options.model, num_classes, target_type)
        return model
    if options.model == "rgcn":
        if graph is None:
            raise ValueError("graph: got None, expected this rank's graph for 'rgcn'")
        by_type = in_feats if isinstance(in_feats, dict) else {target_type: in_feats}
        return RelationalStack(
            graph, by_type, num_classes, target_type, layers=options.layers, hidden=options.hidden,
            dropout=options.dropout, batch_norm=options.batch_norm,
        )  # fmt: skip
    if isinstance(in_feats, dict):
        raise ValueError(for_several_types(options.model))
    return _stack(options, in_feats, num_classes)


def _offered(in_feats: Any, out_feats: int, graph: Any, target_type: str) -> dict[str, Any]:
    """What the constructor of one's own model gets, each where it has a parameter of the name."""
    widths = {"in_feats": in_feats, "out_feats": out_feats}
    widths |= {"in_channels": in_feats, "out_channels": out_feats}
    types = None if graph is None else (list(graph.ntypes), list(graph.canonical_etypes))
    return widths | {"graph": graph, "metadata": types, "target_type": target_type}


def for_several_types(model: str) -> str:
    """What to say of a model that takes no graph of several types."""
    return (
        f"model: got {model!r} and a graph of several node or edge types, expected 'rgcn' or a "
        "model of your own, as module:Class"
    )


def _stack(options: ModelOptions, in_feats: int, num_classes: int) -> Stack:
    widths = [in_feats] + [options.hidden] * (options.layers - 1) + [num_classes]
    convs = [_conv(options, a, b) for a, b in zip(widths[:-2], widths[1:-1])]
    convs.append(_conv(options, widths[-2], num_classes, last=True))
    norms: list[nn.Module] = []
    if options.batch_norm:
        norms = [DistributedBN1D(width) for width in widths[1:-1]]
    return Stack(convs, norms, options.dropout)


class Attention(nn.Module):
    """A :class:`GATConv` whose heads lie side by side, or are averaged where they give logits."""

    def __init__(self, conv: nn.Module, average: bool) -> None:
        super().__init__()
        self.conv, self.average = conv, average

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        heads = self.conv(graph, x)
        return heads.mean(1) if self.average else heads.flatten(1)


def _conv(options: ModelOptions, in_feats: int, out_feats: int, last: bool = False) -> nn.Module:
    if options.model == "gat":
        width, heads = out_feats if last else out_feats // options.heads, options.heads
        return Attention(GATConv(in_feats, width, heads), last)
    if options.model == "sage":
        relu = None if last or options.batch_norm else F.relu  # in the layer: less memory
        return SAGEConv(in_feats, out_feats, relu)
    if options.model == "gcn":
        return GraphConv(in_feats, out_feats)
    perceptron = nn.Sequential(
        nn.Linear(in_feats, out_feats), nn.ReLU(), nn.Linear(out_feats, out_feats)
    )
    return GINConv(perceptron)


def find_maker(text: str) -> Maker:
    """What ``module:Class`` or ``file.py:Class`` names: a class of modules, or a function.

    The folder of the file, or the current one, is searched for modules from then on. Raises
    ``ValueError`` for a module that cannot be imported, and for a name that it has not.
    """
    place, _, name = text.rpartition(":")
    module = _imported(text, place)
    maker = getattr(module, name, None)
    if maker is None:
        known = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"model: got {text!r}, but {place} has no {name!r}{hint}")
    if not callable(maker) or (isinstance(maker, type) and not issubclass(maker, nn.Module)):
        kind = f"the class {maker.__name__}" if isinstance(maker, type) else repr(maker)
        raise ValueError(f"model: {text} is {kind}, expected a subclass of torch.nn.Module")
    return maker


def build_own(text: str, args: Mapping[str, Any], offered: Mapping[str, Any]) -> nn.Module:
    """The model that ``text`` names, made with ``args`` for its constructor.

    ``offered`` are more arguments, of which it gets those that it has parameters for and ``args``
    do not name. Raises ``ValueError`` where it does not take them, or gives no module.
    """
    maker = find_maker(text)
    signature = inspect.signature(maker)
    named = {
        name
        for name, one in signature.parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    given = {name: value for name, value in offered.items() if name in named} | dict(args)
    try:
        signature.bind(**given)
        model = maker(**given)
    except TypeError as error:
        if not any(word in str(error) for word in _NOT_TAKEN):
            raise
        shown = ", ".join(f"{name}={_short(value)}" for name, value in given.items()) or "nothing"
        near = "".join(closest(name, named) for name in args if name not in named)
        raise ValueError(
            f"model: {text} takes ({', '.join(signature.parameters)}), got {shown}: {error}; give "
            f"its arguments by --model-args KEY=VALUE{near}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {text} gave a {type(model).__name__}, expected a torch.nn.Module")
    return model


_NOT_TAKEN = "unexpected keyword", "missing a required"  # also of a part that is handed arguments


def try_own(
    text: str, args: Mapping[str, Any], graph: Any, featured: Sequence[str]
) -> nn.Module | None:
    """The model as it will be, without memory and before ranks have a graph; ``None`` where that
    takes more than widths.

    Args:
        graph: what has ``ntypes`` and ``canonical_etypes``.
        featured: the node types that have features, where there are several types.

    Raises ``ValueError`` for arguments that it does not take, and where it takes the features of
    one type alone.
    """
    widths: list[Any] = [_WIDTH, dict.fromkeys(featured, _WIDTH)] if featured else [_WIDTH]
    made: list[nn.Module | None] = []
    find_maker(text)  # raises for what there is not
    for width in widths:
        offered = _offered(width, _WIDTH, graph, (*featured, NTYPE_HOMO)[0])
        try:
            with torch.device("meta"):
                made.append(build_own(text, args, offered))
        except Exception as error:  # whatever the user's code raises
            if isinstance(error, ValueError) and isinstance(error.__cause__, TypeError):
                raise  # what build_own says of arguments
            made.append(None)
    if made[0] is not None and made[-1] is None:
        raise ValueError(
            f"model: {text} takes one width of features, and the graph has several types; expected "
            f"one that takes a dict by node type, here of {', '.join(featured)}"
        )
    return made[-1]


def expect_logits(model: nn.Module, text: str, num_classes: int, ntype: str) -> None:
    """Let ``model`` raise ``ValueError`` unless it gives logits; of a dict it gives ``ntype``'s."""

    def check(_: nn.Module, given: tuple[Any, ...], result: Any) -> Tensor:
        logits = result.get(ntype) if isinstance(result, dict) else result
        shape = list(logits.shape) if isinstance(logits, Tensor) else []
        rows = _rows(given, ntype, *shape[:1])
        if not isinstance(logits, Tensor) or shape != [rows, num_classes]:
            got = shape if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"model: forward of {text} gave {got}, expected [{rows}, {num_classes}]: a row for "
                f"each of the {rows} nodes and a column for each of the {num_classes} classes"
            )
        return logits

    model.register_forward_hook(check)


def _rows(given: tuple[Any, ...], ntype: str, otherwise: int = 0) -> int:
    """Destination rows of the graph, or of the last block, that a model was called with."""
    for graph in reversed(graphs_among(given)):
        if ntype in graph.dsttypes:
            return graph.num_dst_nodes(ntype)
    for one in given:
        last = one[-1] if isinstance(one, list | tuple) and one else one
        if hasattr(last, "num_dst_nodes"):
            return last.num_dst_nodes(ntype)
    return otherwise


def _imported(text: str, place: str) -> ModuleType:
    folder = str(Path(place).absolute().parent if place.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the user's code raises
        if isinstance(error, ModuleNotFoundError) and error.name == place.split(".")[0]:
            what = f"there is no module {place!r} in {folder} or installed"
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            what = f"importing it failed at {where}: {type(error).__name__}: {error}"
        raise ValueError(f"model: got {text!r}, but {what}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | bool | dict | list) else ""
    return text if text and len(text) < 60 else f"<{type(value).__name__}>"
