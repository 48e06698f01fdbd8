"""Graphs of DGL and OGB: saved files, and data sets through the packages' own loaders."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import pickle
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sar._private import NUMPY_MAKERS, NUMPY_MODULES
from sar.errors import MissingDependencyError, SarError
from sar.partition.arrays import EType, GraphArrays, need
from sar.partition.dgl_format import FILE_MAGIC
from sar.partition.require import require_dgl
from sar.partition.unpickle import NotPlainError, plain_pickles

_RESERVED = ("_ID", "_TYPE")
DEFAULT_OGB_ROOT = "dataset"  # OGB's own
# OGB's splits, and ours.
_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
_RELATION = "etype"  # the column of relations' numbers, as of an `.npz` of triples


def from_dgl(graph, name: str) -> GraphArrays:
    """Arrays of a DGL graph; types keep names and order, masks become bool, `_ID` is dropped."""
    num_nodes = {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
    edges, edge_data = {}, {}
    for etype in graph.canonical_etypes:
        src, dst = graph.edges(etype=etype, order="eid")
        edges[etype] = (src.long(), dst.long())
        edge_data[etype] = _fields(graph.edges[etype].data)
    node_data = {ntype: _fields(graph.nodes[ntype].data) for ntype in graph.ntypes}
    return GraphArrays(name, num_nodes, edges, node_data, edge_data).with_orig_ids().validate()


def _fields(data) -> dict[str, Tensor]:
    kept = {name: value for name, value in data.items() if name not in _RESERVED}
    return {n: v.bool() if n.endswith("_mask") else v for n, v in kept.items()}


def read_dgl_file(path: str | os.PathLike) -> GraphArrays:
    """The one graph of a file of `dgl.save_graphs`. Raises ValueError, also for several graphs."""
    path = os.fspath(path)
    with open(path, "rb") as file:
        magic = file.read(8)
    # DGL's reader does not stop at foreign bytes.
    is_good = magic == FILE_MAGIC.to_bytes(8, "little")
    lacks = "neither an .npz file nor one of dgl.save_graphs; sar partition --help lists all inputs"
    need(is_good, f"{path}: {lacks}")
    dgl = require_dgl(f"reading {path}")
    try:
        graphs, _ = dgl.load_graphs(path)
    except dgl.DGLError as error:
        raise ValueError(f"{path}: DGL cannot read it: {str(error).splitlines()[0]}") from error
    need(len(graphs) == 1, f"{path}: holds {len(graphs)} graphs, expected one")
    try:
        return from_dgl(graphs[0], Path(path).stem)
    except (ValueError, dgl.DGLError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error


@functools.cache
def dgl_dataset_names() -> dict[str, str]:
    """Lower-case short name -> class name in `dgl.data`; empty without dgl."""
    try:
        dgl = require_dgl("listing data sets")
    except MissingDependencyError:
        return {}
    names = {}
    for name, member in vars(dgl.data).items():
        if not inspect.isclass(member) or not issubclass(member, dgl.data.DGLDataset):
            continue
        if name.endswith("Dataset"):
            names[name.removesuffix("Dataset").removesuffix("Graph").lower()] = name
    for generic in ("dgl", "dglbuiltin", "csv", "", "citation"):
        names.pop(generic, None)
    return names


def load_dgl_dataset(name: str, root: str | None = None) -> GraphArrays:
    """The single graph of a `dgl.data` data set (`cora`, `reddit`, `CoraGraphDataset` ...);
    ``root`` is DGL's `raw_dir`. Raises SarError when it cannot be downloaded or is no single graph.
    """
    dgl = require_dgl(f"data set {name!r}")
    maker = getattr(dgl.data, dgl_dataset_names().get(name.lower(), name))
    keywords = {} if root is None else {"raw_dir": root}
    with explained(name, root or "DGL's data folder"), plain_pickles():
        dataset = maker(**keywords)
        if len(dataset) != 1:
            raise SarError(f"data set {name!r} holds {len(dataset)} graphs, expected a single one")
        graph = dataset[0]
    if not isinstance(graph, dgl.DGLGraph):
        raise SarError(f"data set {name!r} holds {type(graph).__name__}, expected a DGL graph")
    arrays = from_dgl(graph, name.lower())
    for data in arrays.node_data.values():
        if "labels" in data and "label" not in data:
            data["label"] = data.pop("labels")
    return arrays


@contextlib.contextmanager
def ogb_loader(kind: str, name: str, root: str | None) -> Iterator[tuple[Any, str]]:
    """OGB's module `dataset_dgl` for data sets of a kind, and their folder; inside, only plain data
    is unpickled. Raises as `load_ogb_dataset`."""
    require_dgl(f"data set {name!r}")
    root = root or DEFAULT_OGB_ROOT
    with explained(name, root):
        loader = importlib.import_module(f"ogb.{kind}.dataset_dgl")
        with plain_pickles(), weights_only_loads(loader, Path(root)):
            yield loader, root


def load_ogb_dataset(name: str, root: str | None = None) -> GraphArrays:
    """An OGB node-property data set (`ogbn-arxiv`, `ogbn-mag` ...) with its split as masks.

    root: OGB's folder, "dataset" below the working directory by default, as in OGB. Labels of one
    column become a vector, missing ones (NaN) -1. Raises MissingDependencyError without ogb,
    SarError when it cannot be downloaded.
    """
    with ogb_loader("nodeproppred", name, root) as (loader, root):
        dataset = loader.DglNodePropPredDataset(name=name, root=root)
        split = dataset.get_idx_split()
        graph, labels = dataset[0]
    arrays = from_dgl(graph, name)
    classify = "classification" in dataset.task_type and dataset.num_tasks == 1
    if not isinstance(labels, dict):  # of a heterograph both are dictionaries by type
        (ntype,) = arrays.num_nodes
        labels = {ntype: labels}
        split = {key: {ntype: ids} for key, ids in split.items()}
    for ntype, value in labels.items():
        label = _as_vector(torch.as_tensor(value))
        if classify and label.is_floating_point():
            label = torch.where(label.isnan(), torch.full_like(label, -1), label).long()
        arrays.node_data[ntype]["label"] = label
    for key, by_type in split.items():
        for ntype, ids in by_type.items():
            mask = torch.zeros(arrays.num_nodes[ntype], dtype=torch.bool)
            mask[torch.as_tensor(ids)] = True
            arrays.node_data[ntype][_MASKS[key]] = mask
    return arrays


def _as_vector(column: Tensor) -> Tensor:
    is_one = column.dim() == 2 and column.shape[1] == 1
    return column[:, 0].contiguous() if is_one else column


@contextlib.contextmanager
def explained(name: str, folder: str) -> Iterator[None]:
    """Inside, a loader's failed or refused download becomes one SarError."""
    try:
        yield
    except NotPlainError as error:
        raise SarError(f"data set {name!r}: {error}") from error
    except ImportError as error:
        text = f"data set {name!r}: {error}; pip install 'sar-gnn[data]'"
        raise MissingDependencyError(text) from error
    except OSError as error:
        text = f"data set {name!r} could not be loaded or downloaded ({type(error).__name__}:"
        raise SarError(f"{text} {error}); without a network, put it into {folder} first") from error
    except (SystemExit, EOFError) as error:
        # OGB asks before a large download and leaves the process when the answer is no.
        raise SarError(f"data set {name!r}: the download was not confirmed") from error


@contextlib.contextmanager
def weights_only_loads(module, root: Path) -> Iterator[None]:
    """Inside, `torch.load` of `module` (OGB's loader) reads plain data below `root` only.

    OGB 1.3.6 calls `torch.load(path)` on its own files; they hold numpy arrays, which torch's safe
    loading refuses unless they are listed.
    """
    root = root.resolve()

    def load(path: str) -> Any:
        if not Path(path).resolve().is_relative_to(root):
            raise SarError(f"{path} lies outside the data folder {root}: not loaded")
        try:
            with torch.serialization.safe_globals(_numpy_globals()):
                return torch.load(path, weights_only=True)
        except pickle.UnpicklingError as error:
            raise SarError(f"{path} holds more than arrays of numbers: not loaded") from error

    stand_in = types.SimpleNamespace(**{**vars(torch), "load": load})
    with mock.patch.object(module, "torch", stand_in):
        yield


def _numpy_globals() -> list[Any]:
    """Names that pickled numpy arrays of numbers refer to, of numpy 1 and 2."""
    # An array's pickle names private functions of numpy; numpy itself says which.
    makers = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    listed: list[Any] = [np.ndarray, np.dtype]
    for module in NUMPY_MODULES:
        listed += [(one, f"{module}.{name}") for one, name in zip(makers, NUMPY_MAKERS)]
    kinds = (np.int64, np.int32, np.float32, np.float64, np.bool_)
    return listed + [type(np.dtype(kind)) for kind in kinds]


def load_ogb_links(name: str, root: str | None = None) -> GraphArrays:
    """An OGB link-property data set (`ogbl-collab`, `ogbl-wikikg2` ...) with its split as masks.

    `docs/formats.md` tells what becomes of its edges; those held out in both directions lie beside
    each other. Negatives of any part are left out with one warning: they are no edges
    (`NegativeSampler` draws some). Arguments as of :func:`load_ogb_dataset`; raises as it, and
    SarError for a data set that contradicts itself.
    """
    with ogb_loader("linkproppred", name, root) as (loader, root):
        dataset = loader.DglLinkPropPredDataset(name=name, root=root)
        split, graph = dataset.get_edge_split(), dataset[0]
    try:
        return _with_held_out(from_dgl(graph, name), split)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise SarError(
            f"data set {name!r} in {root}: graph and split contradict each other: {error!r}"
        ) from error


def _with_held_out(graph: GraphArrays, split: Mapping[str, Mapping[str, Any]]) -> GraphArrays:
    """The training graph with the edges of `valid` and `test` behind its own, and masks.

    split: OGB's `get_edge_split()`: by part, `edge` [n, 2]; `source_node`, `target_node` [n]; or
        `head`, `relation`, `tail` [n] (`head_type`, `tail_type` if there are several); and columns.
    Raises ValueError, KeyError, IndexError, TypeError for contradictions.
    """
    left = [f"{part}.{key}" for part, content in split.items() for key in content if "neg" in key]
    if left:
        text = f"data set {graph.name!r}: negatives are no edges and left out: {', '.join(left)}"
        warnings.warn(text, stacklevel=3)
    relations = _name_relations(graph)
    key = next(key for key in ("edge", "source_node", "head") if key in split["train"])
    told, total = len(split["train"][key]), graph.total_edges
    what = f"the graph has {total:,} edges, but training {told:,}"
    need(total in (told, 2 * told), f"{what}, expected as many or half")
    for etype, columns in graph.edge_data.items():
        count = len(graph.edges[etype][0])
        columns |= {mask: torch.full((count,), part == "train") for part, mask in _MASKS.items()}
    for part in ("valid", "test"):
        for etype, ends, columns in _edges_of(graph, split[part], relations):
            if total == 2 * told > 0:  # each edge, and the one that runs the other way beside it
                ends = torch.stack([ends, ends.flip(0)], 2).reshape(2, -1)
                columns = {key: one.repeat_interleave(2, 0) for key, one in columns.items()}
            _append(graph, etype, ends, columns, _MASKS[part])
    return graph.validate()


def _name_relations(graph: GraphArrays) -> dict[tuple[int, str, str], EType]:
    """Rename OGB's column `reltype` [E, 1] to `etype`; the edge type of (relation's number, source
    type, destination type), for graphs of several edge types."""
    found: dict[tuple[int, str, str], EType] = {}
    for etype, columns in graph.edge_data.items():
        columns |= {key: _as_vector(column) for key, column in columns.items()}
        if "reltype" in columns:
            columns[_RELATION] = columns.pop("reltype")
            for number in columns[_RELATION].unique().tolist():
                found[int(number), etype[0], etype[2]] = etype
    return {} if len(graph.edges) == 1 else found


def _edges_of(
    graph: GraphArrays,
    part: Mapping[str, Any],
    relations: Mapping[tuple[int, str, str], EType],
) -> list[tuple[EType, Tensor, dict[str, Tensor]]]:
    """Held-out edges by edge type: ends [2, n] and columns."""
    if "head" not in part:
        (etype,) = graph.edges
        pair = (part["source_node"], part["target_node"]) if "edge" not in part else None
        ends = torch.stack([_ids(one) for one in (pair or torch.as_tensor(part["edge"]).T)])
        known = graph.edge_data[etype]
        return [(etype, ends, {key: torch.as_tensor(part[key]) for key in known if key in part})]
    number = _ids(part["relation"])
    ends = torch.stack([_ids(part["head"]), _ids(part["tail"])])
    if not relations:
        (etype,) = graph.edges
        return [(etype, ends, {_RELATION: number})]
    kinds = list(zip(number.tolist(), part["head_type"], part["tail_type"], strict=True))
    ordered = {kind: position for position, kind in enumerate(dict.fromkeys(kinds))}
    which, found = torch.tensor([ordered[kind] for kind in kinds], dtype=torch.int64), []
    for kind, position in ordered.items():
        rows = (which == position).nonzero()[:, 0]
        found.append((relations[kind], ends[:, rows], {_RELATION: number[rows]}))
    return found


def _ids(values: Any) -> Tensor:
    ids = torch.as_tensor(values)
    is_good = not ids.dtype.is_floating_point and ids.dim() == 1
    need(is_good, f"got ids of {ids.dtype} {tuple(ids.shape)}, expected one integer each")
    return ids.long()


def _append(
    graph: GraphArrays, etype: EType, ends: Tensor, columns: dict[str, Tensor], mask: str
) -> None:
    """Append edges to a type; columns that they do not have are 0."""
    (src, dst), known = graph.edges[etype], graph.edge_data[etype]
    graph.edges[etype] = torch.cat([src, ends[0]]), torch.cat([dst, ends[1]])
    for key, column in known.items():
        rows = column.new_zeros(ends.shape[1], *column.shape[1:])
        if key == mask:
            rows.fill_(True)
        elif key in columns:
            rows.copy_(columns[key].reshape(rows.shape))
        known[key] = torch.cat([column, rows])
