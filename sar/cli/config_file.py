"""Options of a command in a YAML file: read as defaults, written as they are in effect."""

from __future__ import annotations

import argparse
import difflib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

_NOT_KEPT = {"help", "config", "save_config", "debug", "command"}


def read_into(parser: Any, path: str, left_out: Collection[str] = ()) -> Iterator[str]:
    """Make the values of a file the defaults of ``parser``; gives a message for each that is none.

    Args:
        left_out: destinations of options that keep the default that they have.
    """
    try:
        text = Path(path).read_text()
        # Words as on the command line, and what they are in YAML for arguments of a model.
        words, typed = yaml.load(text, Loader=yaml.BaseLoader), yaml.safe_load(text)
        top = yaml.compose(text, Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        yield f"--config: cannot read {path!r}: {getattr(error, 'strerror', None) or error}"
        return
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also dates, nesting
        yield f"--config: {path!r} is no YAML: {' '.join(str(error).split())}"
        return
    if typed is None:
        return
    if not isinstance(typed, dict):
        yield f"--config: {path!r} holds no OPTION: VALUE lines"
        return
    keys = Counter(node.value for node, _ in top.value)
    yield from (f"{path}: {key} is given {n} times" for key, n in keys.items() if n > 1)
    actions = _named(parser)
    for key, value in words.items():
        if key not in actions:
            near = difflib.get_close_matches(str(key), actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{path}: {key!r} is no option of {parser.prog}{hint}"
        elif typed[key] is not None and actions[key].dest not in left_out:
            try:
                _set(actions[key], _read(parser, actions[key], value, typed[key]))
            except (argparse.ArgumentError, ValueError) as error:
                yield f"{path}: {key}: {getattr(error, 'message', error)}"


def write(parser: Any, args: argparse.Namespace, path: str) -> None:
    """Write what ``args`` say, so that :func:`read_into` brings it back.

    Raises ``ValueError`` naming the file where it cannot be written.
    """
    content = {}
    for name, action in _named(parser).items():
        value = getattr(args, action.dest)
        value = str(value) if isinstance(value, Path) else value
        if value is not None and value != {}:
            content[name] = list(value) if isinstance(value, tuple) else value
    try:
        Path(path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise ValueError(f"--save-config: cannot write {path!r}: {error.strerror}") from error


def _named(parser: Any) -> dict[str, argparse.Action]:
    """Options by their long names, words without one by theirs."""
    return {
        (action.option_strings[-1].removeprefix("--") if action.option_strings else action.dest): (
            action
        )
        for action in parser._actions
        if action.dest not in _NOT_KEPT
    }


def _set(action: argparse.Action, value: Any) -> None:
    action.default, action.required = value, False
    if not action.option_strings:
        action.nargs = "?"


def _read(parser: Any, action: argparse.Action, words: Any, typed: Any) -> Any:
    """The value of an option. Raises ``ValueError`` or ``argparse.ArgumentError``."""
    if isinstance(action.default, dict):
        if not isinstance(typed, dict) or not all(isinstance(key, str) for key in typed):
            raise ValueError(f"got {typed!r}, expected KEY: VALUE lines")
        return typed
    if isinstance(words, dict):
        raise ValueError(f"got {typed!r}, expected one value")
    if action.nargs == 0 or (action.nargs == "?" and isinstance(typed, bool)):
        if words not in ("true", "false"):
            raise ValueError(f"got {words!r}, expected true or false")
        return words == "true"
    if not isinstance(words, str) and not all(isinstance(word, str) for word in words):
        raise ValueError("got lists or mappings in a list, expected values")
    if action.nargs in ("+", "*") or isinstance(action.default, list):
        return [
            parser.convert(action, one) for one in ([words] if isinstance(words, str) else words)
        ]
    return parser.convert(action, words if isinstance(words, str) else ",".join(words))
