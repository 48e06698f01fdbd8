"""The reader of DGL's binary layouts, against DGL's own writer and against damaged bytes."""

import itertools
import os

import numpy as np
import partition_files as files
import pytest
import torch

from sar import PartitionError
from sar.partition import progress
from sar.partition.dgl_format import read_graph, read_tensor_dict

dgl = pytest.importorskip("dgl")


def write(path, raw):
    path.write_bytes(raw)
    return path


def edges_of(file, size=7):
    file.check_pointers(size)
    chunks = list(file.edge_chunks(size))
    joined = [torch.from_numpy(np.concatenate(one)) for one in zip(*chunks)]
    return joined if joined else [files.NONE] * 3


def sample_tensors():
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 100, (6, 3), generator=generator)
    found = {str(dtype)[6:]: values.to(dtype) for dtype in files.CODES}
    found["flat"] = values[:, 0].contiguous()
    found["wide"] = values.reshape(1, 3, 3, 2).float()
    found["empty"] = torch.zeros(0, 4)
    found["no columns"] = torch.zeros(5, 0)
    return found


def test_tensor_dictionary_reads_what_dgl_writes(tmp_path):
    tensors = sample_tensors()
    tensors["x" * 13] = tensors["float32"]  # shifts what follows off any alignment
    path = str(tmp_path / "feat.dgl")
    dgl.data.utils.save_tensors(path, tensors)
    found = read_tensor_dict(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        read = found[name].read()
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    assert {one.offset % 8 for one in found.values()} > {0}


def test_the_writer_of_these_tests_writes_what_dgl_reads(tmp_path):
    """Also in early files' codes; and what is read here is the same."""
    tensors = sample_tensors()
    raw = files.tensor_dict(tensors)
    found = dgl.data.utils.load_tensors(str(write(tmp_path / "a.dgl", raw)))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    ends = torch.tensor([5, 0, 0, 5, 2]), torch.tensor([1, 5, 0, 5, 1])
    for layout, old in itertools.product(("coo", "csr", "csc"), (False, True)):
        raw = files.graph(6, *ends, {}, {"w": torch.arange(5)}, layouts=(layout,), old=old)
        path = write(tmp_path / "g.dgl", raw)
        loaded = dgl.load_graphs(str(path))[0][0]
        assert all(map(torch.equal, loaded.edges(order="eid"), ends))
        assert torch.equal(loaded.edata["w"], torch.arange(5))
        *rows, ids = edges_of(read_graph(path), size=2)
        assert all(torch.equal(one[torch.argsort(ids)], end) for one, end in zip(rows, ends))
        raw = files.graph(4, files.NONE, files.NONE, {}, {}, layouts=(layout,))
        found = read_graph(write(tmp_path / "g.dgl", raw))
        assert (found.num_nodes, found.num_edges) == (4, 0)
        assert len(edges_of(found)[0]) == 0


def test_rows_and_conversion_work_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "BLOCK_BYTES", 24)
    half = torch.arange(33, dtype=torch.float16).reshape(11, 3) / 7
    raw = files.tensor_dict({"abc": half, "d": half.bfloat16(), "one": torch.tensor(4.5)})
    found = read_tensor_dict(write(tmp_path / "a.dgl", raw))
    assert torch.equal(found["abc"].read(2, 9), half[2:9])
    assert torch.equal(found["abc"].read(2, 9, torch.float32), half[2:9].float())
    assert torch.equal(found["d"].read(dtype=torch.float64), half.bfloat16().double())
    assert found["abc"].read(4, 4).shape == (0, 3)
    assert found["one"].read() == 4.5
    for start, stop in ((-1, 3), (3, 12), (5, 4)):
        with pytest.raises(ValueError, match="rows"):
            found["abc"].read(start, stop)


GOOD = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"magic": 7}, "magic"),
        ({"shape": (3, 3)}, "expected 36"),
        ({"shape": (-3, 2)}, "negative"),
        ({"shape": (2**40, 2**40, 2**40)}, "bytes"),
        ({"shape": (0, 2**62), "nbytes": 0}, "bytes"),
        ({"shape": (2**31, 2**31), "nbytes": 2**64 - 2**63 - 1}, "bytes"),
        ({"shape": (1 << 30,), "nbytes": 4 << 30}, "truncated"),
        ({"nbytes": -24}, "-24 bytes"),
        ({"code": (9, 32)}, "type code 9"),
        ({"code": (2, 33)}, "33 bits"),
        ({"lanes": 4}, "4 lanes"),
        ({"shape": (1,) * 40}, "40 dimensions"),
    ],
)
def test_bad_array_headers(tmp_path, field, words):
    raw = files.u64(0xDD5A9FBE3FA2443F, 1, 1) + files.text("feat") + files.array(GOOD, **field)
    path = write(tmp_path / "bad.dgl", raw)
    with pytest.raises(PartitionError, match=words) as error:
        read_tensor_dict(path)
    assert str(path) in str(error.value)


def test_bad_dictionaries(tmp_path):
    path = tmp_path / "bad.dgl"
    twice = files.u64(0xDD5A9FBE3FA2443F, 2, 2) + 2 * (files.text("a") + files.array(GOOD))
    huge = files.u64(0xDD5A9FBE3FA2443F, 2**63, 2**63)
    name = files.u64(0xDD5A9FBE3FA2443F, 1, 1, 2**40) + bytes(64)
    coded = files.u64(0xDD5A9FBE3FA2443F, 1, 1, 4) + b"\xff\xfe\xfd\xfc" + files.array(GOOD)
    for raw, words in (
        (twice, "twice"),
        (huge, "announced"),
        (name, "announced"),
        (coded, "UTF-8"),
        (files.tensor_dict({"a": GOOD}, count=3), "announces 3"),
        (b"\x89PNG" + bytes(60), "magic"),
        (b"", "empty"),
    ):
        with pytest.raises(PartitionError, match=words):
            read_tensor_dict(write(path, raw))


def test_what_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "regular"), ("", "regular"), ("none", "no such file")):
        with pytest.raises(PartitionError, match=words):
            read_tensor_dict(tmp_path / name)


def test_file_cut_while_mapped_is_an_error(tmp_path):
    path = write(tmp_path / "a.dgl", files.tensor_dict({"a": torch.zeros(50_000)}))
    found = read_tensor_dict(path)
    os.truncate(path, 100)
    with pytest.raises(PartitionError, match="was cut"):
        found["a"].read()


def small_graph(layouts=("coo",), **options):
    src, dst = torch.tensor([0, 2, 1, 2]), torch.tensor([1, 1, 0, 2])
    data = {"_ID": torch.arange(3)}, {"_ID": torch.arange(4)}
    return files.graph(3, src, dst, *data, layouts=layouts, **options)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_every_truncation_is_an_error(tmp_path, layout):
    whole = small_graph((layout,))
    body = len(whole) - 80  # the trailer and the type names are not needed
    read_graph(write(tmp_path / "g.dgl", whole))
    for length in [*range(0, 64, 9), *range(4090, body)]:
        with pytest.raises(PartitionError):
            read_graph(write(tmp_path / "g.dgl", whole[:length]))
    whole = files.tensor_dict({"a": GOOD, "b": GOOD})
    for length in range(len(whole)):
        with pytest.raises(PartitionError):
            read_tensor_dict(write(tmp_path / "f.dgl", whole[:length]))


def long(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("stored", "layout", "words"),
    [
        (files.coo(3, long(0, 3), long(1, 1)), "coo", "node ids run"),
        (files.coo(3, long(0, 1), long(-1, 1)), "coo", "node ids run"),
        (files.coo(3, long(0, 1), long(1)), "coo", "as many"),
        (files.coo(3, long(0, 1), long(1, 1), long(5)), "coo", "as many"),
        (files.coo(3, long(0, 1), long(1, 1), long(0, 2)), "coo", "edge ids run"),
        (files.coo(3, torch.zeros(2), torch.zeros(2)), "coo", "int32 or int64"),
        (files.csr(3, 3, long(0, 2, 1, 2), long(0, 1)), "csc", "index pointers"),
        (files.csr(3, 3, long(1, 1, 2, 2), long(0, 1)), "csc", "index pointers"),
        (files.csr(3, 3, long(0, 1, 1, 1), long(0, 1)), "csr", "end at 1"),
        (files.csr(3, 3, long(0, 1, 2, 2**62), long(0, 1)), "csr", "end at"),
        (files.csr(3, 3, long(0, 1, 2), long(0, 1)), "csc", "expected 4 pointers"),
        (files.csr(3, 4, long(0, 1, 2, 2), long(0, 1)), "csc", "square"),
        (files.csr(3, 3, long(0, 1, 2, 2), long(0, 9)), "csc", "node ids run"),
    ],
)
def test_bad_matrices(tmp_path, stored, layout, words):
    raw = files.graph(3, None, None, {}, {}, layouts=(layout,), matrices=[stored])
    with pytest.raises(PartitionError, match=words):
        edges_of(read_graph(write(tmp_path / "g.dgl", raw)), size=2)


def test_falling_pointers(tmp_path):
    # int64 differences of the second wrap around to positive ones
    for pointers in (long(0, 0, 2, 1, 2, 2), long(0, 2**62 + 1, -(2**63), -1, 2, 2)):
        stored = files.csr(5, 5, pointers, long(0, 1))
        raw = files.graph(5, None, None, {}, {}, layouts=("csr",), matrices=[stored])
        for size in (2, 100):
            with pytest.raises(PartitionError, match="index pointers"):
                edges_of(read_graph(write(tmp_path / "g.dgl", raw)), size)


def test_bad_graph_files(tmp_path):
    whole = small_graph()
    rows = files.graph(3, long(0), long(1), {"_ID": torch.arange(2)}, {})
    matrices = [files.coo(3, long(0), long(1)), files.csr(3, 3, long(0, 0, 0, 0), long())]
    several = files.graph(3, None, None, {}, {}, layouts=("coo", "csc"), matrices=matrices)
    typed = dgl.heterograph({("a", "r", "b"): ([0], [1]), ("b", "s", "a"): ([0], [0])})
    dgl.save_graphs(str(tmp_path / "typed"), [typed])
    for raw, words in (
        (files.tensor_dict({"a": GOOD}), "magic"),
        (whole[:8] + files.u64(1) + whole[16:], "version 1"),
        (whole[:24] + files.u64(2) + whole[32:], "2 graphs"),
        (whole[:4096] + files.u64(2**60) + whole[4104:], "outside"),
        (whole[:4096] + files.u64(0) + whole[4104:], "outside"),
        (rows, "expected 3 rows"),
        (several, "edges"),
        ((tmp_path / "typed").read_bytes(), "one homogeneous graph|homogeneous"),
    ):
        with pytest.raises(PartitionError, match=words):
            read_graph(write(tmp_path / "g.dgl", raw))
