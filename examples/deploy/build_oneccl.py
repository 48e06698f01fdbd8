#!/usr/bin/env python3
"""Build PyTorch's binding of Intel's oneCCL for the torch of this environment.

Run it with the Python of the environment that is to have the binding:

    venv/bin/python examples/deploy/build_oneccl.py [--source DIR] [--jobs N] [--unpatched]

Intel's binding ends at torch 2.8, and no package index has it. Its last sources still compile for
later torch. oneCCL itself, its headers, libfabric and Intel MPI's run time come from the package
index; Intel's Simplified Software License is theirs. Two lines of the build files change: the
binding calls no MPI, and ``--jobs`` bounds make. Unless ``--unpatched``, so do the binding's waits,
which otherwise block a process for ever when a rank dies.

Run again, it does nothing where what is there was built from the same for the same torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = "https://github.com/intel/torch-ccl"
COMMIT = "1fc0c383a8665a83f274e2c863e6d1d323b02856"
ONECCL = ("oneccl-cpu-devel==2021.15.2", "oneccl-cpu==2021.15.2", "impi-rt==2021.15.0")
PACKAGE = "oneccl_bindings_for_pytorch"
TRIED, LEAST = "2.13", (2, 8)  # torch
NOTE = "built.json"  # in the package: from what it was built

# Per file: how often a text occurs there, the text, and what stands there instead.
Edits = dict[str, list[tuple[int, str, str]]]

BUILD: Edits = {
    "CMakeLists.txt": [
        (1, "    find_package(MPI REQUIRED)\n", ""),
        (1, "    list(APPEND DEPENDS_LIB ${MPI_LIBRARIES})\n", ""),
    ],
    "setup.py": [(1, "str(os.cpu_count())", 'os.environ["MAX_JOBS"]')],
}

# Waits that ask instead of blocking, under the lock of the whole process, and end at their limit.
WAITS: Edits = {
    "src/ProcessGroupCCL.hpp": [
        (
            1,
            "    virtual void run() = 0;\n",
            "    virtual void run() = 0;\n\n    virtual bool isLate() const { return false; }\n",
        )
    ],
    "src/utils.h": [
        (
            2,
            "            req.wait();\n            flag = true;\n",
            "            flag = req.test();\n",
        ),
        (
            2,
            "  void checkAndThrowException() {\n",
            "  bool isLate() const override { return timedOut(opTimeout_); }\n\n"
            "  void checkAndThrowException() {\n",
        ),
    ],
    "src/cpu/cpu_ccl.cpp": [
        (
            1,
            "#include <condition_variable>\n",
            "#include <algorithm>\n#include <condition_variable>\n",
        ),
        (
            1,
            """    auto work = std::move(queue_.front());

    queue_.pop_front();

    lock.unlock();
    queueConsumeCV_.notify_one();

    try {
      work->synchronize();
      work->finishAsyncWorkCCL();

    } catch (...) {
      work->finishAsyncWorkCCLError(std::current_exception());
    }

    lock.lock();
""",
            """    inFlight.insert(inFlight.end(), queue_.begin(), queue_.end());
    queue_.clear();
    lock.unlock();
    queueConsumeCV_.notify_one();

    auto rest = std::remove_if(inFlight.begin(), inFlight.end(), hasEnded);
    bool isIdle = rest == inFlight.end();
    inFlight.erase(rest, inFlight.end());
    if (isIdle) {
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }

    lock.lock();
""",
        ),
        (
            1,
            """  std::unique_lock<std::mutex> lock(pgMutex_);
  while (!stop_) {
    if (queue_.empty()) {
""",
            """  using Pending = c10::intrusive_ptr<ProcessGroupCCL::AsyncWorkCCL>;
  auto hasEnded = [](const Pending& work) {
    try {
      if (!work->isCompleted()) {
        TORCH_CHECK(!work->isLate(), work->debugName, ": did not end within its timeout");
        return false;
      }
      if (!work->exception()) {
        work->finishAsyncWorkCCL();
      }
    } catch (...) {
      work->finishAsyncWorkCCLError(std::current_exception());
    }
    return true;
  };
  std::vector<Pending> inFlight;
  std::unique_lock<std::mutex> lock(pgMutex_);
  while (!stop_) {
    if (queue_.empty() && inFlight.empty()) {
""",
        ),
    ],
}

# What every rank of two runs at the end: a sum, and rows of which one rank gets more.
CHECK = f"""
import sys, torch, torch.distributed as dist, {PACKAGE}
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("ccl", store=store, rank=rank, world_size=2)
one, rows, counts = torch.ones(3), torch.empty(2 + rank), [1, 1 + rank]
dist.all_reduce(one)
dist.all_to_all_single(rows, torch.arange(5.0)[: 2 + rank], [1, 1 + rank], counts)
assert one.tolist() == [2.0] * 3 and len(rows) == 2 + rank, (one, rows)
dist.destroy_process_group()
"""


class Refusal(Exception):
    """Why nothing can be built, in a line."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        build(options)
    except Refusal as error:
        sys.exit(f"build_oneccl: {error}")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="a copy of the sources; default: clone them"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--unpatched", action="store_true", help="leave the waits as they are")
    parser.add_argument("--again", action="store_true", help="build also what is there already")
    return parser.parse_args(arguments)


def build(options: argparse.Namespace) -> None:
    torch_version = check_environment(options)
    target = Path(sysconfig.get_path("platlib"), PACKAGE)
    made_of = {"commit": COMMIT, "torch": torch_version, "patched": not options.unpatched}
    note = target / NOTE
    if not options.again and note.is_file() and json.loads(note.read_text()) == made_of:
        print(f"{target}: there already, for torch {torch_version}; --again builds it anew")
        return
    with tempfile.TemporaryDirectory(prefix="oneccl-") as folder:
        source = Path(folder, "torch-ccl")
        take_sources(options.source, source)
        for edits in (BUILD,) if options.unpatched else (BUILD, WAITS):
            edit(source, edits)
        run([sys.executable, "-m", "pip", "install", *ONECCL], "oneCCL cannot be installed")
        compile_in(source, options.jobs)
        (source / PACKAGE / NOTE).write_text(json.dumps(made_of) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            source / PACKAGE, target, ignore=shutil.ignore_patterns("csrc", "__pycache__")
        )
    check(target)
    print(f"{target}: built for torch {torch_version}; use it as backend='ccl'")


def check_environment(options: argparse.Namespace) -> str:
    """The installed torch's version; raises :class:`Refusal` where the build would fail."""
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        raise Refusal(f"got {system}, expected Linux x86_64, which oneCCL's wheels are for")
    if options.jobs < 1:
        raise Refusal(f"--jobs: got {options.jobs}, expected at least 1")
    needed = ["cmake", "make", "c++"] + ([] if options.source else ["git"])
    missing = [tool for tool in needed if shutil.which(tool) is None]
    if missing:
        raise Refusal(
            f"{', '.join(missing)}: not found; on Debian, apt-get install git cmake make g++"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise Refusal(f"{header}: not found; install this Python's headers (python3-dev)")
    try:
        import setuptools  # noqa: F401
        import torch
    except ImportError as error:
        raise Refusal(
            f"{sys.executable}: {error}; install torch, numpy and setuptools into the environment "
            "first, or run this script with the environment's own Python"
        ) from error
    version = str(torch.__version__)
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise Refusal(f"torch: got {version}, expected a build for CPUs alone ({TRIED}.x+cpu)")
    numbers = tuple(int(one) for one in version.split("+")[0].split(".")[:2])
    if numbers < LEAST:
        raise Refusal(f"torch: got {version}, expected 2.8 or later; {TRIED} was tried")
    if not version.startswith(f"{TRIED}."):
        print(f"torch: got {version}; only {TRIED} was tried", file=sys.stderr)
    return version


def take_sources(given: Path | None, into: Path) -> None:
    if given is None:
        clone = ["git", "clone", "--quiet", REPOSITORY, str(into)]
        run(clone, f"{REPOSITORY}: cannot be cloned; --source takes a copy")
        checkout = ["git", "-C", str(into), "checkout", "--quiet", COMMIT]
        run(checkout, f"{REPOSITORY}: has no commit {COMMIT}")
        return
    if not (given / "src" / "cpu" / "cpu_ccl.cpp").is_file():
        raise Refusal(f"--source: got {str(given)!r}, expected a checkout of {REPOSITORY}")
    shutil.copytree(given, into, ignore=shutil.ignore_patterns(".git", "build", "*.so"))


def edit(source: Path, edits: Edits) -> None:
    for name, changes in edits.items():
        text = (source / name).read_text()
        for times, old, new in changes:
            if text.count(old) != times:
                raise Refusal(
                    f"{name}: got {text.count(old)} times {old.strip().splitlines()[0]!r}, "
                    f"expected {times}: the sources are not those of commit {COMMIT[:7]}"
                )
            text = text.replace(old, new)
        (source / name).write_text(text)


def compile_in(source: Path, jobs: int) -> None:
    environment = {
        **os.environ,
        "CCL_ROOT": sys.prefix,
        "USE_SYSTEM_ONECCL": "ON",
        "MAX_JOBS": str(jobs),
    }
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    run(command, "the binding does not compile", cwd=source, env=environment)


def check(target: Path) -> None:
    """Run :data:`CHECK` on two ranks. Raises :class:`Refusal` when one fails, or waits too long."""
    environment = {**os.environ, "CCL_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="oneccl-") as folder:
        command = [sys.executable, "-c", CHECK]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], env=environment)
            for rank in range(2)
        ]
        try:
            if any(rank.wait(120) for rank in ranks):
                raise Refusal(f"{target}: was built, but two ranks cannot use it; see above")
        except subprocess.TimeoutExpired as error:
            raise Refusal(f"{target}: was built, but two ranks wait for each other") from error
        finally:
            for rank in ranks:
                rank.kill()


def run(command: Sequence[str], otherwise: str, **options: object) -> None:
    if subprocess.run(command, check=False, **options).returncode:  # type: ignore[call-overload]
        raise Refusal(f"{otherwise}; see above")


if __name__ == "__main__":
    main()
