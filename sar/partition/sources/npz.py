"""Reads a graph from an `.npz` file: homogeneous, heterogeneous, or triples of a knowledge graph.

Never unpickles. `docs/formats.md` has the table of keys.
"""

import os
import threading
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays, as_named, need, storable

# Not node data, even if as long as the nodes by chance.
_STRUCTURE = ("src", "dst", "unlabelled_zero_rows")
NODE_DATA = "node_data.npz"  # beside partitions of other libraries
CSR = ("feat_data", "feat_indices", "feat_indptr", "feat_shape")
_Content = Mapping[str, np.ndarray]
# NumPy parses headers with `ast`, of which Python before 3.11.9 and 3.12.3 has one depth for all
# threads: two that parse at a time may end in a SystemError.
_parsing = threading.Lock()


def read_npz(path: str | os.PathLike) -> GraphArrays:
    """The graph in `path`; features become dense. Raises ValueError with file and key, OSError."""
    try:
        name = os.path.splitext(os.path.basename(path))[0]
        return _graph(_arrays(path), name).with_orig_ids().validate()
    except Exception as error:  # damaged bytes raise anything
        why = f"it has no key {error}" if type(error) is KeyError else error
        raise ValueError(f"{os.fspath(path)}: not a graph this program reads: {why}") from error


def read_node_data(
    path: str | os.PathLike, num_nodes: Mapping[str, int]
) -> dict[str, dict[str, Tensor]]:
    """Columns of nodes alone, by type: `name`, or `name/ntype` where there are several types.
    Raises ``ValueError`` with file and key for what is damaged or has not a row for each node."""
    found: dict[str, dict[str, Tensor]] = {ntype: {} for ntype in num_nodes}
    try:
        for key, value in _arrays(path).items():
            name, _, ntype = key.partition("/")
            if not ntype and len(num_nodes) == 1:
                (ntype,) = num_nodes
            known = list(num_nodes)
            need(ntype in known, f"key {key!r}, expected names and types as in {known}")
            count = num_nodes[ntype]
            columns = _node_data({name: value}, count, f"/{ntype}")
            is_good = name in columns and len(columns[name]) == count
            what = f"key {key!r} is {value.dtype} {value.shape}"
            need(is_good, f"{what}, expected {count} rows of numbers")
            found[ntype] |= columns
    except Exception as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    return found


def _arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    found = {}
    with _parsing, np.load(path, allow_pickle=False) as archive:
        is_good = isinstance(archive, np.lib.npyio.NpzFile)
        need(is_good, "a single array, expected an archive of named arrays")
        for key in archive.files:
            try:
                found[key] = archive[key]
            except Exception as error:
                raise ValueError(f"key {key!r}: {type(error).__name__}: {error}") from error
            kind = type(found[key])  # numpy gives the bytes of what is no array of its own
            need(kind is np.ndarray, f"key {key!r} holds {kind.__name__}, expected an array")
    return found


def _graph(content: _Content, name: str) -> GraphArrays:
    if "num_entities" in content:
        return _triples(content, name)
    if any(key.startswith("edges/") for key in content):
        return _heterogeneous(content, name)
    words = "'src', 'edges/<src>/<relation>/<dst>' or 'num_entities'"
    need("src" in content, f"keys {sorted(content)[:8]}, expected {words}")
    count = _scalar(content, "num_nodes")
    src, dst = _ids(content, "src"), _ids(content, "dst")
    if "undirected_once" in content:
        src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    others = {key: value for key, value in content.items() if key not in _STRUCTURE}
    data = _node_data(others, count)
    return GraphArrays(name, {NTYPE_HOMO: count}, {ETYPE_HOMO: (src, dst)}, {NTYPE_HOMO: data})


def _heterogeneous(content: _Content, name: str) -> GraphArrays:
    # DGL orders types by name; so do we, so that the type ids agree.
    types = sorted(key.split("/")[1] for key in content if key.startswith("num_nodes/"))
    num_nodes = {ntype: _scalar(content, f"num_nodes/{ntype}") for ntype in types}
    edges, node_data = {}, {}
    for key in sorted(key for key in content if key.startswith("edges/")):
        etype, shape = tuple(key.split("/")[1:]), content[key].shape
        is_good = len(etype) == 3 and len(shape) == 2 and shape[0] == 2
        words = "[2, E] and a name like 'edges/<src>/<relation>/<dst>'"
        need(is_good, f"{key!r} has shape {shape}, expected {words}")
        src, dst = _ids(content, key)
        edges[etype[0], etype[1], etype[2]] = src, dst
    for ntype, count in num_nodes.items():
        suffix = f"/{ntype}"
        own = {k.removesuffix(suffix): v for k, v in content.items() if k.endswith(suffix)}
        own = {k: v for k, v in own.items() if "/" not in k}
        node_data[ntype] = _node_data(own, count, suffix)
    return GraphArrays(name, num_nodes, edges, node_data)


def _triples(content: _Content, name: str) -> GraphArrays:
    splits = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
    splits = {key: mask for key, mask in splits.items() if key in content}
    for key in splits:
        shape = content[key].shape
        need(len(shape) == 2 and shape[1] == 3, f"{key!r} has shape {shape}, expected [n, 3]")
    rows = torch.cat([_ids(content, key) for key in splits])
    which = torch.cat([torch.full((len(content[key]),), i) for i, key in enumerate(splits)])
    data = {"etype": rows[:, 1].contiguous()}
    data |= {mask: which == number for number, mask in enumerate(splits.values())}
    edges = {ETYPE_HOMO: (rows[:, 0].contiguous(), rows[:, 2].contiguous())}
    nodes = {NTYPE_HOMO: _scalar(content, "num_entities")}
    return GraphArrays(name, nodes, edges, {}, {ETYPE_HOMO: data})


def _scalar(content: _Content, key: str) -> int:
    value = content[key]
    is_good = value.size == 1 and value.dtype.kind in "iu" and int(value.reshape(())) >= 0
    what = f"{key!r} is {value.dtype} {value.shape}"
    need(is_good, f"{what}, expected one non-negative integer")
    return int(value.reshape(()))


def _ids(content: _Content, key: str) -> Tensor:
    value = content[key]
    need(value.dtype.kind in "iu", f"{key!r} is {value.dtype}, expected integers")
    return torch.from_numpy(np.ascontiguousarray(value, dtype=np.int64))


def _node_data(content: _Content, count: int, suffix: str = "") -> dict[str, Tensor]:
    """Columns of a node type; ``suffix`` ends their names in the file."""
    data = {}
    if "feat_data" in content:
        data["feat"] = torch.from_numpy(storable(_densify(content, count)))
    for key, value in content.items():
        if key in CSR or value.ndim == 0:
            continue
        if key.endswith("_masks") and value.ndim == 2 and value.shape[1] == count:
            value = value.T
        # The standard names must fit; anything else of another length is not about the nodes.
        standard = key in ("feat", "label") or key.endswith("_mask")
        if len(value) != count and not (standard and value.dtype.kind in "biuf"):
            continue
        try:
            value = as_named(key, storable(value))
        except (TypeError, OverflowError) as error:
            warnings.warn(f"{key + suffix!r} is left out: {error}", stacklevel=2)
            continue
        data[key] = torch.from_numpy(np.ascontiguousarray(value))
    return data


def _densify(content: _Content, count: int) -> np.ndarray:
    """The dense [N, F] matrix of a CSR one, checked first: numpy's indices wrap around."""
    values, columns, pointers, shape = (content[key] for key in CSR)
    is_good = shape.shape == (2,) and int(shape[0]) == count and int(shape[1]) >= 0
    need(is_good, f"feat_shape is {shape.tolist()}, expected [{count}, F]")
    width = int(shape[1])
    pointers, columns = pointers.astype(np.int64), columns.astype(np.int64)
    sizes = np.diff(pointers)
    is_good = len(pointers) == count + 1 and pointers[0] == 0 and bool((sizes >= 0).all())
    need(is_good, f"feat_indptr is not {count + 1} ascending offsets from 0")
    need(
        pointers[-1] == len(columns) == len(values),
        f"feat_indptr ends at {pointers[-1]}, but feat_indices has {len(columns)} entries "
        f"and feat_data {len(values)}",
    )
    outside = columns[(columns < 0) | (columns >= width)]
    need(not len(outside), f"feat_indices hold {outside[:3].tolist()}, expected [0, {width})")
    dense = np.zeros((count, width), dtype=values.dtype)
    np.add.at(dense, (np.repeat(np.arange(count), sizes), columns), values)
    return dense
