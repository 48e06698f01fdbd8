"""`sar partition` that is ended at any moment, again and again, and what it leaves."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.cluster import ROOT
from benchmarks.processes import children, is_alive, send

OUT = "parts"
ENDS = {
    signal.SIGTERM: (143, "sar partition: ended by SIGTERM\n"),
    signal.SIGINT: (130, "sar partition: interrupted\n"),
}
_PATIENCE = 120.0
_FASTER = 0.7
_WHILE_WRITING, _SHARE_OF_WRITING = 0.5, 0.3  # of the ends, and about of the time
_SECONDS_TO_DIE = 5.0
Files = dict[str, str]


@dataclass
class Cut:
    """One way to call it.

    Attributes:
        arguments: all but the folder to write into.
        before: a folder that is to be replaced, or ``None``: there is none.
        whole: digests of the files that an uninterrupted run writes.
        seconds: that it takes; less where it turns out to be faster.
    """

    name: str
    arguments: list[str]
    before: Path | None = None
    whole: Files = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Ending:
    """A run that was ended so often, and then went to its end.

    Attributes:
        wrong: what is not as it should be, in words.
        resumed: whether it went on from a cut that it found.
    """

    name: str
    number: signal.Signals
    ends: int
    resumed: bool
    wrong: list[str]


def write_plain(folder: Path, nodes: int, edges: int, features: int = 16) -> Path:
    """Files of edges with weights, features and labels in Parquet, and their description."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rng = np.random.default_rng(3)
    for number in range(4):
        near = rng.integers(0, nodes, edges // 4)
        far = (near + rng.geometric(20 / nodes, edges // 4)) % nodes
        weight = rng.random(edges // 4, dtype=np.float32)
        table = pa.table({"src": near, "dst": far, "weight": weight})
        pq.write_table(table, folder / f"edges-{number}.parquet")
    feat = rng.standard_normal((nodes, features), dtype=np.float32)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(feat.reshape(-1)), features)
    labels = pa.array(rng.integers(0, 5, nodes))
    pq.write_table(pa.table({"feat": rows, "label": labels}), folder / "nodes.parquet")
    return _describe(
        folder,
        f"""
name: plain
nodes:
  _N:
    count: {nodes}
    columns:
      feat: {{files: nodes.parquet, column: feat}}
      label: {{files: nodes.parquet, column: label}}
edges:
  - {{files: "edges-*.parquet", src: src, dst: dst, columns: {{weight: weight}}}}
""",
    )


def write_typed(folder: Path, papers: int) -> Path:
    """Two types of nodes with texts as ids, and two relations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rng = np.random.default_rng(4)
    names = np.array([f"doi-{number:x}" for number in range(papers)])
    feat = list(rng.standard_normal((papers, 8), dtype=np.float32))
    pq.write_table(pa.table({"id": names, "feat": feat}), folder / "papers.parquet")
    ends = rng.integers(0, papers, (2, 8 * papers))
    cites = {"citing": names[ends[0]], "cited": names[(ends[0] + ends[1] // 20) % papers]}
    pq.write_table(pa.table(cites), folder / "cites.parquet")
    writes = {"who": rng.integers(0, papers // 2, 3 * papers), "what": names[ends[0, : 3 * papers]]}
    pq.write_table(pa.table(writes), folder / "writes.parquet")
    return _describe(
        folder,
        """
name: typed
nodes:
  author: {ids: external}
  paper:
    ids: {files: papers.parquet, column: id}
    columns: {feat: {files: papers.parquet, column: feat}}
edges:
  - {type: [paper, cites, paper], files: cites.parquet, src: citing, dst: cited}
  - {type: [author, writes, paper], files: writes.parquet, src: who, dst: what}
""",
    )


def _describe(folder: Path, text: str) -> Path:
    path = folder / "graph.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def start(arguments: Sequence[str], out: Path) -> subprocess.Popen:
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:  # as of a shell's job in the background; the child would, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "sar", "partition", *arguments, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def measure(cut: Cut, folder: Path) -> None:
    """Run it without interruption; sets ``whole`` and ``seconds``."""
    out = _prepare(cut, folder)
    begin = time.monotonic()
    done = start(cut.arguments, out)
    _, errors = done.communicate(timeout=_PATIENCE)
    if done.returncode:
        raise RuntimeError(f"{cut.name}: {errors}")
    cut.seconds, cut.whole = time.monotonic() - begin, files_of(out)
    shutil.rmtree(folder)


def files_of(folder: Path) -> Files:
    """Digests of all files below."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    return found


def end_and_resume(
    cut: Cut,
    folder: Path,
    ends: int,
    number: signal.Signals,
    draw: random.Random,
) -> Ending:
    """End a run ``ends`` times at random moments, then let it finish; look at all that is there."""
    out, wrong = _prepare(cut, folder), list[str]()
    old, done = files_of(out), 0
    while done < ends:
        ended = _end(cut, out, number, draw, wrong)
        if ended is None:  # it was faster
            break
        done += ended
        if (now := files_of(out)) not in (old, cut.whole):
            wrong.append(f"{OUT} is neither whole nor as it was: {sorted(now)}")
    kept = kept_cuts(out)
    is_done = not old and files_of(out) == cut.whole
    last = start(cut.arguments, out)
    text, errors = last.communicate(timeout=_PATIENCE)
    resumed = "resumed" in text
    if is_done and last.returncode == 2 and "is not empty" in errors:
        resumed = False
    elif last.returncode or errors:
        wrong.append(f"the last run ended with {last.returncode}: {errors}")
    elif resumed != bool(kept):
        wrong.append(f"resumed is {resumed} with {len(kept)} files of cuts")
    if files_of(out) != cut.whole:
        wrong.append("other files than those of an uninterrupted run")
    if left := sorted(one for one in os.listdir(folder) if one != OUT):
        wrong.append(f"left behind: {left}")
    shutil.rmtree(folder)
    return Ending(cut.name, number, done, resumed, wrong)


def kept_cuts(out: Path) -> list[Path]:
    """The files that an interrupted run leaves, and a running one has."""
    return list(out.with_name(f"{out.name}.cut").glob("*.npz"))


def _prepare(cut: Cut, folder: Path) -> Path:
    folder.mkdir()
    if cut.before is not None:
        shutil.copytree(cut.before, folder / OUT)
    return folder / OUT


def _end(
    cut: Cut, out: Path, number: signal.Signals, draw: random.Random, wrong: list[str]
) -> bool | None:
    """Whether it was ended while it worked; ``None`` where it had finished."""
    begin = time.monotonic()
    run = start(cut.arguments, out)
    try:
        while run.poll() is None and not out.with_name(f"{OUT}.cut").is_dir():
            time.sleep(0.005)
        left = max(cut.seconds - (time.monotonic() - begin), 0.2)
        if draw.random() < _WHILE_WRITING:
            while run.poll() is None and not kept_cuts(out):
                time.sleep(0.005)
            left = cut.seconds * _SHARE_OF_WRITING
        time.sleep(draw.uniform(0.0, left))
        below = children(run.pid)
        send(run.pid, number)
        _, errors = run.communicate(timeout=_PATIENCE)
        is_done = number != signal.SIGKILL and not errors and files_of(out) == cut.whole
        if run.returncode == 0 or "is not empty" in errors or is_done:  # its interpreter was ending
            cut.seconds *= _FASTER
            return None
        last = time.monotonic() + _SECONDS_TO_DIE
        while (alive := [pid for pid in below if is_alive(pid)]) and time.monotonic() < last:
            time.sleep(0.01)
        wrong += [f"process {pid} stays behind" for pid in alive]
        if number != signal.SIGKILL:
            _look(run.returncode, errors, number, out, wrong)
        return True
    finally:
        run.kill()
        run.communicate()


def _look(status: int, errors: str, number: signal.Signals, out: Path, wrong: list[str]) -> None:
    """After a signal that leaves a run the time to tidy up."""
    if (status, errors) != ENDS[number]:
        wrong.append(f"{number.name}: status {status}, said {errors!r}")
    names = {str(path.relative_to(out.parent)) for path in out.parent.rglob("*")}
    strange = [n for n in names if not re.fullmatch(rf"{OUT}(/.+|\.cut(/\w+\.npz)?)?", n)]
    if strange:
        wrong.append(f"{number.name} leaves {strange}")
