"""Options of a command in a YAML file: read as words are, written as they are in effect."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sar.cli.options import COMMON
from sar.options import FLAG, Option, closest

_NOT_KEPT = {one.name for one in COMMON}


def read(path: str, options: Sequence[Option], prog: str) -> tuple[dict[str, Any], list[str]]:
    """Values by the options' names, and a message for each entry of the file that is none."""
    try:
        text = Path(path).read_text()
        # Words as on the command line, and what they are in YAML for arguments of a model.
        words, typed = yaml.load(text, Loader=yaml.BaseLoader), yaml.safe_load(text)
        top = yaml.compose(text, Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        return {}, [f"--config: cannot read {path!r}: {why}"]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also dates, nesting
        return {}, [f"--config: {path!r} is no YAML: {' '.join(str(error).split())}"]
    if typed is None:
        return {}, []
    if not isinstance(typed, dict):
        return {}, [f"--config: {path!r} holds no OPTION: VALUE lines"]
    counts = Counter(node.value for node, _ in top.value)
    wrong = [f"{path}: {key} is given {n} times" for key, n in counts.items() if n > 1]
    known = {one.key: one for one in options if one.name not in _NOT_KEPT}
    found = {}
    for key, value in words.items():
        if key not in known:
            wrong.append(f"{path}: {key!r} is no option of {prog}{closest(str(key), known)}")
        elif typed[key] is not None:
            try:
                found[known[key].name] = _value(known[key], value, typed[key])
            except ValueError as error:
                wrong.append(f"{path}: {key}: {error}")
    return found, wrong


def _value(one: Option, words: Any, typed: Any) -> Any:
    if isinstance(one.default, dict):
        if not isinstance(typed, dict) or not all(isinstance(key, str) for key in typed):
            raise ValueError(f"got {typed!r}, expected KEY: VALUE lines")
        return typed
    if isinstance(words, dict):
        raise ValueError(f"got {typed!r}, expected one value")
    if one.kind is FLAG or (one.many == "?" and isinstance(typed, bool)):
        return FLAG.read(words) if isinstance(words, str) else FLAG.read(",".join(words))
    if isinstance(words, str):
        return one.read([words] if one.many in {"+", "*", "each"} else words)
    if not all(isinstance(word, str) for word in words):
        raise ValueError("got lists or mappings in a list, expected values")
    return one.read(words if one.many not in {"", "?"} else ",".join(words))


def write(options: Sequence[Option], args: argparse.Namespace, path: str) -> None:
    """Write the options in ``args``, so that :func:`read` brings them back. Raises ``ValueError``
    naming the file where it cannot be written."""
    content = {}
    for one in options:
        value = getattr(args, one.name)
        if one.name not in _NOT_KEPT and value is not None and value != {}:
            content[one.key] = str(value) if isinstance(value, Path) else value
    try:
        Path(path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise ValueError(f"--save-config: cannot write {path!r}: {error.strerror}") from error
