"""The command line: `sar`, `sar-gnn` or `python -m sar`."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import sar
from sar.cli.completion import SHELLS, PrintCompletion
from sar.cli.launch import USER_ERROR
from sar.errors import SarError

# The second is for machines where `sar` is another program: sysstat has one.
NAMES = ("sar", "sar-gnn")

COMMANDS = (
    "partition", "inspect", "plan", "train", "evaluate", "sample-server", "environment", "bench",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """An argument parser that adds the closest known word to its errors; no abbreviations."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        result, left = self.parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}{self._hint(left[0], args)}")
        return result

    def _hint(self, word: str, args: Sequence[str]) -> str:
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and action.choices:
                for name, parser in action.choices.items():
                    if name in args:
                        options += parser._option_string_actions
        return _closest(word.partition("=")[0], options)

    def error(self, message: str) -> NoReturn:
        self.exit(
            USER_ERROR, f"{self.prog}: error: {message}\n{self.prog} --help shows the usage\n"
        )

    def _check_value(self, action, value):
        choices = action.choices
        if choices is not None and value not in choices:
            what = f"{value!r} is unknown{_closest(str(value), [str(c) for c in choices])}"
            raise argparse.ArgumentError(
                action, f"{what} (choose from {', '.join(map(str, choices))})"
            )


def _closest(word: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _name() -> str:
    """What the user typed, where it is a name of ours."""
    typed = Path(sys.argv[0]).name
    return typed if typed in NAMES else NAMES[0]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(prog=_name(), description="Exact full-batch training over many hosts.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {sar.__version__}")
    parser.add_argument(
        "--print-completion", choices=SHELLS, action=PrintCompletion, metavar="SHELL",
        help=f"write a script that completes words in a shell ({', '.join(SHELLS)})",
    )  # fmt: skip
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"sar.cli.{name.replace('-', '_')}")
        sub = module.add_parser(subparsers)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status: 0, or 2 for what the user can put right."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except (SarError, ValueError, OSError) as error:
        if args.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"{_name()} {args.command}: error: {text}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{_name()} {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
