"""The words of a command: all mistakes told at once, help in two lengths, options from a file."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from sar.cli import config_file
from sar.cli.options import COMMON, FILES
from sar.options import FLAG, Option, closest, one_of

USER_ERROR = 2  # a status, argparse's own
HELP = ("-h", "--help", "--help-all")
SHELL = one_of(("bash", "zsh", "fish", "tcsh"))
_WIDTH, _HELP_COLUMN = 100, 26


Rule = Callable[[argparse.Namespace], Iterable[str]]
Offer = tuple[argparse.Action, Option]


class Group:
    """Options below one title; ``--help`` leaves those for experts out."""

    def __init__(self, title: str, *options: Option, note: str = "", expert: bool = False) -> None:
        self.title, self.options, self.note = title, options, note
        self.short = () if expert else tuple(one for one in options if not one.expert)


class Command:
    """A sub-command.

    ``run`` is ``module:function``, which takes what was read. ``rules`` give messages about options
    together, once each alone is right. ``fixed`` is added to what is read.
    """

    def __init__(
        self, name: str, run: str, help: str, description: str, *groups: Group,
        rules: Sequence[Rule] = (), usage: str = "", epilog: str | None = None,
        fixed: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.name, self.run, self.help, self.description = name, run, help, description
        self.groups = (*groups, Group("the command itself", *COMMON))
        self.rules, self.usage, self.epilog, self.fixed = rules, usage, epilog, fixed
        self.options = [one for group in self.groups for one in group.options]

    def fill(self, parser: argparse.ArgumentParser, everything: bool = True) -> list[Offer]:
        """Give ``parser`` the options. It takes all words for values: they are read later."""
        parser.description, parser.epilog = self.description, self.epilog
        parser.usage = f"{parser.prog} {self.usage}" if self.usage else self._usage(parser.prog)
        offers = []
        for group in self.groups:
            shown = group.options if everything else group.short
            if shown:
                section = parser.add_argument_group(group.title, group.note or None)
                offers += [(_add(section, one), one) for one in shown]
        section.add_argument(*HELP, action="store_true", help="show the options; all of them")
        return offers

    def _usage(self, prog: str) -> str:
        places = [one.value_word for one in self.options if one.place]
        named = [f"{one.flags[0]} {one.value_word}" for one in self.options if one.required]
        return " ".join([prog, *places, *named, "[options]"])

    def show_help(self, prog: str, everything: bool) -> None:
        parser = new_parser(prog)
        hidden = len(self.options) - len(self.fill(parser, everything))
        more = f"\n{hidden} more: {prog} --help-all\n" if hidden else ""
        sys.stdout.write(parser.format_help() + more)

    def read(self, words: Sequence[str], prog: str) -> argparse.Namespace:
        """The values of words and of the file of options, an attribute for each option. Ends the
        program after ``--help``, and where something is wrong: all of it is told."""
        if not set(HELP).isdisjoint(words):
            self.show_help(prog, "--help-all" in words)
            sys.exit(0)
        return _Reading(self, prog).read(words)


class _Reading:
    """One reading of a command's words, which notes ``problems``; ``off`` are names of the flags of
    a file that the words take back."""

    def __init__(self, command: Command, prog: str) -> None:
        self.command, self.prog = command, prog
        self.known = {flag: one for one in command.options for flag in one.flags}
        self.problems: list[str] = []
        self.off: set[str] = set()

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        given = self._split([*self._mended(words)])
        found = argparse.Namespace(command=self.command.name, **self.command.fixed)
        if self._read_values(given, found):
            self.problems += [text for rule in self.command.rules for text in rule(found)]
        if self.problems:
            end(self.prog, self.problems)
        return found

    def _mended(self, words: Sequence[str]) -> Iterator[str]:
        """The words, unknown options replaced by those probably meant, so that the rest can be
        read."""
        for word in _joined(words):
            name, equals, value = word.partition("=")
            if not re.match("--?[A-Za-z]", word) or name in self.known:
                yield word
            elif (flag := self._taken_back(name)) is not None:
                self.off.add(flag.name)
            else:
                hint = closest(name, [*self.known, *HELP[1:]])
                self.problems.append(f"{name}: unknown option{hint}")
                meant = hint.removeprefix("; did you mean ").removesuffix("?")
                if meant in self.known:
                    yield f"{meant}{equals}{value}"

    def _taken_back(self, name: str) -> Option | None:
        """The flag that ``--no-flag`` takes back, which a file of options may have set."""
        other = name.replace("--no-", "--", 1) if name.startswith("--no-") else f"--no-{name[2:]}"
        found = self.known.get(other)
        return found if found is not None and found.kind is FLAG else None

    def _split(self, words: list[str]) -> dict[str, Any]:
        parser = new_parser(self.prog)
        self.command.fill(parser)
        try:
            given, left = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            end(self.prog, [*self.problems, f"{error.argument_name}: {error.message}"])
        if left and not any("unknown option" in one for one in self.problems):
            self.problems.append(f"got more words than are read: {' '.join(left)}")
        return vars(given)

    def _read_values(self, given: dict[str, Any], found: argparse.Namespace) -> bool:
        """Fill ``found``, words before the file; returns whether all options have values."""
        options, before = self.command.options, len(self.problems)
        filed: dict[str, Any] = {}
        if "config" in given:
            filed, wrong = config_file.read(given["config"], options, self.prog)
            self.problems += wrong
        for one in options:
            value = one.initial() if one.name in self.off else filed.get(one.name, one.initial())
            if one.name in given:
                try:
                    value = _with_words(one, value, given[one.name])
                except ValueError as error:
                    self.problems.append(f"{one.title}: {error}")
            setattr(found, one.name, value)
        right = len(self.problems) == before
        required = [one for one in options if one.place or one.required]
        missing = [one.title for one in required if getattr(found, one.name) is None]
        if missing:
            self.problems.append(f"the following arguments are required: {', '.join(missing)}")
        return right and not missing


def _with_words(one: Option, before: Any, words: Any) -> Any:
    """The value of an option by its words, added to the file's where it may come often."""
    if words is True:
        return True
    value = one.read(words)
    if one.many == "each" and before:
        return before | value if isinstance(before, dict) else before + value
    return value


def _joined(words: Sequence[str]) -> list[str]:
    """Join values such as ``-1,5``, which look like options, with the option before them."""
    found: list[str] = []
    for word in words:
        if re.match("-[0-9]", word) and found and re.fullmatch("--[^=]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def new_parser(prog: str) -> argparse.ArgumentParser:
    """A parser without abbreviations, whose result has only what was given."""
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    style = partial(argparse.HelpFormatter, max_help_position=_HELP_COLUMN, width=width)
    return argparse.ArgumentParser(
        prog, formatter_class=style, allow_abbrev=False, add_help=False, exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )  # type: ignore[arg-type]  # fmt: skip


def _add(section: Any, one: Option) -> argparse.Action:
    more: dict[str, Any] = {"help": one.text().replace("%", "%%")}
    if one.place:
        return section.add_argument(one.name, nargs="?", metavar=one.value_word, **more)
    if one.kind is FLAG:
        return section.add_argument(*one.flags, dest=one.name, action="store_true", **more)
    if one.many == "?":
        more |= {"nargs": "?", "const": True}
    elif one.many in {"+", "*"}:
        more["nargs"] = one.many
    elif one.many == "each":
        more["action"] = "append"
    return section.add_argument(*one.flags, dest=one.name, metavar=one.value_word, **more)


def end(prog: str, problems: Iterable[str]) -> NoReturn:
    """Print what is wrong, one mistake in a line, several in a line each, and exit."""
    lines = list(dict.fromkeys(problems))
    text = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines])
    print(f"{prog}: error: {text}", file=sys.stderr)
    sys.exit(USER_ERROR)


def program(prog: str, commands: Iterable[Command]) -> tuple[argparse.ArgumentParser, list[Offer]]:
    """A parser of the whole program, for its help and for completion, and what it offers."""
    top, offers = new_parser(prog), []
    top.description = "Exact full-batch training over many hosts."
    top.usage = f"{prog} COMMAND [options]"
    section = top.add_subparsers(metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for one in commands:
        sub = section.add_parser(one.name, help=one.help, add_help=False)
        offers += one.fill(sub)
    top.add_argument(*HELP[:2], action="store_true", help="show this")
    top.add_argument("--version", action="store_true", help="show the program's version")
    shells = Option("print_completion", "write a script that completes words in a shell", SHELL)
    offers.append((_add(top, shells), shells))
    return top, offers


def completion(shell: str, prog: str, commands: Iterable[Command]) -> str:
    """A shell's script that completes commands, options and files. It is text: no key press starts
    Python. Raises ``ImportError`` without shtab."""
    import shtab

    top, offers = program(prog, commands)
    for action, one in offers:
        if one.kind.words:
            action.choices = one.kind.words
        elif one.kind in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(top, shell)
