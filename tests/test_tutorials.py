"""The tutorials, followed word for word: files are saved, commands typed, outputs compared.

A Python block whose first line is a comment with a file's name is saved under that name. Lines of
shell blocks are typed one after another. A `text` block behind `<!-- output -->` is what the last
command printed, numbers to within two units of their last digit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, blocks

OUTPUT = re.compile(r"<!-- output -->\n\Z")
NUMBER = re.compile(r"\d+\.\d+")
FILE = re.compile(r"# (\w+\.py)\n")


def is_output(page: str, line: int) -> bool:
    """Whether the block whose text begins at ``line`` is marked as what a command printed."""
    lines = (ROOT / page).read_text().splitlines(keepends=True)
    return bool(OUTPUT.search("".join(lines[: line - 2])))


def typed(command: str, folder: Path) -> str:
    """What ``command`` prints, in a shell that finds `python`, `torchrun` and this `sar`."""
    tools = folder / "bin"
    if not tools.exists():
        tools.mkdir()
        for name, words in (("python", ""), ("sar", "-m sar"), ("torchrun", "-m torch.distributed.run")):
            script = f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n'
            (tools / name).write_text(script)
            (tools / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def assert_same_text(printed: str, shown: str) -> None:
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown)):
        last_digit = 0.1 ** len(other.split(".")[1])
        assert float(one) == pytest.approx(float(other), abs=2.5 * last_digit), printed


@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", ["docs/tutorial_dgl.md", "docs/tutorial_sampled.md"])
def test_tutorial_does_what_it_says(page: str, tmp_path: Path) -> None:
    printed, files, outputs = "", 0, 0
    for block in blocks(page):
        named = FILE.match(block.text)
        if block.language == "python" and named:
            (tmp_path / named[1]).write_text(block.text)
            files += 1
        elif block.language == "shell":
            for command in block.text.splitlines():
                printed = typed(command, tmp_path)
        elif is_output(page, block.line):
            assert_same_text(printed, block.text)
            outputs += 1
    assert files and outputs
