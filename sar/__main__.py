"""The command line: `sar`, `sar-gnn` or `python -m sar`."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import sar
from sar.cli import config_file
from sar.cli.commands import COMMANDS
from sar.cli.parser import HELP, SHELL, USER_ERROR, completion, end, program
from sar.cli.rank_environment import started_early
from sar.errors import SarError
from sar.options import Kind, one_of

# The second is for machines where `sar` is another program: sysstat has one.
NAMES = ("sar", "sar-gnn")


def _name() -> str:
    """The program's name as the user typed it, where it is one of ours."""
    typed = Path(sys.argv[0]).name
    return typed if typed in NAMES else NAMES[0]


def read_words(words: Sequence[str]) -> Namespace:
    """What a command is asked to do, what was ``typed`` and when; imports neither torch nor numpy.
    Raises ``SystemExit`` after a help text and such, and after telling what is wrong."""
    prog, (first, *rest) = _name(), words or ("",)
    if first in COMMANDS:
        args = COMMANDS[first].read(rest, f"{prog} {first}")
        args.typed, args.began = shlex.join([prog, *words]), time.time()
        return args
    option, _, shell = first.partition("=")
    if first in HELP:
        program(prog, COMMANDS.values())[0].print_help()
    elif first == "--version":
        print(prog, sar.__version__)
    elif option == "--print-completion":
        _print_completion(shell or "".join(rest[:1]), prog)
    elif not words:
        end(prog, ["the following arguments are required: COMMAND"])
    else:
        _read_or_end(prog, "COMMAND", one_of(tuple(COMMANDS)), first)
    sys.exit(0)


def _read_or_end(prog: str, what: str, kind: Kind, word: str) -> str:
    try:
        return kind.read(word)
    except ValueError as error:
        end(prog, [f"{what}: {error}"])


def _print_completion(shell: str, prog: str) -> None:
    option = "--print-completion"
    try:
        print(completion(_read_or_end(prog, option, SHELL, shell), prog, COMMANDS.values()))
    except ImportError:
        end(prog, [f"{option} needs shtab: pip install 'sar-gnn[completion]'"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status: 0, or 2 for what the user can put right."""
    try:
        args = read_words(sys.argv[1:] if argv is None else argv)
    except SystemExit as told:
        return int(told.code or 0)
    command, first = COMMANDS[args.command], os.environ.get("RANK", "0") == "0"
    try:
        if args.save_config is not None and first:
            config_file.write(command.options, args, args.save_config)
        module, _, function = command.run.partition(":")
        with started_early(args):
            return getattr(importlib.import_module(module), function)(args) or 0
    except (SarError, ValueError, OSError) as error:
        if args.debug:
            raise
        problem = " ".join(str(error).split()) or type(error).__name__
    except (MemoryError, RuntimeError) as error:
        # Of torch's on the CPU its text alone tells that it was its allocator's.
        _, allocators, reason = str(error).rpartition("Allocator: can't allocate memory: ")
        if args.debug or not (isinstance(error, MemoryError) or allocators):
            raise
        problem = "; ".join(["not enough memory", *reason.splitlines()])
    except KeyboardInterrupt:
        print(f"{_name()} {args.command}: interrupted", file=sys.stderr)
        return 130
    print(f"{_name()} {args.command}: error: {problem}", file=sys.stderr)
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
