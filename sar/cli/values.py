"""What words on the command line are read as: types for ``add_argument``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from sar.config import parse_bytes

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


class Value:
    """A type with the word that stands for it in a help text.

    ``words`` are some of what it takes, which a shell completes. ``read`` raises ``ValueError`` for
    what it does not take; the message is told with the option.
    """

    def __init__(
        self, metavar: str, read: Callable[[str], Any], words: tuple[str, ...] = ()
    ) -> None:
        self.metavar, self._read, self.words = metavar, read, words

    def __call__(self, text: str) -> Any:
        try:
            return self._read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error


def whole(least: int) -> Value:
    """An integer of at least ``least``."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or int(text) < least:
            raise ValueError(f"got {text!r}, expected an integer of {least} or more")
        return int(text)

    return Value("N", read)


def number(what: str, fits: Callable[[float], bool]) -> Value:
    """A number that ``fits``; ``what`` says which do, as in "more than 0"."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise ValueError(f"got {text!r}, expected {what}")
        return value

    return Value("X", read)


def _size(text: str) -> str:
    try:
        parse_bytes(text, "")
    except ValueError as error:
        raise ValueError(str(error).removeprefix(": ")) from error
    return text


def parse_rate(text: str) -> float:
    """Bits a second of ``"25Gbit"`` or ``"100 Mbit"``; raises ``ValueError``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?bit)(?:/s)?\s*", text.lower())
    if match is None or not float(match.group(1)) > 0:
        raise ValueError(f"got {text!r}, expected a rate like '25Gbit' or '100Mbit'")
    return float(match.group(1)) * _RATES[match.group(2)]


def _rate(text: str) -> str:
    parse_rate(text)
    return text


def _fanouts(text: str) -> list[int]:
    words = text.split(",")
    if not all(re.fullmatch(r"\s*(-1|[0-9]+)\s*", word) for word in words):
        raise ValueError(f"got {text!r}, expected numbers such as 15,10,5, or -1 for all")
    return [int(word) for word in words]


positive = whole(1)
above_zero = number("a number of more than 0", lambda value: value > 0)
zero_or_more = number("a number of 0 or more", lambda value: value >= 0)
probability = number("0 or more and less than 1", lambda value: 0 <= value < 1)
size = Value("SIZE", _size)  # bytes; the text is kept: it says more than a number
rate = Value("RATE", _rate)
fanouts = Value("N,N,...", _fanouts)


def add_gone(group: Any, name: str, instead: str, was: str | None = None) -> None:
    """An option that was removed: whoever gives it is told what there is ``instead``.

    ``was`` is its default, which a saved file of options may hold.
    """

    def refuse(text: str) -> None:
        if text != was:
            raise ValueError(f"got {text!r}, but the option is gone: {instead}")

    group.add_argument(name, type=Value("VALUE", refuse), help=f"gone: {instead}")


class KeyValue(argparse.Action):
    """``KEY=VALUE`` into a dict; VALUE is read as YAML. The option may come several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        import yaml

        key, equals, text = values.partition("=")
        if not equals or not key.isidentifier():
            raise argparse.ArgumentError(self, f"got {values!r}, expected KEY=VALUE")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # also dates, nesting
            raise argparse.ArgumentError(self, f"{key}: {text!r} is no YAML") from error
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), key: value})
