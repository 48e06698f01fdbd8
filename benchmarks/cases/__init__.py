"""The benchmarks: each module registers its own, so a new file here is a new benchmark."""
