"""Seeded graphs made on the spot: communities and papers to learn on, R-MAT to measure with."""

import operator

import numpy as np
import torch
from torch import Tensor

from sar import expect
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays, need

MAX_DRAWS = 100


def community_graph(
    nodes: int = 100_000,
    edges: int = 1_000_000,
    seed: int = 0,
    *,
    classes: int = 16,
    features: int = 100,
    homophily: float = 0.6,
    signal: float = 0.25,
    exponent: float = 2.5,
) -> GraphArrays:
    """Community graph with skewed degrees and noisy features, symmetric and simple.

    The label of a node is its community. A share `homophily` of the sampled edges stays inside a
    community, the others join any two nodes; end points are drawn with power-law weights
    (`exponent` is that of the degree distribution). Features are float32 [nodes, features]: a
    unit-variance Gaussian around `signal` x a random vector per class, too noisy to classify alone
    and clear once averaged over neighbors.

    edges: directed edges, both directions counted; the graph has exactly that many (one more when
        odd).
    Masks: 60 % train, 20 % validation, 20 % test. Raises ValueError for impossible sizes.
    """
    _whole(nodes, "nodes", 2)
    # Rejection of duplicates stays fast while at most a quarter of all pairs is asked for.
    _whole(edges, "edges", 0, max(2, nodes * (nodes - 1) // 4))
    _whole(classes, "classes", 1)
    _whole(features, "features", 1)
    expect.number(homophily, "homophily", at_least=0, at_most=1)
    expect.number(exponent, "exponent", above=1)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, nodes)
    pairs = _community_pairs(rng, labels, classes, (edges + 1) // 2, homophily, exponent)
    data = _around(rng, labels, classes, features, signal)
    src, dst = _both_directions(pairs, nodes)
    return _homogeneous("synthetic", nodes, src, dst, data, rng)


def rmat_graph(
    scale: int = 17,
    samples: int = 2_000_000,
    a: float = 0.57,
    b: float = 0.19,
    c: float = 0.19,
    seed: int = 0,
    *,
    features: int = 128,
    classes: int = 16,
) -> GraphArrays:
    """R-MAT graph (Chakrabarti, Zhan, Faloutsos 2004) of 2^scale nodes: random features and labels.

    `samples` directed edges are drawn, ids permuted, loops and duplicates removed, both directions
    kept, then a self loop is added to every node. The defaults give about 3.7 million directed
    edges. The classes cannot be learned: the graph is for measuring. Raises ValueError for
    impossible parameters.
    """
    _whole(scale, "scale", 1, 30)
    _whole(samples, "samples", 0)
    _whole(features, "features", 1)
    _whole(classes, "classes", 1)
    is_good = min(a, b, c) >= 0 and a + b + c <= 1
    need(is_good, f"a, b, c are {a}, {b}, {c}, expected none negative, sum at most 1")
    rng = np.random.default_rng(seed)
    nodes = 1 << scale
    src, dst = np.zeros((2, samples), dtype=np.int64)
    for _ in range(scale):
        draw = rng.random(samples)
        down = draw >= a + b
        right = ((draw >= a) & ~down) | (draw >= a + b + c)
        src, dst = 2 * src + down, 2 * dst + right
    relabel = rng.permutation(nodes)
    src, dst = _both_directions(_simple_keys(relabel[src], relabel[dst], nodes), nodes)
    loops = np.arange(nodes)
    data = {
        "feat": torch.from_numpy(rng.standard_normal((nodes, features), dtype=np.float32)),
        "label": torch.from_numpy(rng.integers(0, classes, nodes)),
    }
    src, dst = np.concatenate([src, loops]), np.concatenate([dst, loops])
    return _homogeneous("rmat", nodes, src, dst, data, rng)


def bibliography_graph(
    papers: int = 2000,
    seed: int = 0,
    *,
    classes: int = 4,
    features: int = 16,
    homophily: float = 0.8,
    signal: float = 0.25,
) -> GraphArrays:
    """Papers, authors (half as many) and terms (a tenth), five relations, communities in all types.

    Each paper has two authors, three terms and three papers that it cites, inside its community
    with probability `homophily`. Only papers have features, as noisy as those of
    :func:`community_graph`, labels (their community) and masks. Raises ValueError for impossible
    parameters.
    """
    counts = {"author": papers // 2, "paper": papers, "term": papers // 10}
    _whole(classes, "classes", 1)
    _whole(papers, "papers", 10 * classes)
    _whole(features, "features", 1)
    expect.number(homophily, "homophily", at_least=0, at_most=1)
    rng = np.random.default_rng(seed)
    homes = {ntype: rng.permutation(np.arange(count) % classes) for ntype, count in counts.items()}
    rows = {}
    for ntype, each in (("author", 2), ("term", 3), ("paper", 3)):
        wanted = np.repeat(homes["paper"], each)
        inside = rng.random(len(wanted)) < homophily
        wanted = np.where(inside, wanted, rng.integers(0, classes, len(wanted)))
        order = np.argsort(homes[ntype], kind="stable")
        starts = np.searchsorted(homes[ntype][order], np.arange(classes + 1))
        drawn = starts[wanted] + rng.random(len(wanted)) * np.diff(starts)[wanted]
        ends = order[drawn.astype(np.int64)]
        rows[ntype] = torch.arange(papers).repeat_interleave(each), torch.from_numpy(ends)
    edges = {
        ("author", "writes", "paper"): (rows["author"][1], rows["author"][0]),
        ("paper", "cites", "paper"): rows["paper"],
        ("paper", "has", "term"): rows["term"],
        ("paper", "written_by", "author"): rows["author"],
        ("term", "of", "paper"): (rows["term"][1], rows["term"][0]),
    }
    data = _around(rng, homes["paper"], classes, features, signal) | _random_masks(rng, papers)
    return GraphArrays("bibliography", counts, edges, {"paper": data}).with_orig_ids()


def _whole(value: int, name: str, least: int, most: int | None = None) -> None:
    expect.integer(operator.index(value), name, at_least=least, at_most=most)


def _around(
    rng: np.random.Generator, labels: np.ndarray, classes: int, features: int, signal: float
) -> dict[str, Tensor]:
    """Labels, and features around a random vector of each class."""
    centers = rng.standard_normal((classes, features), dtype=np.float32) * np.float32(signal)
    feat = rng.standard_normal((len(labels), features), dtype=np.float32)
    feat += centers[labels]
    return {"feat": torch.from_numpy(feat), "label": torch.from_numpy(labels)}


def _community_pairs(
    rng: np.random.Generator,
    labels: np.ndarray,
    classes: int,
    wanted: int,
    homophily: float,
    exponent: float,
) -> np.ndarray:
    """`wanted` distinct undirected edges as sorted keys low * N + high."""
    nodes = len(labels)
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(classes + 1))
    # Pareto weights give power-law degrees; the cap keeps one hub from touching every node.
    weights = np.minimum((1 - rng.random(nodes)) ** (-1 / (exponent - 1)), nodes**0.5)
    keys = np.zeros(0, dtype=np.int64)
    for _ in range(MAX_DRAWS):
        if len(keys) >= wanted:
            break
        cumulative = np.concatenate([[0.0], np.cumsum(weights)])
        bounds = cumulative[starts]
        count = int((wanted - len(keys)) * 1.2) + 16
        src = _draw(rng, cumulative, np.zeros(count), np.full(count, cumulative[-1]))
        home = labels[order[src]]
        inside = rng.random(count) < homophily
        low = np.where(inside, bounds[home], 0.0)
        high = np.where(inside, bounds[home + 1], cumulative[-1])
        dst = _draw(rng, cumulative, low, high)
        fresh = _simple_keys(order[src], order[dst], nodes)
        keys = np.union1d(keys, fresh)
        # Hubs saturate in dense graphs: flatter weights every time, so that the loop ends.
        weights = weights**0.9
    what = f"found {len(keys)} distinct undirected edges of {wanted}: too many for {nodes} nodes"
    is_good = len(keys) >= wanted
    need(is_good, f"{what}, {classes} classes and homophily {homophily}")
    return np.sort(rng.permutation(keys)[:wanted])


def _draw(
    rng: np.random.Generator, cumulative: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """One weighted position per row, among those whose cumulative weight lies in [low, high)."""
    point = low + rng.random(len(low)) * (high - low)
    found = np.searchsorted(cumulative, point, side="right") - 1
    return np.minimum(found, len(cumulative) - 2)


def _simple_keys(src: np.ndarray, dst: np.ndarray, nodes: int) -> np.ndarray:
    """Undirected edges without loops and duplicates, as sorted keys low * nodes + high."""
    low, high = np.minimum(src, dst), np.maximum(src, dst)
    return np.unique((low * nodes + high)[low != high])


def _both_directions(keys: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = keys // nodes, keys % nodes
    return np.concatenate([low, high]), np.concatenate([high, low])


def _random_masks(rng: np.random.Generator, nodes: int) -> dict[str, Tensor]:
    draw = torch.from_numpy(rng.random(nodes))
    return {
        "train_mask": draw < 0.6,
        "val_mask": (draw >= 0.6) & (draw < 0.8),
        "test_mask": draw >= 0.8,
    }


def _homogeneous(
    name: str,
    nodes: int,
    src: np.ndarray,
    dst: np.ndarray,
    data: dict[str, Tensor],
    rng: np.random.Generator,
) -> GraphArrays:
    edges = {ETYPE_HOMO: (torch.from_numpy(src), torch.from_numpy(dst))}
    data |= _random_masks(rng, nodes)
    return GraphArrays(name, {NTYPE_HOMO: nodes}, edges, {NTYPE_HOMO: data}).with_orig_ids()
