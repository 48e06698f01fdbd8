"""A model of the user's own: found by name, made with the arguments that its constructor takes."""

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
from torch import Tensor, nn

Maker = Callable[..., nn.Module]

_WIDTH = 16  # of a trial


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
    """The model that ``text`` names.

    Args:
        args: for the constructor.
        offered: more of them, each given only where the constructor has a parameter of that name
            and ``args`` say nothing of it.

    Raises ``ValueError`` where the constructor does not take them, or gives no module.
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
    except TypeError as error:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in given.items()) or "nothing"
        raise ValueError(
            f"model: {text} takes {signature}, got {shown}: {error}; give its arguments by "
            "--model-args KEY=VALUE"
        ) from error
    model = maker(**given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {text} gave a {type(model).__name__}, expected a torch.nn.Module")
    return model


def try_own(text: str, args: Mapping[str, Any], featured: Sequence[str]) -> nn.Module | None:
    """The model as it will be, without memory and before there is a graph; ``None`` where that
    takes more than widths.

    Args:
        featured: the node types that have features, where there are several types.

    Raises ``ValueError`` where it takes the features of one type alone.
    """
    widths: list[Any] = [_WIDTH, dict.fromkeys(featured, _WIDTH)] if featured else [_WIDTH]
    made: list[nn.Module | None] = []
    for width in widths:
        offered = {"in_feats": width, "out_feats": _WIDTH, "target_type": (*featured, None)[0]}
        try:
            with torch.device("meta"):
                made.append(build_own(text, args, offered))
        except Exception:  # whatever the user's code raises
            made.append(None)
    if made[0] is not None and made[-1] is None:
        raise ValueError(
            f"model: {text} takes one width as in_feats, and the graph has several types; expected "
            f"one that takes a dict by node type, here of {', '.join(featured)}"
        )
    return made[-1]


def expect_logits(model: nn.Module, text: str, num_classes: int, ntype: str) -> None:
    """Let ``model`` raise ``ValueError`` when its result has not the shape of logits.

    Of a dict by node type it gives the rows of ``ntype``.
    """

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
