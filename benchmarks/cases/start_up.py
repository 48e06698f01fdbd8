"""How long ranks need until they have met, over what one process needs to import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.cluster import ROOT
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks import ready

RANKS = 4
AT_MOST = {"seconds": 1.6, "processor s": 2.0}
IMPORTS = (
    "import sar.cli.train, scipy.sparse.csgraph, sar._private; sar._private.prepare_optimizers()"
)
GRAPH = "synthetic:nodes=6400,edges=60000,classes=3,features=8"
TRAIN = ["--model", "sage", "--hidden", "16", "--epochs", "1", "--no-progress"]


@benchmark("start-up", "limits")
def start_up(options: Options) -> Report:
    """Seconds and processor seconds until 4 ranks of this machine have met, and of a `sar train`
    of one epoch, over the imports of one process."""
    table = Table(f"Medians of {options.repeats} turns", ["", "checkout", *AT_MOST])
    checkouts = {"this": ROOT} | ({"before": options.before} if options.before else {})
    with tempfile.TemporaryDirectory() as folder:
        words = ["partition", GRAPH, "--parts", RANKS, "--out", f"{folder}/parts", "--name", "one"]
        _run(ROOT, "-m", "sar", *words)
        ways = {
            "imports of one process": ["-c", IMPORTS],
            f"{RANKS} ranks have met, sar.launch": [ready.__file__, RANKS],
            f"sar train, {RANKS} ranks": ["-m", "sar", "train", f"{folder}/parts/one.json", *TRAIN],
        }
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(options.repeats):
            for way, line in ways.items():
                for name, checkout in checkouts.items():
                    found.setdefault((way, name), []).append(_run(checkout, *line))
    medians = {key: [median(each) for each in zip(*runs)] for key, runs in found.items()}
    table.rows += [[way, name, *values] for (way, name), values in medians.items()]
    report, one, met = Report(tables=[table]), *list(ways)[:2]
    for at, (unit, most) in enumerate(AT_MOST.items()):
        ratio = medians[met, "this"][at] / medians[one, "this"][at]
        report.figures.append(Figure(f"{met}: {unit} / {one}", ratio, at_most=most))
    return report


def _run(checkout: Path, *words: object) -> tuple[float, float]:
    """Seconds, up to the time that it prints if it is one, and processor seconds with all that it
    started."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryDirectory() as folder:
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], stdout=out, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(checkout)}, cwd=folder,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
        ended = time.time()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        out.seek(0)
        text = out.read().decode().strip()
    told = float(text) if text.replace(".", "").isdigit() else ended
    return told - began, used.ru_utime + used.ru_stime
