"""Partitions on disk: the partition book, the binary reader and the loader of one part."""
