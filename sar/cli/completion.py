"""`sar --print-completion`: a script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish", "tcsh")


class PrintCompletion(argparse.Action):
    """Write the script for one shell and end. It is text: no key press starts Python."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(f"{option_string} needs shtab: pip install 'sar-gnn[completion]'")
        _offer_files(parser, shtab.FILE)
        print(shtab.complete(parser, values))
        parser.exit()


def _offer_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Complete as a file what is neither a choice nor a number, here and in sub-commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _offer_files(command, files)
        elif action.choices is None and action.nargs != 0 and action.type not in (int, float):
            action.complete = files  # type: ignore[attr-defined]
