"""Words that options take, which the command line knows before anything is imported."""

from __future__ import annotations

# Training
SPLITS = ("train", "val", "test")
MODELS = ("sage", "gcn", "gin", "gat", "rgcn")
METRICS = ("accuracy", "f1-micro", "f1-macro", "roc-auc", "ogb-acc", "ogb-rocauc")
SCHEDULES = ("constant", "cosine", "plateau")
MFGS = ("auto", "on", "off")
ACTIVATIONS = ("keep", "recompute", "offload", "lossy_bfloat16")

# Streaming
CONSTANT_INPUTS = ("memory", "mapped", "off")
ALLOCATORS = ("system", "tbb")

# Cutting
METHODS = ("coarsen", "hotness", "metis", "random", "contiguous")
DEFAULT_METHOD = "coarsen"
KEEP = "keep"  # the parts that the input has
BALANCES = ("edges", "halo", "train")
SELF_LOOPS = ("keep", "add", "remove")
FORMATS = ("dgl", "pyg")
INPUTS = (
    "synthetic[:nodes=..,edges=..,seed=..], rmat[:scale=..,samples=..,seed=..], "
    "bibliography[:papers=..,seed=..], an .npz file, a file of dgl.save_graphs, PyG's Data in a "
    ".pt file, an OGB data set (ogbn-arxiv, ogbl-collab), a dgl.data one (cora), a description of "
    "tables (.yaml, .json), files of edges ('edges-*.parquet', .csv, .tsv, .npy), DGL's chunks "
    "(metadata.json), or partitions of DGL, PyG or GraphLearn (their .json or folder)"
)
SOFT_LIMITS_GONE = (
    "soft limits are gone: --allocator system keeps nothing, --allocator tbb all that it likes"
)
