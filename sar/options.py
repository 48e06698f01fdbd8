"""Options declared once: fields of dataclasses that say how they are read, checked and told.

The command line, its help, files of options, completion and the checks of the dataclasses follow
from what :func:`option` says. Imports nothing: a mistake is told before torch is there.
"""

from __future__ import annotations

import difflib
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")


def closest(word: str, known: Iterable[str], quoted: bool = False) -> str:
    """The end of a message, "did you mean" and the nearest known word; else nothing."""
    for found in difflib.get_close_matches(word, [*known], n=1):
        return f"; did you mean {found!r}?" if quoted else f"; did you mean {found}?"
    return ""


def closest_name(name: str, known: Iterable[str]) -> str:
    """:func:`closest` for the middle of a sentence, quoted."""
    found = difflib.get_close_matches(name, [*known], n=1)
    return f", did you mean {found[0]!r}?" if found else ""


@dataclass(frozen=True)
class Kind:
    """The values that an option takes.

    Attributes:
        metavar: stands for one in a help text.
        expected: which they are, as the end of a message.
        parse: the value of a word, ``None`` if none; ``ValueError`` says what else is wrong.
        type: of the values. fits: whether a value of that type is one of them.
        words: some that it takes, which a shell completes; all of them where it is ``closed``.
        in_python: ``expected`` of a value that is no word, where that reads otherwise.
    """

    metavar: str
    expected: str
    parse: Callable[[str], Any] = str
    type: Any = str
    fits: Callable[[Any], bool] = lambda value: True
    words: tuple[str, ...] = ()
    closed: bool = False
    in_python: str = ""

    def read(self, text: str) -> Any:
        value = self.parse(text)
        if value is None or not self.fits(value):
            raise ValueError(self._refusal(text, self.expected))
        return value

    def check(self, value: Any) -> None:
        """Raise ``TypeError`` for a value of another type, ``ValueError`` for one that is none."""
        expected = self.in_python or self.expected
        is_one = isinstance(value, self.type) and isinstance(value, bool) == (self.type is bool)
        if not is_one and not self.closed:
            raise TypeError(f"got {type(value).__name__}, expected {expected}")
        if not self.fits(value):
            raise ValueError(self._refusal(value, expected))

    def _refusal(self, value: Any, expected: str) -> str:
        return f"got {value!r}, expected {expected}{closest(str(value), self.words)}"


def one_of(words: tuple[str, ...]) -> Kind:
    known = f"one of {', '.join(words)}" if len(words) > 2 else " or ".join(map(repr, words))
    return Kind("WORD", known, fits=words.__contains__, words=words, closed=True)


def whole(least: int) -> Kind:

    def parse(text: str) -> int | None:
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else None

    words = f"an integer of {least} or more", f"an int of at least {least}"
    return Kind("N", words[0], parse, int, lambda value: value >= least, in_python=words[1])


def number(expected: str, fits: Callable[[float], bool]) -> Kind:
    """Finite numbers that ``fits``; ``expected`` says which do, as in "more than 0"."""

    def parse(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    return Kind("X", expected, parse, Real, lambda value: math.isfinite(value) and fits(value))


def _key_value(text: str) -> tuple[str, Any] | None:
    """``KEY=VALUE``, whose VALUE is YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        return None
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also dates, nesting
        raise ValueError(f"{key}: {value!r} is no YAML") from error


def _fanouts(text: str) -> list[int] | None:
    words = [word.strip() for word in text.split(",")]
    known = all(re.fullmatch("-1|[0-9]+", word) for word in words)
    return [*map(int, words)] if known else None


def _are_fanouts(values: Any) -> bool:
    return all(type(one) is int and one >= -1 for one in values)


FLAG = Kind("", "true or false", {"true": True, "false": False}.get, bool)
TEXT = Kind("NAME", "a word")
KEY_VALUE = Kind("KEY=VALUE", "KEY=VALUE", _key_value, object)
POSITIVE, COUNT = whole(1), whole(0)
ABOVE_ZERO = number("a number of more than 0", lambda value: value > 0)
ZERO_OR_MORE = number("a number of 0 or more", lambda value: value >= 0)
FANOUTS = Kind(
    "N,N,...", "numbers such as 15,10,5, or -1 for all", _fanouts, (list, tuple), _are_fanouts
)
PROBABILITY = number("0 or more and less than 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        name: with underscores; also of the attribute of what was read.
        help: what it is, without its choices and its default.
        kind: of its values. metavar: in place of the kind's. default: when it is not given.
        field: of the dataclass that declares it; ``name`` is ``no_FIELD`` where that is true by
            default.
        many: several words (``"+"``, ``"*"``), one each time that the option is given (``"each"``),
            or a word or none (``"?"``).
        place: it is positional. required: it has to be given.
        alias: another name. expert: ``--help`` leaves it out.
        needs: the flag without which it is not used: when it is not given, ``None`` is read.
    """

    name: str
    help: str
    kind: Kind = FLAG
    default: Any = None
    metavar: str = ""
    field: str = ""
    many: str = ""
    place: bool = False
    required: bool = False
    alias: str = ""
    expert: bool = False
    needs: str = ""

    def __post_init__(self) -> None:
        if self.kind is FLAG and self.default is None:
            object.__setattr__(self, "default", False)

    @property
    def key(self) -> str:
        """Its name in a file of options."""
        return self.name if self.place else self.name.replace("_", "-")

    @property
    def flags(self) -> list[str]:
        return [] if self.place else [f"--{one}" for one in (self.alias, self.key) if one]

    @property
    def value_word(self) -> str:
        return self.metavar or self.kind.metavar

    @property
    def title(self) -> str:
        return self.value_word if self.place else "/".join(self.flags)

    def text(self) -> str:
        what, said, otherwise = self.help.partition("; default: ")
        words = ", ".join(self.kind.words) if self.kind.closed else ""
        text, shown = ": ".join(filter(None, [what, words])), self.default
        if isinstance(shown, list | tuple):
            shown = (" " if self.many else ",").join(map(str, shown))
        if not said and shown is not None and shown is not False and shown not in ("", {}):
            otherwise = f"{shown:g}" if isinstance(shown, float) else str(shown)
        return f"{text}; default: {otherwise}".removeprefix("; ") if otherwise else text

    def initial(self) -> Any:
        return None if self.needs else self.default

    def read(self, given: str | list[str]) -> Any:
        if isinstance(given, str):
            return self.kind.read(given)
        values = [self.kind.read(one) for one in given]
        return dict(values) if isinstance(self.default, dict) else values

    def check(self, value: Any) -> None:
        """Raises ``TypeError`` or ``ValueError`` naming the option."""
        if value is None and self.default is None:
            return
        try:
            self.kind.check(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None


def option(default: Any, help: str, kind: Kind = FLAG, metavar: str = "", **more: Any) -> Any:
    """A field of a dataclass that is an option; ``more`` are attributes of :class:`Option`."""
    metadata = {"option": Option(more.pop("name", ""), help, kind, default, metavar, **more)}
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(kind: Any) -> tuple[Option, ...]:
    found = []
    for one in fields(kind):
        declared: Option | None = one.metadata.get("option")
        if declared is not None:
            off = declared.default is True
            name = declared.name or ("no_" if off else "") + one.name
            found.append(
                replace(
                    declared,
                    field=one.name,
                    name=name,
                    default=declared.default if not off else False,
                )
            )
    return tuple(found)


def check_options(options: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for the first option with another value."""
    for one in options_of(type(options)):
        one.check(getattr(options, one.field))


def take(kind: type[T], args: Namespace, **more: Any) -> T:
    """The dataclass that the words of a command ask for; ``more`` are fields set otherwise."""
    found = {}
    for one in options_of(kind):
        value = getattr(args, one.name)
        if value is not None:
            value = not value if one.name == f"no_{one.field}" else value
            found[one.field] = tuple(value) if isinstance(value, list) else value
    return kind(**(found | more))
