"""What is handed out: the archives, an installation of the wheel alone, completion of words."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import sar
from sar.__main__ import read_words

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCES = (".*", "build", "dist", "site", "shared", "*.egg-info", "__pycache__")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])('..')"
EXTRAS = {"plot", "loggers", "data", "tbb", "pyg", "completion", "test", "docs", "lint"}


def run(*words: object, cwd: Path, **more: str) -> str:
    """What a command writes; nothing of the checkout is on its path."""
    keep = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env={**keep, **more}, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of a copy of the checkout, and the wheel that is built of that archive."""
    folder = tmp_path_factory.mktemp("archives")
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    run(sys.executable, "-c", BUILD, "build_sdist", cwd=folder / "copy")
    name = f"sar_gnn-{sar.__version__}"
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-c", BUILD, "build_wheel", cwd=folder / name)
    return folder / name, folder / f"{name}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a fresh environment with the wheel, which borrows what the package needs."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    needed = [path for path in sys.path if path.endswith("site-packages")]
    (home / "lib" / version / "site-packages" / "needed.pth").write_text("\n".join(needed))
    python = home / "bin" / "python"
    words = ["--no-deps", "--no-index", "--quiet", archives[1]]
    run(sys.executable, "-m", "pip", "--python", python, "install", *words, cwd=home)
    return home / "bin"


def files(folder: Path) -> Iterator[str]:
    """Names of the files below a folder that are not made by Python."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix()


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.mark.system
def test_the_wheel_holds_the_library_and_its_measurements_alone(
    archives: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(archives[1]) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"sar/{name}" for name in files(ROOT / "sar")}
    expected |= {f"sar/_bench/benchmarks/{name}" for name in files(ROOT / "benchmarks")}
    assert sorted(found ^ expected) == [] and "sar/py.typed" in found


@pytest.mark.system
def test_the_source_archive_holds_what_the_suite_needs(archives: tuple[Path, Path]) -> None:
    held = set(files(archives[0]))
    for folder in ("benchmarks", "docs", "examples", "sar", "tests"):
        assert {f"{folder}/{name}" for name in files(ROOT / folder)} <= held
    assert {"Makefile", "constraints.txt", "requirements.txt", "LICENSE", "README.md"} <= held


@pytest.mark.system
def test_what_a_registry_is_told(archives: tuple[Path, Path]) -> None:
    told = metadata(archives[1])
    assert (told["Name"], told["Version"]) == ("sar-gnn", sar.__version__)
    assert set(told.get_all("Provides-Extra", [])) == EXTRAS
    needs = told.get_all("Requires-Dist", [])
    assert "torch>=2.11" in needs and 'dgl==1.1.3; python_version < "3.12"' in needs
    assert all(">=" in need or "==" in need for need in needs)


@pytest.mark.system
def test_the_wheel_works_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    """Both names of the command; ranks start from the installed package."""
    assert run(installed / "sar", "--version", cwd=tmp_path) == f"sar {sar.__version__}\n"
    assert run(installed / "sar-gnn", "--help", cwd=tmp_path).startswith("usage: sar-gnn COMMAND")
    parts = sar.partition_graph("synthetic:nodes=100,edges=400", tmp_path / "parts", 2)
    words = [parts, "--layers", 1, "--epochs", 2, "--json", "out.json"]
    run(installed / "sar", "train", *words, cwd=tmp_path)
    assert len(json.loads((tmp_path / "out.json").read_text())["epochs"]) == 2


# ---------------------------------------------------------------- images and jobs

DEPLOY = ROOT / "examples" / "deploy"
# Stand-ins for what a cluster has: two hosts, a task on each.
CLUSTER = {
    "scontrol": "printf 'host%s\\n' 4 5",
    "srun": 'shift 2; for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 "$@"; done',
    "sar": """case $1 in
        environment) echo export FROM_SAR=yes;;
        *) at=$MASTER_ADDR:$MASTER_PORT
           echo $RANK $WORLD_SIZE $LOCAL_RANK $at $OMP_NUM_THREADS $FROM_SAR $*
    esac""",
}


def test_a_slurm_job_gives_each_task_its_rank(tmp_path: Path) -> None:
    for name, text in CLUSTER.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"NTASKS": "2", "CPUS_PER_TASK": "3", "JOB_ID": "1234567", "JOB_NODELIST": "host[4-5]"}
    more = {f"SLURM_{name}": value for name, value in job.items()}
    more["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    out = run("bash", DEPLOY / "train.slurm", "a b.json", "--heads", "4", cwd=tmp_path, **more)
    expected = "2 0 host4:24567 3 yes train a b.json --heads 4"
    assert out.splitlines() == [f"0 {expected}", f"1 {expected}"]


def test_what_the_image_is_made_of_is_there() -> None:
    """The files that are copied from the checkout, the options of the run that tries the image."""
    lines = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines()]
    copied = [words[1] for words in lines if words[:1] == ["COPY"] and "--from" not in words[1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    tried = [words[2:] for words in lines if words[:2] == ["RUN", "sar"]]
    assert [read_words(words).nproc for words in tried] == [2]


# ---------------------------------------------------------------- completion of words

# Runs the script's function as bash would on a press of the tab key.
TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_sar
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture) -> str:
    """What `sar --print-completion` writes."""
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as stop:
        read_words(["--print-completion", shell])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_words_are_completed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "sar.bash"
    source.write_text(script("bash", capsys))
    (tmp_path / "parts.json").touch()
    for typed, expected in {
        "tra": "train",
        "train --check": "--checkpoint --checkpoint-every --checkpoint-steps",
        "train --model s": "sage",
        "train par": "parts.json",
        "inspect par": "parts.json",
        "evaluate parts.json --checkpoint par": "parts.json",
        "train parts.json --epochs par": "",
        "--print-completion z": "zsh",
    }.items():
        out = run("bash", "-c", TAB, "bash", source, "sar", *typed.split(), cwd=tmp_path)
        assert " ".join(sorted(out.split())) == expected, typed


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture) -> None:
    text = script(shell, capsys)
    assert "sample-server" in text and "memory-budget" in text


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stop:
        read_words(["--print-completion", "bash"])
    assert stop.value.code == 2
    assert "pip install 'sar-gnn[completion]'" in capsys.readouterr().err
