"""Graphs of PyTorch Geometric: `Data` and `HeteroData`, in memory or saved by `torch.save`."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.partition.arrays import (
    ETYPE_HOMO,
    NTYPE_HOMO,
    ORIG_EID,
    ORIG_ID,
    STORED_DTYPES,
    GraphArrays,
    check_dense,
    need,
)

NODE_NAMES = {"x": "feat", "y": "label"}
EDGE_NAMES = {"edge_attr": "feat"}
TIME_NAMES = {"edge_time": "time"}  # of edges that share their names with nodes
_STRUCTURE = ("edge_index", "num_nodes", "ptr")
_NO_PAIRS = "pairs of RandomLinkSplit are not cut; expected a bool column of edges, edge_train_mask"
_PAIRS = ("edge_label_index", "pos_edge_label_index", "neg_edge_label_index")
_COUNTED = ("x", "pos", "train_mask", "val_mask", "test_mask", "n_id")  # a row for each node
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_GLOBAL = "_global_store"


def from_pyg(data: Any, name: str) -> GraphArrays:
    """Arrays of a `Data` or `HeteroData`, or of its `to_dict()`; nothing is copied that can stay.

    `docs/formats.md` has the table of names. Where a graph has as many edges as nodes, tensors are
    of edges if their name begins with `edge_`. What has rows of neither is left out, with a
    warning. Raises ValueError naming the key.
    """
    content = data if isinstance(data, Mapping) else _content(data)
    graph = _hetero(content, name) if _is_hetero(content) else _homogeneous(content, name)
    return graph.with_orig_ids().validate()


def read_pyg_file(path: Path, name: str) -> GraphArrays:
    """The graph in a file of `torch.save(data)` or `torch.save(data.to_dict())`, mapped. Nothing in
    it is executed: what is not a tensor, a container or PyG's own class is refused, by
    `torch.load(weights_only=True)`. Raises ValueError naming the file."""
    content = _load(Path(path))
    if isinstance(content, tuple) and content:  # PyG's data sets: (data, slices, class)
        several = len(content) > 1 and content[1] is not None and not _is_single(content[1])
        need(not several, f"{path}: holds several graphs, expected one")
        content = content[0]
    is_good = isinstance(content, Mapping) or hasattr(content, "to_dict")
    what = f"{path}: holds {type(content).__name__}"
    need(is_good, f"{what}, expected Data, HeteroData or a dict")
    try:
        return from_pyg(content, name)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _is_single(slices: Any) -> bool:
    if isinstance(slices, Mapping):
        return all(_is_single(one) for one in slices.values())
    return not hasattr(slices, "__len__") or len(slices) <= 2


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    classes = _pyg_classes()
    try:
        mapped = zipfile.is_zipfile(path)  # files of before 2020 are none, and cannot be mapped
        if mapped:  # torch does not look at the sums of what it maps
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            need(damaged is None, f"entry {damaged!r} is damaged")
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:  # damaged bytes raise anything
        lines = str(error).splitlines() or [type(error).__name__]
        named = [line.strip() for line in lines if "GLOBAL" in line]
        if isinstance(error, pickle.UnpicklingError) and named:
            hint = "" if classes else "; install torch_geometric, or"
            raise ValueError(
                f"{path}: names code that is not run: {named[0][:200]}{hint} "
                "save data.to_dict() instead of the object"
            ) from error
        raise ValueError(f"{path}: not a file of torch.save that is read: {lines[0]}") from error


def _pyg_classes() -> list:
    """Classes that a pickled `Data` or `HeteroData` consists of; none without torch_geometric."""
    try:
        from torch_geometric.data import Data, HeteroData, data, storage
    except ImportError:
        return []
    kinds = ("BaseStorage", "EdgeStorage", "GlobalStorage", "NodeStorage")
    storages = [getattr(storage, kind) for kind in kinds]
    return [Data, HeteroData, data.DataEdgeAttr, data.DataTensorAttr, *storages]


def _content(data: Any) -> dict:
    """`to_dict()`, with the counts of nodes that the object knows and its dictionary may not."""
    if not hasattr(data, "to_dict"):
        raise TypeError(f"got {type(data).__name__}, expected Data, HeteroData or a dict")
    content = dict(data.to_dict())
    if not _is_hetero(content) and content.get("num_nodes") is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it counts what edges name, as we do
            content["num_nodes"] = getattr(data, "num_nodes", None)
    return content


def _is_hetero(content: Mapping) -> bool:
    if _GLOBAL in content:
        return True
    return "edge_index" not in content and any(isinstance(v, Mapping) for v in content.values())


def _homogeneous(content: Mapping, name: str) -> GraphArrays:
    ends = _ends(content, "the graph")
    count = _count(content, list(ends), "the graph")
    nodes, edges = _split(content, count, len(ends[0]))
    graph = GraphArrays(name, {NTYPE_HOMO: count}, {ETYPE_HOMO: ends}, {NTYPE_HOMO: nodes})
    if edges:
        graph.edge_data[ETYPE_HOMO] = edges
    return graph


def _hetero(content: Mapping, name: str) -> GraphArrays:
    stores = {k: v for k, v in content.items() if k != _GLOBAL and isinstance(v, Mapping)}
    etypes = [k for k in stores if isinstance(k, tuple)]  # types keep their order
    for etype in etypes:
        is_good = len(etype) == 3 and all(isinstance(part, str) for part in etype)
        need(is_good, f"edge type {etype!r}, expected (source, relation, destination)")
    ends = {etype: _ends(stores[etype], repr(etype)) for etype in etypes}
    named = [k for k in stores if isinstance(k, str)]
    ntypes = list(dict.fromkeys([*named, *(ntype for etype in etypes for ntype in etype[::2])]))
    counts, node_data, edge_data = {}, {}, {}
    for ntype in ntypes:
        ids = [ends[e][side] for e in etypes for side in (0, 1) if e[2 * side] == ntype]
        store = stores.get(ntype, {})
        counts[ntype] = _count(store, ids, repr(ntype))
        node_data[ntype], _ = _split(store, counts[ntype], None, f" of {ntype!r}")
    for etype in etypes:
        size = len(ends[etype][0])
        _, columns = _split(stores[etype], None, size, f" of {etype!r}")
        if columns:
            edge_data[etype] = columns
    return GraphArrays(name, counts, ends, node_data, edge_data)


def _ends(store: Mapping, where: str) -> tuple[Tensor, Tensor]:
    index = store.get("edge_index")
    hint = "; it has adj_t: save it without ToSparseTensor" if "adj_t" in store else ""
    expected = f"expected PyG's Data or HeteroData{hint}"
    need(index is not None, f"{where} has no edge_index, {expected}")
    index = _tensor(index)
    if index is None or index.dim() != 2 or len(index) != 2 or index.dtype.is_floating_point:
        shape = None if index is None else (index.dtype, tuple(index.shape))
        raise ValueError(f"edge_index of {where} is {shape}, expected integers [2, E]")
    return tuple(index.to(torch.int64))  # type: ignore[return-value]


def _count(store: Mapping, ids: list[Tensor], where: str) -> int:
    """The number of nodes as PyG tells it: said, or rows of node columns, or the ids of edges."""
    said = store.get("num_nodes")
    if said is not None:
        is_good = type(said) is int and said >= 0
        need(is_good, f"num_nodes of {where} is {said!r}, expected a count")
        return said
    for key in _COUNTED:
        value = _tensor(store.get(key))
        if value is not None and value.dim():
            return len(value)
    named = max((int(one.max()) + 1 for one in ids if len(one)), default=0)
    label = _tensor(store.get("y"))  # may be the whole graph's
    if label is not None and label.dim() and len(label) > named:
        return len(label)
    check_dense(named, sum(map(len, ids)), f"edge_index of {where}", "give num_nodes")
    return named


def _split(
    store: Mapping, nodes: int | None, edges: int | None, where: str = ""
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    node_data: dict[str, Tensor] = {}
    edge_data: dict[str, Tensor] = {}
    left, edge_names = [], EDGE_NAMES if nodes is None else EDGE_NAMES | TIME_NAMES
    for key, value in store.items():
        if key in _STRUCTURE or value is None:
            continue
        need(key not in _PAIRS, f"{key}{where}: {_NO_PAIRS}")
        tensor, name = _tensor(value), str(key)
        is_column = tensor is not None and tensor.dim() and tensor.dtype in STORED_DTYPES
        rows = len(tensor) if tensor is not None and is_column else -1
        of_edges = rows == edges
        if rows == nodes and not (of_edges and name.startswith("edge_")):
            _put(node_data, NODE_NAMES.get(name, name), tensor, ORIG_ID)
        elif of_edges:
            _put(edge_data, edge_names.get(name, name), tensor, ORIG_EID)
        else:
            left.append(name)
    if left:
        counts = " or ".join(str(count) for count in (nodes, edges) if count is not None)
        warnings.warn(f"{left}{where} are left out: no tensors of {counts} rows", stacklevel=4)
    return node_data, edge_data


def _put(data: dict[str, Tensor], name: str, value: Any, reserved: str) -> None:
    need(name not in data, f"two tensors are named {name!r} here")
    need(name != reserved, f"a tensor is named {name!r}, which is added: the row of the input")
    if name.endswith(("_mask", "_masks")):
        value = value.bool()
    elif value.dtype == torch.bool:
        warnings.warn(f"{name!r} is bool, and read as uint8 without _mask at its end", stacklevel=5)
    if name == "label":
        value = value[:, 0] if value.dim() == 2 and value.shape[1] == 1 else value
        value = value.long() if value.dim() == 1 and not value.dtype.is_floating_point else value
    data[name] = value


def _tensor(value: Any) -> Tensor | None:
    """``value`` on the CPU, in a storable dtype if there is one; `None` for what is no tensor."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    if hasattr(value, "as_tensor"):  # EdgeIndex and Index
        value = value.as_tensor()
    value = value.detach().cpu()
    return value.to(_WIDER.get(value.dtype, value.dtype))
