"""What runs inside the measured processes; see :mod:`benchmarks.worker`."""
