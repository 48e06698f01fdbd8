"""The jobs of `tests/jobs`: the scripts that users of other libraries start from, in the words of
`docs/migrating.md`, on partitions of those libraries and on processes of their own."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_files import write_glt, write_pyg
from harness.graphs import ETYPE_HOMO, GraphArrays
from harness.nursery import Nursery
from test_examples import ENVIRONMENT, run_two_ranks
from torch import Tensor

import sar
from sar.partition.sources.generate import bibliography_graph, community_graph

JOBS = Path(__file__).parent / "jobs"
CLASSES, FEATURES = 4, 20
# What a job tells at its end, and what is far better than chance.
BOUNDS = {"accuracy": (0.6, 1.0), "auc": (0.7, 1.0), "rmse": (0.0, 0.8)}
MARK = "SAR_TEST_JOB"


def halves(count: int) -> np.ndarray:
    """The part of each node: the second has a third, so that its seeds are used up first."""
    return (np.random.default_rng(0).random(count) < 0.35).astype(np.int64)


def with_edge_rows(graph: GraphArrays) -> GraphArrays:
    """Columns that both libraries write."""
    counts = {etype: len(src) for etype, (src, _) in graph.edges.items()}
    rows = {e: {"weight": torch.ones(n), "type": torch.arange(n) % 3} for e, n in counts.items()}
    return replace(graph, edge_data=rows)


def products() -> GraphArrays:
    graph = community_graph(400, 4000, classes=CLASSES, features=FEATURES, homophily=0.9)
    return with_edge_rows(graph)


def mag() -> GraphArrays:
    """Papers, authors and terms, all with features; those of papers tell."""
    graph = bibliography_graph(160, classes=CLASSES, signal=0.5)
    for ntype, count in graph.num_nodes.items():
        rows = torch.randn(count, 16, generator=torch.Generator().manual_seed(count))
        graph.node_data[ntype] = {"feat": rows} | graph.node_data[ntype]
    return with_edge_rows(graph)


def movies() -> GraphArrays:
    """Users rate movies; only movies have features."""
    rng = torch.Generator().manual_seed(0)
    user, movie = torch.randint(60, (2, 900), generator=rng)
    data = {"movie": {"feat": torch.eye(8)[torch.arange(60) % 8]}, "user": {}}
    edges = {("movie", "rated_by", "user"): (movie, user)}
    edges |= {("user", "rates", "movie"): (user, movie)}
    return with_edge_rows(GraphArrays("movies", {"movie": 60, "user": 60}, edges, data))


def save_seeds(graph: GraphArrays, ntype: str, parts: np.ndarray, folder: Path) -> None:
    """Original ids of each part's seeds, and the labels of all nodes."""
    first, columns = graph.node_offsets()[ntype], graph.node_data[ntype]
    owner = torch.from_numpy(parts)[first : first + graph.num_nodes[ntype]]
    torch.save(columns["label"], folder / "label.pt")
    for name in ("train", "val", "test"):
        for part in range(2):
            ids = (columns[f"{name}_mask"] & (owner == part)).nonzero().view(-1)
            torch.save(ids, folder / f"{name}_idx{part}.pt")


def save_edges(pairs: Tensor, folder: Path, *more: Tensor) -> None:
    """Pairs of original ids for each part, some of them to test with, and columns beside them."""
    test = torch.arange(pairs.shape[1]) % 5 == 0
    for name, chosen in (("train", ~test), ("test", test)):
        ids = chosen.nonzero().view(-1)
        for part, mine in enumerate(ids.split([len(ids) * 2 // 3, len(ids) - len(ids) * 2 // 3])):
            kept = [pairs[:, mine], *(column[mine] for column in more)]
            torch.save(kept if more else kept[0], folder / f"{name}_edges{part}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partitions of PyG, GraphLearn and DGL, and what their scripts keep beside them."""
    folder = tmp_path_factory.mktemp("jobs")
    graph = products()
    parts = halves(400)
    for name, write in (("pyg", write_pyg), ("glt", write_glt)):
        write(graph, parts, 2, folder / f"{name}_products" / "partitions")
        save_seeds(graph, "_N", parts, folder / f"{name}_products")
    glt = folder / "glt_products"
    names = ("label", "train_mask", "test_mask")
    columns = {name: graph.node_data["_N"][name].numpy() for name in names}
    np.savez(glt / "partitions" / "node_data.npz", **columns)
    save_edges(torch.stack(graph.edges[ETYPE_HOMO])[:, ::4], glt)
    sar.partition_graph(graph, folder / "dgl", 2, method="random", name="dgl")

    graph = mag()
    parts = halves(graph.total_nodes)
    write_pyg(graph, parts, 2, folder / "pyg_mag" / "partitions")
    write_glt(graph, parts, 2, folder / "glt_igbh" / "partitions", "dst")
    for name in ("pyg_mag", "glt_igbh"):
        save_seeds(graph, "paper", parts, folder / name)

    graph = movies()
    write_pyg(graph, halves(120), 2, folder / "pyg_movielens" / "partitions", "edges")
    user, movie = pairs = torch.stack(graph.edges["user", "rates", "movie"])
    ratings = 1 + 2 * (user % 8 > 3) + 2 * (movie % 8 > 3)
    save_edges(pairs, folder / "pyg_movielens", ratings, torch.arange(900) * 5 % 13)
    return folder


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that a job has started, at any remove, and no shared memory outlives it."""
    mark, shared = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    monkeypatch.setitem(ENVIRONMENT, MARK, mark)
    yield
    end, left = time.monotonic() + 3, ["unknown"]
    while left and time.monotonic() < end:
        left = [*marked(f"{MARK}={mark}".encode()), *(set(os.listdir("/dev/shm")) - shared)]
        time.sleep(0.05 if left else 0)
    assert not left


def marked(mark: bytes) -> list[str]:
    """Command lines of the processes that have it in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:  # ended meanwhile, or of another user
            continue
    return found


def check(output: str, count: int) -> None:
    """Each job's loss has fallen, and what it tells at its end is far better than chance."""
    sections = output.split("== ")[1:]
    assert len(sections) == count, output
    for section in sections:
        losses = [float(value) for value in re.findall(r"loss (\S+)", section)]
        assert len(losses) > 3 and losses[-1] < 0.9 * losses[0], section
        ((name, value),) = re.findall(r"^(accuracy|auc|rmse) (\S+)$", section, re.MULTILINE)
        least, most = BOUNDS[name]
        assert least <= float(value) <= most, section


def job(name: str) -> str:
    return str(JOBS / name)


LOCAL = [
    "nodes.py --job=pyg",
    "nodes.py --job=mag",
    "nodes.py --job=glt",
    "nodes.py --job=igbh",
    "links.py --job=pyg",
    "links.py --job=glt",
    "sar_sampling.py",
]
SERVED = "nodes.py --job=client"


@pytest.mark.system
def test_jobs_on_two_ranks(root: Path, tmp_path: Path, nursery: Nursery) -> None:
    check(run_two_ranks(nursery, [job(one) for one in LOCAL], root, tmp_path), len(LOCAL))


@pytest.mark.system
def test_two_servers_and_two_clients(root: Path, tmp_path: Path, nursery: Nursery) -> None:
    parts = root / "glt_products" / "partitions"
    words = ["-m", "sar", "sample-server", str(parts), "--trainers", "2"]
    server = nursery.start(words, ENVIRONMENT)
    try:
        address = server.line(60).strip().rpartition(" at ")[2]
        given = f"--address={address} --features={FEATURES} --classes={CLASSES}"
        check(run_two_ranks(nursery, [f"{job(SERVED)} {given}"], root, tmp_path), 1)
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_every_job_is_run() -> None:
    assert {one.name for one in JOBS.glob("*.py")} == {one.split()[0] for one in [*LOCAL, SERVED]}
