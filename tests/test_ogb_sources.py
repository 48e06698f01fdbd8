"""OGB's data sets, from folders as its loaders leave them: nodes' and edges' splits as masks."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from harness.parts import load_all
from table_files import Trap

import sar
from sar import SarError
from sar.partition.sources.open import open_source

NODES = 20
RNG = np.random.default_rng(3)
EDGES = RNG.integers(0, NODES, (60, 2))
RELATION = RNG.integers(0, 4, 60)
PARTS = {"train": slice(0, 40), "valid": slice(40, 52), "test": slice(52, 60)}
MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
pytestmark = pytest.mark.filterwarnings("ignore:.*not writable.*:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def loaders() -> list:
    """OGB's modules; imported once, outside the checks of a test, for they set variables."""
    pytest.importorskip("pandas")
    pytest.importorskip("dgl")
    kinds = ("linkproppred", "nodeproppred")
    return [pytest.importorskip(f"ogb.{kind}.dataset_dgl") for kind in kinds]


def folder(root: Path, name: str, split_type: str, split: dict) -> Path:
    """Of a data set: its split, and a place for its tables, which is given back."""
    home = root / name.replace("-", "_")
    for below in ("raw", f"split/{split_type}", "processed"):
        (home / below).mkdir(parents=True)
    (home / "RELEASE_v1.txt").write_text("")
    for part, content in split.items():
        torch.save(content, home / "split" / split_type / f"{part}.pt")
    return home / "raw"


def tables(folder: Path, content: dict[str, object]) -> None:
    """Files of one column or several, by name."""
    pandas = pytest.importorskip("pandas")
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in content.items():
        pandas.DataFrame(table).to_csv(
            folder / f"{name}.csv.gz", header=False, index=False, compression="gzip", na_rep="nan"
        )


def counts(nodes: int, edges: int) -> dict[str, object]:
    return {"num-node-list": [nodes], "num-edge-list": [edges]}


def triples(graph: GraphArrays, etype, mask: str, column: str | None = None) -> list:
    ends, data = graph.edges[etype], graph.edge_data[etype]
    rows = [*ends, data[column]] if column else ends
    return [tuple(row) for row in torch.stack(list(rows), 1)[data[mask]].tolist()]


def collab(root: Path) -> Path:
    """Undirected: the split has one direction of each edge, and negatives."""
    split: dict = {
        part: {"edge": EDGES[rows], "weight": RELATION[rows] + 1, "year": RELATION[rows] + 2000}
        for part, rows in PARTS.items()
    }
    split["valid"]["edge_neg"] = split["test"]["edge_neg"] = EDGES[:5, ::-1].copy()
    raw = folder(root, "ogbl-collab", "time", split)
    weight, year = RELATION[:40] + 1, RELATION[:40] + 2000
    tables(raw, {"edge": EDGES[:40], "edge_weight": weight, "edge_year": year})
    tables(raw, {"node-feat": RNG.random((NODES, 3)), **counts(NODES, 40)})
    return root


def test_an_undirected_graph(tmp_path: Path) -> None:
    collab(tmp_path)
    for _ in range(2):  # from the raw files, then from OGB's cache
        with pytest.warns(UserWarning, match="valid.edge_neg, test.edge_neg") as told:
            graph = open_source(f"ogbl-collab:root={tmp_path}")
        assert len([one for one in told if "edge_neg" in str(one.message)]) == 1
        assert graph.total_edges == 120
        data = graph.edge_data[ETYPE_HOMO]
        assert set(data) == {"weight", "year", *MASKS.values()}
        for part, rows in PARTS.items():
            expected = []
            for (src, dst), weight in zip(EDGES[rows].tolist(), (RELATION[rows] + 1).tolist()):
                expected += [(src, dst, weight), (dst, src, weight)]
            assert triples(graph, ETYPE_HOMO, MASKS[part], "weight") == expected
        assert torch.equal(data["year"], data["weight"] + 1999)
        assert torch.equal(sum(data[mask].int() for mask in MASKS.values()), torch.ones(120).int())


def test_from_the_data_set_to_partitions(tmp_path: Path) -> None:
    """Read by a process of its own, written, and loaded."""
    source = f"ogbl-collab:root={collab(tmp_path / 'ogb')}"
    path = sar.partition_graph(source, tmp_path / "out", 2, method="random")
    loaded = load_all(path, 2)
    for mask, count in zip(MASKS.values(), (80, 24, 16)):
        assert sum(int(one.edge_features[f"_N:_E:_N/{mask}"].sum()) for one in loaded) == count


def test_a_directed_graph(tmp_path: Path) -> None:
    """Each true edge of valid and test has negatives of its own there."""
    split: dict = {
        part: {"source_node": EDGES[rows, 0], "target_node": EDGES[rows, 1]}
        for part, rows in PARTS.items()
    }
    for part in ("valid", "test"):
        split[part]["target_node_neg"] = np.zeros((len(split[part]["source_node"]), 7), int)
    raw = folder(tmp_path, "ogbl-citation2", "time", split)
    tables(raw, {"edge": EDGES[:40], "node_year": np.arange(NODES), **counts(NODES, 40)})
    with pytest.warns(UserWarning, match="valid.target_node_neg, test.target_node_neg"):
        graph = open_source(f"ogbl-citation2:root={tmp_path}")
    assert torch.stack(graph.edges[ETYPE_HOMO], 1).tolist() == EDGES.tolist()
    for part, rows in PARTS.items():
        mask = graph.edge_data[ETYPE_HOMO][MASKS[part]]
        assert mask.nonzero()[:, 0].tolist() == list(range(60))[rows]


def test_a_graph_in_one_archive(tmp_path: Path) -> None:
    """`ogbl-vessel` has both directions; edges that are held out have no features."""
    split: dict = {part: {"edge": EDGES[rows]} for part, rows in PARTS.items()}
    split["train"]["edge_neg"] = EDGES[:3]
    raw = folder(tmp_path, "ogbl-vessel", "spatial", split)
    both = np.concatenate([EDGES[:40], EDGES[:40, ::-1]]).T
    np.savez(
        raw / "data.npz", edge_index=both, num_nodes_list=[NODES], num_edges_list=[80],
        node_feat=RNG.random((NODES, 3), dtype=np.float32), edge_feat=np.ones((80, 2), np.float32),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="left out: train.edge_neg$"):
        graph = open_source(f"ogbl-vessel:root={tmp_path}")
    data = graph.edge_data[ETYPE_HOMO]
    assert graph.total_edges == 120 and int(data["train_mask"].sum()) == 80
    assert torch.equal(data["feat"], data["train_mask"].float()[:, None].expand(-1, 2))


def test_relations_as_a_column(tmp_path: Path) -> None:
    split = {
        part: {"head": EDGES[rows, 0], "tail": EDGES[rows, 1], "relation": RELATION[rows]}
        for part, rows in PARTS.items()
    }
    raw = folder(tmp_path, "ogbl-wikikg2", "time", split)
    tables(raw, {"edge": EDGES[:40], "edge_reltype": RELATION[:40], **counts(NODES, 40)})
    graph = open_source(f"ogbl-wikikg2:root={tmp_path}")
    for part, rows in PARTS.items():
        expected = np.column_stack([EDGES[rows], RELATION[rows]]).tolist()
        assert [list(row) for row in triples(graph, ETYPE_HOMO, MASKS[part], "etype")] == expected


ETYPES = [("drug", "treats", "disease"), ("drug", "with", "drug"), ("protein", "in", "disease")]


def biokg(root: Path, broken: bool = False) -> None:
    """Relations are edge types; ids are inside types, and types of ends are texts."""
    split: dict = {}
    for part, rows in PARTS.items():
        kinds = [ETYPES[one % 3] for one in RELATION[rows]]
        split[part] = {
            "head": EDGES[rows, 0], "tail": EDGES[rows, 1], "relation": RELATION[rows] % 3,
            "head_type": [kind[0] for kind in kinds], "tail_type": [kind[2] for kind in kinds],
        }  # fmt: skip
    if broken:
        split["test"]["head_type"][0] = "nobody"
    raw = folder(root, "ogbl-biokg", "random", split)
    lines = f"drug,disease,protein\n{NODES},{NODES},{NODES}\n"
    (raw / "num-node-dict.csv.gz").write_bytes(gzip.compress(lines.encode()))
    tables(raw, {"triplet-type-list": ETYPES})
    for number, etype in enumerate(ETYPES):
        rows = EDGES[:40][RELATION[:40] % 3 == number]
        relation: dict = {"edge": rows, "edge_reltype": np.full(len(rows), number)}
        relation["num-edge-list"] = [len(rows)]
        tables(raw / "relations" / "___".join(etype), relation)


def test_relations_as_edge_types(tmp_path: Path) -> None:
    biokg(tmp_path)
    graph = open_source(f"ogbl-biokg:root={tmp_path}")
    assert set(graph.edges) == set(ETYPES) and graph.total_edges == 60
    for number, etype in enumerate(ETYPES):
        assert (graph.edge_data[etype]["etype"] == number).all()
        for part, rows in PARTS.items():
            expected = EDGES[rows][RELATION[rows] % 3 == number].tolist()
            assert [list(row) for row in triples(graph, etype, MASKS[part])] == expected


def test_a_split_of_another_graph(tmp_path: Path) -> None:
    biokg(tmp_path / "a", broken=True)
    with pytest.raises(SarError, match="ogbl-biokg.*contradict each other: KeyError.*'nobody'"):
        open_source(f"ogbl-biokg:root={tmp_path / 'a'}")
    home = collab(tmp_path / "b") / "ogbl_collab"
    torch.save({"edge": EDGES[:7]}, home / "split" / "time" / "train.pt")
    with pytest.warns(UserWarning), pytest.raises(SarError, match="80 edges, but training 7"):
        open_source(f"ogbl-collab:root={tmp_path / 'b'}")


@pytest.mark.parametrize("name", ["ogbl-collab", "ogbn-arxiv"])
def test_files_cannot_run_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = {"ogbl-collab": collab, "ogbn-arxiv": arxiv}[name](tmp_path) / name.replace("-", "_")
    file = "valid.pt" if name == "ogbl-collab" else "split_dict.pt"
    torch.save({"edge": Trap()}, home / "split" / "time" / file)
    with pytest.raises(SarError, match="more than arrays"):
        open_source(f"{name}:root={tmp_path}")
    assert not (tmp_path / "trapped").exists()


# ----------------------------------------------------------------------------------------- nodes


def arxiv(root: Path) -> Path:
    """One label is missing."""
    split = {"train": np.arange(10), "valid": np.arange(10, 15), "test": np.arange(15, 20)}
    raw = folder(root, "ogbn-arxiv", "time", {"split_dict": split})
    label = np.where(np.arange(NODES) == 5, np.nan, np.arange(NODES))
    tables(raw, {"edge": EDGES, "node-label": label, **counts(NODES, len(EDGES))})
    tables(raw, {"node-feat": RNG.random((NODES, 4)), "node_year": RNG.integers(2000, 2020, NODES)})
    return root


def test_nodes_with_labels(tmp_path: Path, loaders) -> None:
    arxiv(tmp_path)
    for _ in range(2):  # from the raw files, then from OGB's cache
        graph = open_source(f"ogbn-arxiv:root={tmp_path}")
        data = graph.node_data[NTYPE_HOMO]
        assert (graph.total_nodes, graph.total_edges) == (NODES, len(EDGES))
        assert data["label"].dtype == torch.int64
        assert data["label"].tolist() == [-1 if i == 5 else i for i in range(NODES)]
        assert data["val_mask"].nonzero()[:, 0].tolist() == [10, 11, 12, 13, 14]
    assert all(loader.torch is torch for loader in loaders), "OGB's modules are as they were"


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(-1), EOFError()], ids=repr)
def test_a_download_that_fails(tmp_path, monkeypatch, loaders, error) -> None:
    def refuse(url: str) -> None:
        raise error

    monkeypatch.setattr(loaders[1], "decide_download", refuse)
    with pytest.raises(SarError, match="ogbn-arxiv"):
        open_source(f"ogbn-arxiv:root={tmp_path}")
