"""Put mistakes into copies of the package, one at a time, and say which tests notice them.

From the folder of the checkout: ``python -m tests.mutants.run [--each] [NUMBER ..]``. Without
numbers all of ``mutants.toml``; 0 is the package as it is, on which every named test has to pass.
A mutant is *killed* when one of its tests fails, or the process of tests dies; *late* when neither
happens within two minutes; *skipped* where none of its tests runs here.
The end is 1 if a mutant that should be killed was not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = Path(__file__).with_name("mutants.toml")
SECONDS = 120  # of the tests of one mutant
Mutant = dict[str, Any]


def read_table() -> dict[int, Mutant]:
    mutants = tomllib.loads(TABLE.read_text())["mutant"]
    return {mutant["number"]: mutant for mutant in mutants}


def copy_checkout(folder: Path) -> None:
    """``sar`` and ``tests`` as files of their own, and links to what else the tests read."""
    for entry in ROOT.iterdir():
        if entry.name in ("sar", "tests"):
            shutil.copytree(entry, folder / entry.name)  # with machine code that numba keeps
        elif not entry.name.startswith(".") and entry.name != "build":
            (folder / entry.name).symlink_to(entry)


def apply(mutant: Mutant, folder: Path) -> str | None:
    """The file that was changed: the one of the table, or where its text has moved to.

    Any white space stands for any other, so that another indentation is found, too.
    """
    pattern = re.compile(r"\s+".join(map(re.escape, mutant["old"].split())))
    for path in [folder / mutant["file"], *sorted((folder / "sar").rglob("*.py"))]:
        text = path.read_text() if path.is_file() else ""
        if len(pattern.findall(text)) == 1:
            changed = pattern.sub(lambda _: mutant["new"].strip(), text)
            compile(changed, str(path), "exec")  # a mistake of syntax would prove nothing
            path.write_text(changed)
            return str(path.relative_to(folder))
    return None


def outcome(tests: list[str], folder: Path, options: list[str], seconds: float) -> tuple[str, str]:
    """What became of a mutant, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "late", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return "killed", failed[0]
    if done.returncode < 0:
        return "killed", f"signal {-done.returncode}"
    if done.returncode == 0:
        return "survived" if " passed" in done.stdout else "skipped", ""
    return f"pytest ended with {done.returncode}", (done.stdout + done.stderr)[-500:]


def run(mutant: Mutant, each: bool) -> list[tuple[str, str]]:
    """(what became of it, by which test) for all its tests together, or for each of them."""
    with tempfile.TemporaryDirectory(prefix="mutant") as name:
        folder = Path(name)
        copy_checkout(folder)
        if apply(mutant, folder) is None:
            return [("text not found", mutant["file"])]
        tests = [[one] for one in mutant["tests"]] if each else [mutant["tests"]]
        return [outcome(some, folder, ["-x"], SECONDS) for some in tests if some] or [
            ("survived", "no test")
        ]


def run_unchanged(mutants: list[Mutant]) -> tuple[str, str]:
    """All named tests on the package as it is."""
    tests = dict.fromkeys(one for mutant in mutants for one in mutant["tests"])
    return outcome(list(tests), ROOT, [], 60 * 60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.mutants.run")
    parser.add_argument("numbers", nargs="*", type=int, help="0: the package as it is")
    parser.add_argument("--each", action="store_true", help="each test of a mutant by itself")
    given, known, wrong = parser.parse_args(), read_table(), 0
    for number in given.numbers or known:
        if number == 0:
            found = [run_unchanged(list(known.values()))]
            wrong += found[0][0] != "survived"
        else:
            found = run(known[number], given.each)
            wrong += any(what != "killed" for what, _ in found) and bool(known[number]["tests"])
        for what, by in found:
            print(f"{number:3} {what:12} {by}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
