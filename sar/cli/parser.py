"""The parser of every command: all mistakes at once, help in two lengths, options from a file."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from sar.cli import config_file

USER_ERROR = 2  # a status, argparse's own
_BAD: Any = object()  # in place of a value that could not be read
_WIDTH, _HELP_COLUMN = 100, 26


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, as the end of a message; else nothing."""
    found = difflib.get_close_matches(word, [*known], n=1)
    return f"; did you mean {found[0]}?" if found else ""


class Formatter(argparse.HelpFormatter):
    """Choices behind the text, then the default: one style for all options."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=width)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
            text += (": " if text else "") + ", ".join(map(str, action.choices))
        shown = action.default
        if not action.option_strings or shown is argparse.SUPPRESS:
            return text
        if shown is None or shown == [] or isinstance(shown, bool | dict):
            return text
        if isinstance(shown, list | tuple):
            shown = " ".join(map(str, shown))
        shown = f"{shown:g}" if isinstance(shown, float) else shown
        return f"{text}; default: {shown}".removeprefix("; ").replace("%", "%%")

    def _metavar_formatter(self, action: argparse.Action, default: str) -> Any:
        if action.metavar is not None or not action.option_strings:
            return super()._metavar_formatter(action, default)
        name = "WORD" if action.choices is not None else getattr(action.type, "metavar", default)
        return lambda size: (name,) * size


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that notes what is wrong and tells all of it.

    Attributes:
        check: of what options say together: gives messages; called when each alone is right.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.update(allow_abbrev=False, add_help=False, formatter_class=Formatter)
        super().__init__(*args, **kwargs)
        self.check: Callable[[argparse.Namespace], Iterable[str]] = lambda args: ()
        self._problems: list[str] = []
        self._bad_values = False
        self._off: set[str] = set()  # flags that the command line takes back
        self._hidden: set[str] = set()

    def for_experts(self, *names: str) -> None:
        """Options, or titles of groups, that ``--help`` leaves out and ``--help-all`` shows."""
        self._hidden.update(names)

    def add_common(self) -> None:
        """What every command takes."""
        common = self.add_argument_group("the command itself")
        common.add_argument("--config", metavar="FILE", help="read options from this YAML file")
        common.add_argument(
            "--save-config", metavar="FILE", help="write all options in effect to it"
        )
        common.add_argument("--debug", action="store_true", help="show the traceback of an error")
        add_help(common)
        self.for_experts("--debug")

    def command(self, name: str) -> Parser:
        """The parser of a sub-command."""
        actions = (one for one in self._actions if isinstance(one, argparse._SubParsersAction))
        return next(actions).choices[name]

    def format_help(self, everything: bool = False) -> str:
        """The help text, without what :meth:`for_experts` named unless ``everything`` is wanted."""
        formatter, left_out = self._get_formatter(), 0
        formatter.add_usage(self.usage or self._short_usage(), [], [])
        formatter.add_text(self.description)
        for group in self._action_groups:
            shown = [one for one in group._group_actions if everything or not self._hides(one)]
            if group.title in self._hidden and not everything:
                shown = []
            left_out += len(group._group_actions) - len(shown)
            if shown:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(shown)
                formatter.end_section()
        formatter.add_text(self.epilog)
        formatter.add_text(f"{left_out} more: {self.prog} --help-all" if left_out else None)
        return formatter.format_help()

    def _hides(self, action: argparse.Action) -> bool:
        return not self._hidden.isdisjoint(action.option_strings)

    def _short_usage(self) -> str:
        words = [self.prog]
        for action in self._actions:
            if not action.option_strings:
                words.append(str(action.metavar or action.dest))
            elif action.required:
                words += [action.option_strings[0], str(action.metavar)]
        return " ".join([*words, "[options]"])

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        result, left = self.parse_known_args(args, namespace)
        self._note_words(left)
        self._tell()
        return result

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:
            return super().parse_known_args(words, namespace)
        words = list(self._mended(words))
        self._read_config(words)
        result, left = super().parse_known_args(words, namespace)
        if not any("unknown option" in one for one in self._problems):
            self._note_words(left)  # else they may be values of those
        if not self._bad_values:
            self._problems += self.check(result)
        self._tell()
        return result, []

    def _mended(self, words: Sequence[str]) -> Iterator[str]:
        """The words with those options that were probably meant, so that the rest can be read."""
        known = self._option_string_actions
        for word in _joined(words):
            name, equals, value = word.partition("=")
            if not re.match("--?[A-Za-z]", word) or name in known:
                yield word
                continue
            flag = self._taken_back(name)
            if flag is not None:
                self._off.add(flag.dest)
                continue
            hint = closest(name, known)
            self._problems.append(f"{name}: unknown option{hint}")
            meant = hint.removeprefix("; did you mean ").removesuffix("?")
            if meant and not isinstance(known[meant], Help):
                yield f"{meant}{equals}{value}"

    def _taken_back(self, name: str) -> argparse.Action | None:
        """The flag that ``--no-flag`` takes back, which a file of options may have set."""
        other = name.replace("--no-", "--", 1) if name.startswith("--no-") else f"--no-{name[2:]}"
        action = self._option_string_actions.get(other)
        return action if action is not None and action.nargs == 0 else None

    def _read_config(self, words: Sequence[str]) -> None:
        """Values of the file that the words name become defaults."""
        pairs = zip(words, [*words[1:], ""])
        path = None
        for word, value in pairs:
            if word == "--config":
                path = value
            elif word.startswith("--config="):
                path = word.partition("=")[2]
        if path is None:
            return
        self._problems += config_file.read_into(self, path, self._off)

    def convert(self, action: argparse.Action, text: str) -> Any:
        """The value that a word stands for. Raises ``argparse.ArgumentError``."""
        value = super()._get_value(action, text)  # type: ignore[misc]
        _expect_choice(action, value)
        return value

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """As argparse; what is wrong is noted, and told with the rest."""
        if isinstance(action, argparse._SubParsersAction):  # all words, the command among them
            return text
        try:
            return self.convert(action, text)
        except argparse.ArgumentError as error:
            if self._subparsers is not None:  # options that act at once
                raise
            self._problems.append(plain(error))
            self._bad_values = True
            return _BAD

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Done with the value, but for the command's name: without it nothing can be read."""
        if isinstance(action, argparse._SubParsersAction):
            _expect_choice(action, value)

    def _note_words(self, words: Sequence[str]) -> None:
        if words:
            self._problems.append(f"got more words than are read: {' '.join(words)}")

    def _tell(self) -> None:
        if self._problems:
            self.error("")

    def error(self, message: str) -> NoReturn:
        """Tell ``message`` and all that was noted, and end."""
        message = re.sub("^argument ", "", message)
        lines = list(dict.fromkeys(filter(None, [*self._problems, message])))
        text = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines])
        self.exit(USER_ERROR, f"{self.prog}: error: {text}\n")


def _joined(words: Sequence[str]) -> list[str]:
    """Values such as ``-1,5``, which look like options, joined with the option before them."""
    found: list[str] = []
    for word in words:
        if re.match("-[0-9]", word) and found and re.fullmatch("--[^=]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


class Help(argparse.Action):
    """Print the help text and end; all of it for ``--help-all``."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named, nargs=0, default=argparse.SUPPRESS)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        sys.stdout.write(parser.format_help(option == "--help-all"))
        parser.exit()


def add_help(group: Any, everything: bool = True) -> None:
    """``--help``, and ``--help-all`` where there is more to show."""
    names = ["-h", "--help", *(["--help-all"] if everything else [])]
    text = "show the options; all of them" if everything else "show this"
    group.add_argument(*names, action=Help, dest="help", help=text)


def _expect_choice(action: argparse.Action, value: Any) -> None:
    if action.choices is not None and value not in action.choices:
        known = [str(one) for one in action.choices]
        text = f"got {value!r}, expected one of {', '.join(known)}{closest(str(value), known)}"
        raise argparse.ArgumentError(action, text)


def plain(error: argparse.ArgumentError) -> str:
    """The message of an error of one argument."""
    return f"{error.argument_name}: {error.message}" if error.argument_name else error.message
