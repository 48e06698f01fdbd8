"""Graphs that DGL or OGB hold: saved ones, and data sets through the packages' own loaders."""

import contextlib
import functools
import importlib
import inspect
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar._private import NUMPY_MAKERS, NUMPY_MODULES
from sar.errors import MissingDependencyError, SarError
from sar.partition.arrays import GraphArrays
from sar.partition.require import require_dgl
from sar.partition.unpickle import NotPlainError, plain_pickles

_DGL_FILE_MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")
_RESERVED = ("_ID", "_TYPE")
DEFAULT_OGB_ROOT = "dataset"  # OGB's own


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
    with open(path, "rb") as file:
        magic = file.read(8)
    # DGL's reader does not stop at foreign bytes.
    if magic != _DGL_FILE_MAGIC:
        raise ValueError(f"{os.fspath(path)}: neither an .npz file nor one of dgl.save_graphs")
    dgl = require_dgl(f"reading {os.fspath(path)}")
    try:
        graphs, _ = dgl.load_graphs(os.fspath(path))
    except dgl.DGLError as error:
        raise ValueError(
            f"{os.fspath(path)}: DGL cannot read it: {str(error).splitlines()[0]}"
        ) from error
    if len(graphs) != 1:
        raise ValueError(f"{os.fspath(path)}: holds {len(graphs)} graphs, expected one")
    try:
        return from_dgl(graphs[0], Path(path).stem)
    except (ValueError, dgl.DGLError) as error:
        raise ValueError(f"{os.fspath(path)}: {str(error).splitlines()[0]}") from error


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
    """The single graph of a `dgl.data` data set (`cora`, `reddit`, `CoraGraphDataset` ...).

    root: DGL's `raw_dir`; None is DGL's own folder. Raises SarError when it cannot be downloaded or
    is no single graph.
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
    """OGB's module `dataset_dgl` for data sets of a kind, and their folder; unpickles nothing else
    than plain data inside. Raises as `load_ogb_dataset`.
    """
    require_dgl(f"data set {name!r}")
    try:
        package = importlib.import_module(f"ogb.{kind}")
        loader = importlib.import_module(".dataset_dgl", package.__name__)
    except ImportError as error:
        raise MissingDependencyError(
            f"data set {name!r} needs ogb: pip install 'sar-gnn[data]'"
        ) from error
    root = root or DEFAULT_OGB_ROOT
    with explained(name, root), plain_pickles(), weights_only_loads(loader, Path(root)):
        yield loader, root


def load_ogb_dataset(name: str, root: str | None = None) -> GraphArrays:
    """An OGB node-property data set (`ogbn-arxiv`, `ogbn-mag` ...) with its split as masks.

    root: OGB's folder, "dataset" below the working directory by default, as in OGB. Labels of one
    column become a vector; a label that is missing (NaN) becomes -1. Raises MissingDependencyError
    without ogb, SarError when it cannot be downloaded.
    """
    with ogb_loader("nodeproppred", name, root) as (loader, root):
        dataset = loader.DglNodePropPredDataset(name=name, root=root)
        split = dataset.get_idx_split()
        graph, labels = dataset[0]
    arrays = from_dgl(graph, name)
    classify = "classification" in dataset.task_type and dataset.num_tasks == 1
    _add_targets(arrays, labels, split, classify)
    return arrays


def _add_targets(arrays: GraphArrays, labels, split: dict, classify: bool) -> None:
    """OGB's labels and split as node data; of a heterograph both are dictionaries by type."""
    if not isinstance(labels, dict):
        (ntype,) = arrays.num_nodes
        labels = {ntype: labels}
        split = {key: {ntype: ids} for key, ids in split.items()}
    for ntype, value in labels.items():
        arrays.node_data[ntype]["label"] = _labels(torch.as_tensor(value), classify)
    for key, by_type in split.items():
        for ntype, ids in by_type.items():
            mask = torch.zeros(arrays.num_nodes[ntype], dtype=torch.bool)
            mask[torch.as_tensor(ids)] = True
            arrays.node_data[ntype][f"{'val' if key == 'valid' else key}_mask"] = mask


def _labels(value: Tensor, classify: bool) -> Tensor:
    if value.dim() == 2 and value.shape[1] == 1:
        value = value[:, 0].contiguous()
    if classify and value.is_floating_point():
        value = torch.where(value.isnan(), torch.full_like(value, -1), value).long()
    return value


@contextlib.contextmanager
def explained(name: str, folder: str) -> Iterator[None]:
    """Turn what the loaders do when a download fails or is refused into one SarError."""
    try:
        yield
    except NotPlainError as error:
        raise SarError(f"data set {name!r}: {error}") from error
    except ImportError as error:
        raise MissingDependencyError(
            f"data set {name!r}: {error}; pip install 'sar-gnn[data]'"
        ) from error
    except OSError as error:
        raise SarError(
            f"data set {name!r} could not be loaded or downloaded "
            f"({type(error).__name__}: {error}); "
            f"without a network, put it into {folder} first"
        ) from error
    except (SystemExit, EOFError) as error:
        # OGB asks before a large download and leaves the process when the answer is no.
        raise SarError(f"data set {name!r}: the download was not confirmed") from error


class _Torch:
    """Stands in for torch inside OGB's loader: `load` reads plain data below `root` only.

    OGB 1.3.6 calls `torch.load(path)` on its own files; they hold numpy arrays, which torch's safe
    loading refuses unless they are listed. Nothing is ever unpickled without restriction.
    """

    def __init__(self, root: Path):
        self._root = root.resolve()

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def load(self, path: str):
        if not Path(path).resolve().is_relative_to(self._root):
            raise SarError(f"{path} lies outside the data folder {self._root}: not loaded")
        try:
            with torch.serialization.safe_globals(_numpy_globals()):
                return torch.load(path, weights_only=True)
        except pickle.UnpicklingError as error:
            raise SarError(f"{path} holds more than arrays of numbers: not loaded") from error


def _numpy_globals() -> list[Any]:
    """What pickled numpy arrays of numbers refer to, under the names of numpy 1 and 2."""
    # An array's pickle names private functions of numpy; numpy itself says which.
    rebuild = np.empty(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    listed: list[Any] = [np.ndarray, np.dtype]
    for module in NUMPY_MODULES:
        makers = zip((rebuild, scalar), NUMPY_MAKERS)
        listed += [(maker, f"{module}.{name}") for maker, name in makers]
    kinds = (np.int64, np.int32, np.float32, np.float64, np.bool_)
    return listed + [type(np.dtype(kind)) for kind in kinds]


@contextlib.contextmanager
def weights_only_loads(module, root: Path) -> Iterator[None]:
    """While inside, `module` (OGB's loader) sees `_Torch` under the name torch."""
    before = module.torch
    module.torch = _Torch(root)
    try:
        yield
    finally:
        module.torch = before
