"""Wrong uses: each ends in one message that names the argument, what came and what was expected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sar
from sar.__main__ import USER_ERROR, main
from sar.cli import launch
from sar.comm import LocalGroup, use_group

GRAPH = "synthetic:nodes=60,edges=240,seed=0"

# Words after `sar`, and what the message has to say. {json}: of a graph in two parts.
COMMANDS: list[tuple[str, list[str]]] = [
    ("tran {json}", ["tran", "did you mean train"]),
    ("train nowhere.json", ["nowhere.json", "no such file"]),
    ("train {folder}", ["{folder}", "named by their JSON", "{json}"]),
    ("train {json} --features fat", ["features", "'fat'", "did you mean 'feat'"]),
    ("train {json} --labels lable", ["labels", "'lable'", "did you mean 'label'"]),
    ("train {json} --model sagee", ["--model", "sagee", "did you mean sage"]),
    ("train {json} --epochz 3", ["--epochz", "did you mean --epochs"]),
    ("train {json} --epochs -1", ["--epochs", "-1", "1 or more"]),
    ("train {json} --lr nan", ["lr", "nan", "more than 0"]),
    ("train {json} --dropout 1.5", ["--dropout", "1.5", "less than 1"]),
    ("train {json} --model gat --heads 3 --hidden 64", ["heads", "3", "divisor", "64"]),
    ("train {json} --layers 0", ["--layers", "0", "1 or more"]),
    ("train {json} --nproc 3", ["2 parts", "3 ranks", "--parts 3"]),
    ("train {json} --nproc 0", ["--nproc", "0", "1 or more"]),
    ("train {json} --threads 0", ["--threads", "0", "1 or more"]),
    ("train {json} --timeout 0", ["--timeout", "0", "more than 0"]),
    ("train {json} --memory-budget 4GX", ["--memory-budget", "4GX", "4GiB"]),
    ("train {json} --device cuda", ["--device", "cuda", "use cpu"]),
    ("train {json} --backend nccl", ["--backend", "nccl", "--device cuda"]),
    ("train {json} --allocator tbbb", ["--allocator", "tbbb", "did you mean tbb"]),
    ("train {json} --soft-limit 4GiB", ["--soft-limit", "4GiB", "gone", "tbb"]),
    ("train {json} --resume", ["--resume", "--checkpoint"]),
    ("train {json} --features label", ["features: 'label' has shape", "expected"]),
    ("train {json} --rounds 0", ["rounds: got '0'"]),
    ("train {json} --rounds 1 --memory-budget 1GiB", ["--rounds and --memory-budget: got both"]),
    ("train {json} --block-bytes 0", ["--block-bytes: got '0', expected more than 0 bytes"]),
    ("train {json} --structure forward", ["--structure: got 'forward'"]),
    ("train {json} --activations-directory .", ["expected --activations offload with it"]),
    ("train {json} --json /proc/no/x.json", ["--json: cannot write in '/proc/no'"]),
    ("train {json} --plot x.gif", ["--plot: got 'x.gif', expected a name that ends in .png or"]),
    ("train {json} --report x.svg", ["--report: got 'x.svg', expected a name that ends in .html"]),
    ("train {json} --checkpoint /proc/no", ["--checkpoint: cannot write in '/proc/no'"]),
    ("train {json} --checkpoint {json}", ["--checkpoint", "{json}"]),
    ("train {json} --fanouts 10", ["--fanouts", "--sampled"]),
    ("train {json} --sampled --fanouts 10,x", ["--fanouts", "10,x", "15,10,5"]),
    ("train {json} --sampled --fanouts 10", ["fanouts", "1", "3 layers"]),
    ("train {json} --lossy-boundary-rate 2", ["--lossy-boundary-rate", "2", "gone", "--zeros"]),
    ("train table.csv", ["features", "feat", "orig_id"]),
    ("partition junk.pt --parts 2 --out o", ["junk.pt", "edge_index", "HeteroData"]),
    ("inspect table.csv", ["table.csv", "JSON", "sar partition"]),
    ("inspect moved.json", ["part0", "no such file"]),
    ("evaluate {json} --checkpoint nowhere --out o", ["--checkpoint", "nowhere"]),
    ("plan ogbn-paper100M --hosts 4", ["ogbn-paper100M", "did you mean ogbn-papers100M"]),
    ("partition nowhere.npz --parts 2 --out o", ["nowhere.npz", "does not exist"]),
    ("partition synthetic:nodez=9 --parts 2 --out o", ["nodez", "did you mean 'nodes'"]),
    ("partition {graph} --parts 90 --out o", ["90", "60 nodes", "one part a node"]),
    ("partition {graph} --parts 0 --out o", ["--parts", "0", "1 or more"]),
    ("partition {graph} --parts 2 --out {folder}", ["{folder}", "not empty", "--overwrite"]),
    ("partition {graph} --parts 2 --out o --memory 1KiB", ["memory", "1,024 bytes", "GiB"]),
    ("partition {graph} --parts 2 --out o --method metiss", ["--method", "did you mean metis"]),
    ("partition {graph} --parts 2 --out o --balance edgs", ["--balance", "edgs", "edges"]),
    ("partition ogbn-prodcts --parts 2 --out o", ["ogbn-prodcts", "did you mean 'ogbn-products'"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("wrong")
    sar.partition_graph(GRAPH, where / "parts", 2, method="random")
    sar.partition_graph(GRAPH, where / "one", 1)
    (where / "table.csv").write_text("src,dst\n0,1\n1,2\n2,0\n")
    torch.save({"weight": torch.ones(3)}, where / "junk.pt")
    (where / "moved.json").write_bytes((where / "parts" / "synthetic.json").read_bytes())
    return where


@pytest.mark.parametrize(("words", "expected"), COMMANDS, ids=lambda v: v if type(v) is str else "")
def test_a_command(
    words: str, expected: list[str], folder: Path, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    """It ends before a rank is started, and writes nothing."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "run_ranks", started)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    names = {"json": "parts/synthetic.json", "folder": "parts", "graph": GRAPH}
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as left:
        raise SystemExit(main(words.format(**names).split()))
    assert left.value.code == USER_ERROR
    message = capsys.readouterr().err
    for text in expected:
        assert text.format(**names) in message
    assert "Traceback" not in message and message.count("error:") == 1
    assert sorted(folder.rglob("*")) == before


class Uses:
    """What a script has at hand."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "one" / "synthetic.json"
        self.data = sar.load_partition_data(self.path, 0)
        self.graph = sar.construct_full_graph(self.data)
        self.x = self.data.node_features["_N/feat"]
        self.mask = self.data.node_features["_N/train_mask"].bool()
        self.layer = sar.models.SAGEConv(self.x.shape[1], 4)

    @property
    def dgl(self) -> Any:
        return pytest.importorskip("dgl")

    def columns(self, rows: torch.Tensor) -> None:
        self.graph.ndata["h"] = rows

    def copy(self, column: str) -> None:
        fn = self.dgl.function
        self.graph.update_all(fn.copy_u(column, "m"), fn.sum("m", "out"))


Use = Callable[[Uses], Any]
CALLS: dict[str, tuple[Use, type[Exception], list[str]]] = {
    "no such file": (
        lambda u: sar.load_partition_data("no.json", 0), sar.PartitionError, ["no.json"],
    ),
    "not a JSON": (
        lambda u: sar.load_partition_data(__file__, 0), sar.PartitionError,
        ["test_wrong_uses.py", "sar partition"],
    ),
    "part": (lambda u: sar.load_partition_data(u.path, 5), ValueError, ["part_id", "5", "0 to 0"]),
    "an absent device": (
        lambda u: sar.load_partition_data(u.path, 0, "cuda:77"), ValueError, ["device", "cuda:77"],
    ),
    "a device of no name": (
        lambda u: sar.load_partition_data(u.path, 0, "gpu"), ValueError, ["device", "'gpu'"],
    ),
    "graph to": (lambda u: u.graph.to("gpu"), ValueError, ["device", "'gpu'", "'cpu'"]),
    "rounds": (lambda u: sar.Policy(rounds=0), ValueError, ["rounds", "0", "at least 1"]),
    "zeros": (lambda u: sar.Policy(zeros="skp"), ValueError, ["zeros", "'skp'", "'skip'"]),
    "budget": (lambda u: sar.Policy(memory_budget="4GX"), ValueError, ["memory_budget", "4GX"]),
    "rows": (lambda u: u.columns(u.x[1:]), ValueError, ["'h'", "59", "60 rows", "_N"]),
    "layer's rows": (lambda u: u.layer(u.graph, u.x[1:]), ValueError, ["59", "60"]),
    "no column": (lambda u: u.copy("h"), KeyError, ["'h'", "_N", "there are"]),
    "a mean of a mean": (
        lambda u: sar.global_mean(u.layer(u.graph, u.x).mean(), u.mask), ValueError,
        ["values", "()", "[N]"],
    ),
    "activations": (
        lambda u: sar.set_activations(u.layer, "offlod"), ValueError,
        ["activations", "'offlod'", "offload"],
    ),
    "a model": (lambda u: sar.sync_params("model"), TypeError, ["model", "str", "Module"]),
    "explain": (lambda u: sar.explain(u.layer, "g"), TypeError, ["graph", "str", "sharded"]),
    "blocks": (
        lambda u: sar.construct_mfgs(u.data, torch.tensor([10**6]), 2), ValueError,
        ["seed_nodes", "1000000", "[0, 60)"],
    ),
    "edges of a part": (lambda u: u.graph.edges(), sar.NotSupportedError, ["before it is cut"]),
    "more edges": (
        lambda u: u.graph.add_edges([0], [1]), AttributeError, ["add_edges", "partition"],
    ),
    "a subgraph": (lambda u: u.graph.subgraph([0]), AttributeError, ["subgraph", "sar.sampling"]),
    "DGL's sampler": (
        lambda u: u.dgl.dataloading.NeighborSampler([2]).sample(u.graph, torch.arange(3)),
        AttributeError, ["sample_neighbors", "sar.sampling"],
    ),
    "bidirected": (
        lambda u: u.dgl.to_bidirected(u.graph), sar.NotSupportedError, ["before it is cut"],
    ),
    "relation": (lambda u: u.graph["follows"], ValueError, ["etype", "'follows'", "_E"]),
    "what is gone": (
        lambda u: sar.Policy(lossy=sar.Lossy("int8", 0.5)), sar.NotSupportedError,  # type: ignore
        ["sar.Lossy", "gone", "zeros='skip'"],
    ),
    "parts": (
        lambda u: sar.partition_graph(GRAPH, "out", "4"), TypeError, ["num_parts", "'4'", "int"],
    ),
    "source": (
        lambda u: sar.partition_graph(np.zeros(3), "out", 2), TypeError, ["ndarray"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def uses(folder: Path) -> Uses:
    return Uses(folder)


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name: str, uses: Uses, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    call, kind, expected = CALLS[name]
    with pytest.raises(kind) as caught:
        call(uses)
    for text in expected:
        assert text in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_whose_ranks_nobody_joins(variable: str, uses: Uses, monkeypatch: Any) -> None:
    """Each process would train alone, on part 0."""
    monkeypatch.setenv(variable, "2")
    calls: list[Callable[[], Any]] = [
        lambda: sar.load_partition_data(uses.path),
        lambda: sar.construct_full_graph(uses.data),
        lambda: sar.construct_mfgs(uses.data, torch.tensor([1]), 1),
    ]
    for call in calls:
        with pytest.raises(sar.CommError, match=rf"sar.initialize_comms\(\), and {variable}=2"):
            call()
    with use_group(LocalGroup()):  # whoever says so is alone
        calls[0]()
    monkeypatch.setenv(variable, "1")
    calls[0]()
