"""The command line: `sar`, `sar-gnn` or `python -m sar`."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import sar
from sar.cli import config_file
from sar.cli.completion import SHELLS, PrintCompletion
from sar.cli.parser import USER_ERROR, Parser, add_help
from sar.errors import SarError

# The second is for machines where `sar` is another program: sysstat has one.
NAMES = ("sar", "sar-gnn")

COMMANDS = (
    "partition", "inspect", "plan", "train", "evaluate", "report", "sample-server", "environment",
    "bench",
)  # fmt: skip
_MODULES = {"report": "run_report"}  # where it is not the command's name


def _name() -> str:
    """What the user typed, where it is a name of ours."""
    typed = Path(sys.argv[0]).name
    return typed if typed in NAMES else NAMES[0]


def build_parser() -> Parser:
    """The parser of the whole command line. Imports neither torch nor numpy."""
    parser = Parser(prog=_name(), description="Exact full-batch training over many hosts.")
    add_help(parser, everything=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {sar.__version__}")
    parser.add_argument(
        "--print-completion", choices=SHELLS, action=PrintCompletion,
        help="write a script that completes words in a shell",
    )  # fmt: skip
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"sar.cli.arguments.{name.replace('-', '_')}")
        sub = module.add_parser(subparsers)
        sub.check = getattr(module, "check", sub.check)
        sub.add_common()
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status: 0, or 2 for what the user can put right."""
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # told already
        return int(end.code or 0)
    try:
        if args.save_config is not None and os.environ.get("RANK", "0") == "0":
            config_file.write(parser.command(args.command), args, args.save_config)
        word = args.command.replace("-", "_")
        module = importlib.import_module(f"sar.cli.{_MODULES.get(args.command) or word}")
        return module.run(args) or 0
    except (SarError, ValueError, OSError) as error:
        if args.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"{_name()} {args.command}: error: {text}", file=sys.stderr)
        return USER_ERROR
    except (MemoryError, RuntimeError) as error:
        # Of torch's on the CPU its text alone tells that it was its allocator's.
        reason = str(error).rpartition("Allocator: can't allocate memory: ")
        if args.debug or not (isinstance(error, MemoryError) or reason[1]):
            raise
        text = "; ".join(filter(None, ["not enough memory", *reason[2].splitlines()]))
        print(f"{_name()} {args.command}: error: {text}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{_name()} {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
