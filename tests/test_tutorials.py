"""The tutorials, followed word for word: files are saved, commands run, outputs compared.

A Python block whose first line is a comment with a file's name is saved under that name. Lines of
shell blocks are run one after another: `python` and `sar` in this process, which has imported
everything, and their ranks in others that have; those of `torchrun` in processes of their own with
the environment that it sets. A `text` block behind `<!-- output -->` is what the last command
printed, numbers to within two units of their last digit.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from harness import WorkerPool
from harness.commands import launch_on
from harness.failures import assert_no_mistakes
from harness.nursery import Nursery
from test_docs import ROOT, blocks
from test_examples import free_ports

from sar.__main__ import main

OUTPUT = re.compile(r"<!-- output -->\n\Z")
NUMBER = re.compile(r"\d+\.\d+")
FILE = re.compile(r"# (\w+\.py)\n")


def is_output(page: str, line: int) -> bool:
    """Whether the block whose text begins at ``line`` is marked as what a command printed."""
    lines = (ROOT / page).read_text().splitlines(keepends=True)
    return bool(OUTPUT.search("".join(lines[: line - 2])))


def torchrun(words: list[str], nursery: Nursery) -> str:
    option, count, *script = words
    assert option == "--nproc-per-node"
    place = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(*free_ports(1))}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **place}
    ranks = [
        nursery.start(script, environment | {"RANK": str(rank)}, Path.cwd())
        for rank in range(int(count))
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * len(ranks), ranks[0].text("err")[-3000:]
        assert_no_mistakes("".join(rank.text("err") for rank in ranks))
        return "".join(rank.text("out") for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


def typed(command: str, nursery: Nursery) -> str:
    """What ``command`` prints; it must succeed."""
    program, *words = shlex.split(command)
    if program == "torchrun":
        return torchrun(words, nursery)
    with redirect_stdout(io.StringIO()) as printed:
        if program == "python":
            runpy.run_path(words[0], run_name="__main__")
        else:
            assert program == "sar" and main(words) == 0, command
    return printed.getvalue()


def assert_same_text(printed: str, shown: str) -> None:
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown)):
        last_digit = 0.1 ** len(other.split(".")[1])
        assert float(one) == pytest.approx(float(other), abs=2.5 * last_digit), printed


@pytest.fixture
def no_modules_left(tmp_path: Path) -> Iterator[None]:
    """What was imported from the folder of a test is not there for others."""
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_modules_left")
@pytest.mark.parametrize(
    "page", ["docs/tutorial_dgl.md", "docs/tutorial_pyg.md", "docs/tutorial_sampled.md"]
)
def test_tutorial_does_what_it_says(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nursery: Nursery,
    processes: WorkerPool,
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("train", "evaluate"):
        monkeypatch.setattr(f"sar.cli.{command}.launch", launch_on(processes))
    printed, files, outputs = "", 0, 0
    for block in blocks(page):
        named = FILE.match(block.text)
        if block.language == "python" and named:
            Path(named[1]).write_text(block.text)
            files += 1
        elif block.language == "shell" and block.runs:
            for command in block.text.splitlines():
                printed = typed(command, nursery)
        elif is_output(page, block.line):
            assert_same_text(printed, block.text)
            outputs += 1
    assert files and outputs


def test_a_script_of_pyg_changes_in_twelve_lines() -> None:
    """Comments and empty lines apart, and of the model nothing."""
    files = {found[1]: block.text for block in blocks("docs/tutorial_pyg.md")
             if (found := FILE.match(block.text))}  # fmt: skip
    plain, mine = (
        [line.partition("  #")[0] for line in files[name].splitlines()[1:]]
        for name in ("train_pyg.py", "train.py")
    )
    matched = SequenceMatcher(None, plain, mine, autojunk=False).get_matching_blocks()
    assert len(mine) - sum(block.size for block in matched) <= 12
