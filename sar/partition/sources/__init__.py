"""Graphs from where they lie: each input becomes a `GraphArrays`."""
