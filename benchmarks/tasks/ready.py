"""Start ranks and tell when all have met: ``python ready.py RANKS``, of the ``sar`` on the path."""

from __future__ import annotations

import sys
import time

import sar


def meet() -> float:
    import torch

    sar.initialize_comms().all_reduce(torch.ones(1))
    return time.time()


if __name__ == "__main__":
    print(sar.launch(meet, int(sys.argv[1])))
