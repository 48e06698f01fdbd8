"""Inputs in tables that are wrong or damaged: errors that say where, and never anything else."""

from __future__ import annotations

import pickle
import re
import resource
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from harness.graphs import GraphArrays
from table_files import DST, FEAT, NODES, SPARSE, SRC, TEXTS, WEIGHT, chunks, describe, save

from sar import SarError
from sar.partition.sources.open import open_input, open_source
from sar.partition.unpickle import read_pickles, read_saved


def read(path: Path, scratch: Path, **options: bool) -> GraphArrays:
    return open_input(str(path), scratch, **options).graph


def one_type(folder: Path, **column: object) -> dict:
    """A description of papers whose only column is as given."""
    np.save(folder / "e.npy", np.stack([SRC, DST]))
    nodes = {"_N": {"count": NODES, "columns": {"feat": column}}}
    return {"nodes": nodes, "edges": [{"files": "e.npy"}]}


def changed(value: np.ndarray, row: int, to: object) -> np.ndarray:
    value = value.copy()
    value[row] = to
    return value


@pytest.mark.parametrize("suffix", ["parquet", "csv", "tsv.gz"])
@pytest.mark.parametrize(
    ("column", "row", "to", "message"),
    [
        ("src", 60, NODES, f"row 20, column 'src': is {NODES}, expected 0 or more and below 20"),
        ("dst", 3, -1, "row 3, column 'dst': is -1, expected 0 or more"),
        ("w", 50, np.nan, "row 10, column 'weight': is nan"),
        ("w", 50, -np.inf, "row 10, column 'weight': is -inf"),
    ],
)  # fmt: skip
def test_bad_values_are_named(
    suffix: str, column: str, row: int, to: object, message: str, tmp_path: Path
) -> None:
    """Of the second of two files, from row 40 on."""
    table = {"src": SRC, "dst": DST, "w": WEIGHT}
    table[column] = changed(table[column], row, to)
    for number, rows in enumerate((slice(0, 40), slice(40, None))):
        save(tmp_path / f"e{number}.{suffix}", {name: one[rows] for name, one in table.items()})
    content = {
        "nodes": {"_N": {"count": NODES}},
        "edges": [
            {"files": f"e*.{suffix}", "src": "src", "dst": "dst", "columns": {"weight": "w"}}
        ],
    }
    path = f"e{row // 40}.{suffix}"
    with pytest.raises(ValueError, match=re.escape(path) + f": {message}"):
        read(describe(tmp_path, content), tmp_path / "s")
    if column == "w":
        read(describe(tmp_path, content), tmp_path / "s", allow_nan=True)


def test_ids_that_do_not_fit(tmp_path: Path) -> None:
    def with_ids(ids: np.ndarray, src: np.ndarray) -> None:
        save(tmp_path / "n.parquet", {"id": ids})
        save(tmp_path / "e.csv", {"src": src, "dst": src})
        nodes = {"p": {"ids": {"files": "n.parquet", "column": "id"}}}
        content = {"nodes": nodes, "edges": [{"type": ["p", "to", "p"], "files": "e.csv"}]}
        read(describe(tmp_path, content), tmp_path / "s")

    for ids, other in ((SPARSE, 17), (TEXTS, "other")):
        with_ids(ids, ids)
        with pytest.raises(
            ValueError, match=r"n\.parquet: row 9, column 'id': id .* twice.*node 4"
        ):
            with_ids(changed(ids, 9, ids[4]), ids)
        with pytest.raises(ValueError, match=rf"e\.csv: row 6, column 'src': is '?{other}"):
            with_ids(ids, changed(ids, 6, other))
    with pytest.raises(
        ValueError, match=r"e\.csv: row 0, column 'src': holds texts, but .* integers"
    ):
        with_ids(SPARSE, TEXTS)


def test_sparse_ids_without_a_word(tmp_path: Path) -> None:
    path = save(tmp_path / "e.csv", {"src": abs(SPARSE), "dst": abs(SPARSE)})
    with pytest.raises(ValueError, match="ids: external"):
        read(path, tmp_path / "s")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_missing_values(suffix: str, tmp_path: Path) -> None:
    """Also of ids; a text that is empty is missing, too."""
    for column, message in (("src", "row 5, column 'src'"), ("w", "row 5, column 'w'")):
        table = {"src": list(SRC), "dst": list(DST), "w": list(WEIGHT)}
        table[column][5] = None
        if suffix == "csv":
            table[column][5] = ""
        path = save(tmp_path / f"e.{suffix}", table)
        with pytest.raises(ValueError, match=rf"{message}: the value is missing"):
            read(path, tmp_path / "s")


def test_columns_that_do_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", FEAT[:-1])
    np.save(tmp_path / "inf.npy", changed(FEAT, 4, np.inf))
    np.save(tmp_path / "f1.npy", FEAT[:9])
    np.save(tmp_path / "f2.npy", FEAT[9:].astype(np.float64))
    save(tmp_path / "1.parquet", {"f": np.arange(9, dtype=np.int32)})
    save(tmp_path / "2.parquet", {"f": np.arange(NODES - 9)})
    rows = FEAT.tolist()
    rows[8] = rows[8][:2]
    pq.write_table(pa.table({"f": rows}), tmp_path / "lists.parquet")
    for column, message in (
        ({"files": "short.npy"}, rf"short\.npy: column 'feat' has 19 rows, expected {NODES}"),
        ({"files": "inf.npy"}, r"inf\.npy: row 4, column 'feat': is inf"),
        ({"files": "f?.npy"}, r"f2\.npy: row 0, .*float64 \[3\], expected float32 \[3\]"),
        ({"files": "?.parquet", "column": "f"}, r"2\.parquet: row 0, .*int64 \[\], expected int32"),
        (
            {"files": "lists.parquet", "column": "f"},
            "row 8, column 'f': holds 2 numbers, expected 3",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            read(describe(tmp_path, one_type(tmp_path, **column)), tmp_path / "s")
    content = one_type(tmp_path, files="f?.npy", dtype="float64")
    read(describe(tmp_path, content), tmp_path / "s")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"edges": [{"files": "nothing-*.csv"}]}, FileNotFoundError, "nothing-.*no file matches"),
        ({"edge": []}, ValueError, "key 'edge' is unknown, did you mean 'edges'"),
        ({"edges": [{"file": "e.npy"}]}, ValueError, r"edges\[0\]: key 'file' .* mean 'files'"),
        ({"edges": []}, ValueError, "edges: is .*expected a list"),
        ({"edges": [{"files": "e.npy"}] * 2}, ValueError, "is there twice"),
        ({"edges": [{"files": "e.npy", "src": 0}]}, ValueError, "'src' and 'dst'"),
        ({"edges": [{"files": "e.npy", "src": 0, "dst": 2}]}, ValueError, "no column number 2"),
        ({"edges": [{"files": "n.csv", "src": "f", "dst": "idd"}]}, ValueError,
         "no column 'idd', did you mean 'id'.*it has 'id', 'f'"),
        ({"edges": [{"files": "e.npy", "type": ["a", "b"]}]}, ValueError, r"edges\[0\]\.type"),
        ({"edges": [{"files": "e.npy", "type": ["a", "b", "c"]}]}, ValueError, "'a' is unknown"),
        ({"edges": [{"files": "e.dat"}]}, ValueError, "of no known kind"),
        ({"edges": [{"files": "n.csv", "src": 0, "dst": 1}]}, ValueError, "names columns; name"),
        ({"nodes": {"_N": {"count": -1}}}, ValueError, r"nodes\._N\.count"),
        ({"nodes": {"_N": {"count": 1, "ids": "external"}}}, ValueError, "'count' and 'ids'"),
        ({"nodes": {"_N": {"columns": {"f": {"files": "e.npy"}}}}}, ValueError, "need 'count'"),
        ({"nodes": {"_N": {"count": 9, "columns": {"f": {"files": "n.csv"}}}}}, ValueError,
         "a 'column'"),
        ({"nodes": {"_N": {"count": 9, "columns": {"f": {"files": "e.npy", "dtype": "flot32"}}}}},
         ValueError, "did you mean 'float32'"),
        ({"nodes": {"_N": {"count": NODES, "columns": {"orig_id": {"files": "i.npy"}}}}},
         ValueError, "cannot have a column 'orig_id'"),
        ({"edges": [{"files": "i.npy"}]}, ValueError, "no column number 1"),
        ({"edges": [{"files": "e.npy", "columns": {"a/b": {"files": "w.npy"}}}]}, ValueError,
         "cannot have a column 'a/b'"),
        ({"name": "a/b"}, ValueError, "name: is 'a/b'"),
    ],
)  # fmt: skip
def test_bad_descriptions(
    change: dict, error: type[Exception], message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "e.npy", np.stack([SRC, DST]))
    np.save(tmp_path / "i.npy", np.arange(NODES))
    np.save(tmp_path / "w.npy", WEIGHT)
    (tmp_path / "e.dat").write_text("")
    save(tmp_path / "n.csv", {"id": np.arange(NODES), "f": FEAT[:, 0]})
    content = {"nodes": {"_N": {"count": NODES}}, "edges": [{"files": "e.npy"}]} | change
    with pytest.raises(error, match=message):
        read(describe(tmp_path, content), tmp_path / "s")


def test_keys_that_are_there_twice(tmp_path: Path) -> None:
    for name, text in (("g.yaml", "name: a\nname: b"), ("g.json", '{"name": 1, "name": 2}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="key 'name' is there twice"):
            read(tmp_path / name, tmp_path / "s")
    bomb = ["a0: &a0 [x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)
    ]
    (tmp_path / "g.yaml").write_text("\n".join([*bomb, "edges: *a29"]))
    with pytest.raises(ValueError, match="key 'a0' is unknown"):
        read(tmp_path / "g.yaml", tmp_path / "s")
    (tmp_path / "g.yaml").write_text("name: &b [[x, x], [x, x]]\nedges: [*b]")
    with pytest.raises(ValueError, match=r"edges\[0\]: is "):
        read(tmp_path / "g.yaml", tmp_path / "s")


def test_descriptions_that_are_none(tmp_path: Path) -> None:
    for text in ("a: [", "- 1", "", "!!python/object/apply:os.getcwd []", "\x00"):
        (tmp_path / "g.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"g\.yaml"):
            read(tmp_path / "g.yaml", tmp_path / "s")


def test_full_disk(tmp_path: Path) -> None:
    """Is an error of the system that names the file that could not be written."""
    np.save(tmp_path / "e.npy", np.zeros((2, 100_000), np.int64))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        with pytest.raises(OSError, match="end-0: could not be written"):
            read(tmp_path / "e.npy", tmp_path / "s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def damaged(content: bytes, count: int) -> list[bytes]:
    """Cut short, and with bytes or a number changed."""
    rng = np.random.default_rng(len(content))
    found = [content[: int(rng.integers(len(content)))] for _ in range(count)]
    for kind in range(2 * count):
        changed = bytearray(content)
        if kind < count:
            for at in rng.integers(0, len(content), int(rng.integers(1, 4))):
                changed[at] ^= int(rng.integers(1, 256))
        else:
            at = int(rng.integers(max(1, len(content) - 8)))
            changed[at : at + 8] = rng.bytes(8)
        found.append(bytes(changed))
    return found


def read_anything(path: Path, reader: Callable[[], object]) -> bool:
    """Whether it could not be read; then the error is one of ours, and names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader()
    except (ValueError, FileNotFoundError, SarError) as error:
        is_other = isinstance(error, FileNotFoundError)  # one that the file names
        assert str(path.parent if is_other else path.name.split(".")[0]) in str(error), error
        return True
    return False


def all_values(path: Path) -> None:
    found = read_saved(str(path))
    if isinstance(found, dict) and hasattr(found.get("row"), "read"):
        found["row"].read()


PAIRS, EDGES = torch.from_numpy(np.stack([SRC, DST])), {"src": SRC, "dst": DST, "w": WEIGHT}
SAVED = {"row": torch.arange(6), "feats": {"x": torch.ones(3, 2)}, ("a", "b", "c"): (1, "z")}
ARRAYS = {"num_nodes": NODES, "src": SRC, "dst": DST, "feat": FEAT, "label": np.arange(NODES) % 3}
# How a file of a name is made, and read.
READ: dict[str, tuple[Callable, Callable]] = {
    "yaml": (
        lambda path: path.write_text(
            f"nodes: {{_N: {{count: {NODES}}}}}\nedges: [{{files: e.csv}}]"
        ),
        lambda path: read(path, path.parent / "s"),
    ),
    "json": (
        lambda path: chunks(path.parent).rename(path),
        lambda path: read(path, path.parent / "s"),
    ),
    "npy": (lambda path: np.save(path, PAIRS.numpy()), lambda path: read(path, path.parent / "s")),
    "npz": (lambda path: np.savez_compressed(path, **ARRAYS), lambda path: open_source(str(path))),
    "pt": (
        lambda path: torch.save({"edge_index": PAIRS}, path),
        lambda path: read(path, path.parent / "s"),
    ),
    "saved": (lambda path: torch.save(SAVED, path), all_values),
    "pickles": (
        lambda path: path.write_bytes(pickle.dumps(SAVED["row"]) * 2),
        lambda path: list(read_pickles(str(path))),
    ),
}


@pytest.mark.parametrize("suffix", ["parquet", "csv", "csv.gz", *READ])
def test_damaged_files(suffix: str, tmp_path: Path) -> None:
    """Are read, or refused by name, and take no more memory than they have."""
    path = tmp_path / f"broken.{suffix}"
    make, reader = READ.get(suffix, (lambda path: save(path, EDGES), READ["npy"][1]))
    save(tmp_path / "e.csv", EDGES)
    make(path)
    reader(path)
    whole, refused = path.read_bytes(), 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content in damaged(whole, 60):
        path.write_bytes(content)
        refused += read_anything(path, lambda: reader(path))
    assert refused > 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10


def test_a_pattern_of_all_folders_stays_below_the_description(tmp_path: Path) -> None:
    """Or it would walk the whole disk, and go round in links for ever."""
    place = tmp_path / "described"
    for folder in (tmp_path / "other", place / "raw" / "deep"):
        folder.mkdir(parents=True)
        np.save(folder / "e.npy", np.stack([SRC, DST]))
    for pattern in (f"/{tmp_path}/**/e.npy", "../**/e.npy", "raw/../../**/e.npy"):
        path = describe(place, {"edges": [{"files": pattern}]})
        with pytest.raises(ValueError, match=r"\*\*.*expected a pattern below the description's"):
            read(path, tmp_path)
    for number in range(3):
        (place / "raw" / f"again{number}").symlink_to("..", target_is_directory=True)
    path = describe(place, {"edges": [{"files": "**/e.npy"}]})
    assert read(path, tmp_path).total_edges == len(SRC)
