"""Measurements with bounds: ``python -m benchmarks list``, ``python -m benchmarks run NAME``.

A benchmark is a function in :mod:`benchmarks.cases`; what it measures runs in processes of its own
(:mod:`benchmarks.cluster`), because memory and the allocator's state are a process' own.
"""
