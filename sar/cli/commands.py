"""The table of commands: what each is called, which options it takes, what runs it."""

from __future__ import annotations

from pathlib import Path

from sar.cli import rules
from sar.cli.options import (
    ADDRESS,
    ALLOCATOR,
    BALANCE,
    CUT_MODEL,
    DISK_RATE,
    FILE,
    INPUT,
    JSON,
    LOSSY,
    MAP_FEATURES,
    MORE_RANKS,
    OUT_OF_CORE,
    OWN_MODEL,
    PATH,
    RANKS,
    RATE,
    TIMEOUT,
    picture,
)
from sar.cli.parser import Command, Group
from sar.config import SIZE, Policy
from sar.options import COUNT, POSITIVE, TEXT, ZERO_OR_MORE, Option, one_of, options_of, whole
from sar.run_options import DataOptions, ModelOptions, SampledOptions, TrainOptions
from sar.words import (
    ACTIVATIONS,
    BALANCES,
    CONSTANT_INPUTS,
    DEFAULT_METHOD,
    FORMATS,
    INPUTS,
    KEEP,
    METHODS,
    SELF_LOOPS,
)

# A line or two an option: the formatter would give each argument a line of its own.
# fmt: off
_OF_CUT = "sizes of parts and rows between them"
_CUT_MODEL = Group(
    "model", *CUT_MODEL,
    note="Any of these predicts memory and traffic of each rank; takes some seconds.",
)
_RANKS = (
    Group("ranks", *RANKS, *OUT_OF_CORE),
    Group("ranks, more", *MORE_RANKS, expert=True),
    Group("streaming", *options_of(Policy), MAP_FEATURES, expert=True),
    Group("gone", *LOSSY, expert=True),
)
_ALL = (
    Command(
        "partition", "sar.cli.partition:run", "cut a graph into partitions",
        "Cut a graph into partitions, one per rank, in DGL's partition_graph layout. "
        "The graph may be larger than memory. An interrupted run goes on from its cut.",
        Group(
            "input and output",
            Option("input", "the graph, see below", FILE, None, "INPUT", place=True),
            Option("parts", "number of partitions", POSITIVE, None, "P"),
            Option("out", "folder to write into", FILE, None, "DIR"),
            Option("name", "of the graph and of its JSON file", TEXT),
            Option("format", "layout", one_of(FORMATS), "dgl"),
            Option("overwrite", "replace partitions that are in DIR"),
            Option("add_digests", "cut nothing; give partitions that have none, as DGL's own, "
                   "digests of their files"),
        ),
        Group(
            "cut",
            Option("method", f"{KEEP} takes the parts of partitions that are read; default: "
                   f"{DEFAULT_METHOD}", one_of((*METHODS, KEEP))),
            Option("assignment", "the part of each node instead: .npy, a text file, or a folder of "
                   "one for each type", FILE),
            Option("balance", f"what parts share equally beside nodes: some of {','.join(BALANCES)}"
                   "; nodes: nothing else", BALANCE),
            Option("seed", "of the cut", COUNT, 0),
            Option("memory", "that the run may use, like 8GiB; default: no bound", SIZE),
        ),
        Group(
            "edges and data",
            Option("symmetrise", "every edge in both directions, once"),
            Option("drop_duplicates", "of equal edges keep the first"),
            Option("self_loops", "at each node", one_of(SELF_LOOPS), "keep"),
            Option("allow_nan", "take features that are no finite numbers"),
        ),
        Group("report", JSON, *picture(_OF_CUT)),
        _CUT_MODEL,
        rules=(rules.partition,), usage="INPUT --parts P --out DIR [options]",
        epilog=f"INPUT is one of: {INPUTS}.",
    ),
    Command(
        "inspect", "sar.cli.inspect:run", "show what partitions hold",
        "Show nodes, edges, halo, cut, balance and features of a partitioned graph; "
        "with --model, --layers or --hidden also what training such a model would take.",
        Group(
            "input",
            Option("parts", "the JSON file of the partitions, or a folder that PyG or GraphLearn "
                   "wrote", FILE, None, "PARTS.json", place=True),
        ),
        Group(
            "report", JSON, *picture(_OF_CUT),
            Option("check", "compare all files with the digests in the JSON; status 1 where one "
                   "differs", alias="verify"),
        ),
        _CUT_MODEL,
    ),
    Command(
        "plan", "sar.cli.plan:run", "predict memory, traffic and time of a run",
        "Predict peak memory, bytes an epoch and time of an epoch from counted rows, "
        "and from costs of the model that are measured on small graphs on this machine.",
        Group(
            "input",
            Option("graph", "partitions, or the name of a known graph such as ogbn-products", FILE,
                   None, "PARTS.json|NAME", place=True),
            Option("halo_share", "rows a rank receives over rows it owns; default: what a random "
                   "cut gives", ZERO_OR_MORE, expert=True),
            Option("as_stored", "do not add the reverse of every directed edge", expert=True),
        ),
        Group(
            "model", *options_of(ModelOptions),
            *(one for one in options_of(DataOptions) if one.name == "target_type"),
            Option("feature_width", "of the input; default: the graph's", POSITIVE, None, "F"),
            Option("classes", "of the output; default: the graph's, or 16", POSITIVE, None, "C"),
            Option("activations", "what is compared", one_of(ACTIVATIONS), ["keep", "recompute"],
                   "HOW", many="+"),
            Option("constant_inputs", "as of sar train", one_of(CONSTANT_INPUTS), "memory",
                   expert=True),
        ),
        Group(
            "machines",
            Option("hosts", "default: one for each part", POSITIVE),
            Option("ranks_per_host", "that share its link", POSITIVE, 1, "R"),
            Option("cores", "of a host; default: one for each thread", POSITIVE, None, "C"),
            Option("threads", "of a rank", POSITIVE, 1),
            Option("bandwidth", "of a host", RATE, "25Gbit"),
            Option("memory", "of a host, like 256GiB; with --out-of-core of the process", SIZE),
            Option("out_of_core", "for one machine that takes the parts in turns, with a file"),
            Option("disk", "what that disk reads and writes; default: 1GB/s", DISK_RATE),
        ),
        Group("report", JSON, *picture("memory and time against the number of ranks")),
        rules=(rules.model, rules.plan),
    ),
    Command(
        "train", "sar.cli.train:run", "train a model on a partitioned graph",
        "Train a model full-batch and exactly, one rank for each part of the graph. "
        "Starts the ranks on this machine, or is one of those that torchrun started.",
        Group("input", *INPUT, *options_of(DataOptions)),
        Group("model", *options_of(ModelOptions)),
        Group(
            "training", *options_of(TrainOptions),
            Option("activations", "what layers do with what backward needs", one_of(ACTIVATIONS),
                   "keep", expert=True),
            Option("activations_directory", "folder on a disk, for --activations offload", FILE,
                   None, "DIR", expert=True),
            Option("sampled", "train on mini-batches, not on the whole graph"),
            *options_of(SampledOptions),
        ),
        Group(
            "results",
            Option("checkpoint", "folder to save the run in", FILE, None, "DIR"),
            Option("resume", "continue from --checkpoint"),
            Option("json", "write all at the end, and epochs at once in OUT.jsonl", FILE, None,
                   "OUT.json"),
            Option("logger", "write epochs to jsonl:, csv:, tensorboard: or wandb:", TEXT, [],
                   "TO:WHERE", many="each"),
            *picture("curves, memory and traffic", dark_for_experts=True),
            Option("report", "write all of it as one page, .html", FILE),
            Option("explain", "show first what computes each layer", expert=True),
            Option("trace", "write what every rank did when, in Chrome's format", FILE, None,
                   "OUT.json", expert=True),
            Option("no_progress", "show no bar and no lines of epochs", expert=True),
        ),
        *_RANKS,
        rules=(rules.model, rules.ranks, rules.out_of_core, rules.sampling, rules.train),
    ),
    Command(
        "validate", "sar.cli.validate:run", "check that a model is the same on several ranks",
        "Run a model on a small graph, or on a piece of a large one, in one process and over "
        "ranks, forward and backward, and show the first module that differs and why. "
        "Status 1 where one does. Takes seconds, and no other processes.",
        Group(
            "input",
            Option("input", "partitions (.json, folder), or a graph", FILE, None, "INPUT",
                   place=True),
            *(one for one in options_of(DataOptions) if one.name in ("features", "labels")),
            Option("parts", "ranks", whole(2), 2, "P"),
        ),
        Group("model", *options_of(ModelOptions)),
        Group("report", JSON),
        rules=(rules.model,),
    ),
    Command(
        "evaluate", "sar.cli.evaluate:run", "predict every node from a checkpoint",
        "Run a checkpoint's model over the whole graph and write a prediction for "
        "every node, by its original id where the partitions hold orig_id.",
        Group("input", *INPUT),
        Group(
            "predictions",
            Option("checkpoint", "of `sar train`", FILE, None, "DIR", required=True),
            Option("out", "folder to write in", FILE, None, "DIR", required=True),
            Option("gather", "one predictions.npz instead of one file a rank"),
            Option("logits", "write the logits as well"),
            Option("which", "the model of the last epoch, or of the best validation metric",
                   one_of(("last", "best")), "last"),
            Option("features", "field of the input rows; default: as in training", TEXT),
            Option("labels", "field of the labels; default: as in training", TEXT),
            Option("model", "where your own model is now, as module:Class or file.py:Class; "
                   "default: as in training", OWN_MODEL),
        ),
        *_RANKS,
        rules=(rules.ranks, rules.out_of_core, rules.evaluate),
    ),
    Command(
        "report", "sar.cli.pictures:run", "write a page about a training run",
        "Write one HTML page, or a picture, of what sar train --json wrote.",
        Group(
            "report",
            Option("result", "of sar train --json", PATH, None, "RUN.json", place=True),
            Option("out", "a page, .html, or .png or .svg", PATH, required=True),
            Option("cut", "partitions, whose cut is drawn on the page", FILE, None, "PARTS.json"),
            Option("dark", "draw a picture on a dark ground"),
        ),
    ),
    Command(
        "sample-server", "sar.cli.sample_server:run",
        "make mini-batches of a partitioned graph for ranks that train",
        "Hold the partitions, one rank for each, and make mini-batches for trainers: "
        "scripts that call sar.sampling.connect. Ends when they have left.",
        Group("input", *INPUT),
        Group(
            "servers",
            Option("trainers", "ranks that will train", POSITIVE, None, "T", required=True),
            Option("address", "where they and the servers meet, an address of this host; port 0 is "
                   "any free one, which is printed", ADDRESS, "127.0.0.1:0"),
            Option("nproc", "servers to start here; default: one for each part", POSITIVE, None,
                   "P"),
            Option("threads", "threads of a server; default: its share of the cores", POSITIVE),
            TIMEOUT,
        ),
        fixed={"device": "cpu", "backend": "gloo", "allocator": "system"},
    ),
    Command(
        "environment", "sar.cli.launch:print_environment",
        "print the memory settings that ranks should start with",
        "Print shell commands that set for the ranks of torchrun how memory is "
        'allocated, as `sar train` does for its own: eval "$(sar environment)". What is set '
        "already stays. Threads are OMP_NUM_THREADS.",
        Group("memory", *ALLOCATOR),
    ),
    Command(
        "bench", "sar.cli.bench:run", "measure memory, speed and traffic on this machine",
        "Train one model on a generated graph with DGL in one process and with several "
        "numbers of ranks, in turns, and write tables and plots.",
        Group(
            "measurement",
            Option("scale", "2^SCALE nodes, at most 26", whole(8), 15),
            Option("method", "of the cuts", one_of(METHODS), "metis"),
            Option("model", "what is trained", one_of(("sage", "gat", "gatv2")), "sage"),
            Option("ranks", "numbers of ranks", POSITIVE, [1, 2, 4], "P", many="+"),
            Option("epochs", "measured ones", POSITIVE, 5),
            Option("bandwidth", "of hosts' links, where namespaces can be made", RATE,
                   ["100mbit", "300mbit", "1gbit"], many="*"),
            Option("sar_path", "IntelLabs SAR, beside", PATH, None, "CHECKOUT"),
            Option("out", "folder to write in", PATH, Path("bench"), "DIR"),
            Option("dark", "draw on a dark ground"),
            Option("cache", "of generated graphs", PATH, Path("build/benchmarks"), "DIR"),
        ),
        rules=(rules.bench,),
    ),
)
# fmt: on
COMMANDS = {one.name: one for one in _ALL}
