"""Mini-batches of 1024 seeds: sar's loaders, DistDGL's, and DGL's in one process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, HIDDEN = 1024, 256
_CLASSES = 47


class _Sage(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        from dgl.nn import SAGEConv

        widths = [width, *[HIDDEN] * (layers - 1), _CLASSES]
        self.layers = nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x if number == 0 else x.relu())
        return x


class _Contender:
    """Goes through batches, with or without a training step on each.

    Attributes:
        helpers: other processes that work for this one; their processor time counts.
    """

    helpers: list[int]

    def __init__(self) -> None:
        self.helpers = []

    def batches(self) -> Iterator[tuple[list[Any], Tensor, Tensor]]:
        """Blocks, rows of the input nodes, labels of the seeds; of one epoch."""
        raise NotImplementedError

    def begin(self, layers: int) -> None:
        """A model to train."""
        torch.manual_seed(0)
        self.model = _Sage(100, layers)
        self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.003)

    def epoch(self, trains: bool = False) -> dict[str, float]:
        """Batches, seconds of the wall and of processors, and distinct nodes a batch."""
        started, cpu = time.perf_counter(), self._cpu()
        count, nodes = 0, 0
        for blocks, x, y in self.batches():
            count, nodes = count + 1, nodes + len(x)
            if trains:
                self._step(blocks, x, y)
        wall, cpu = time.perf_counter() - started, self._cpu() - cpu
        return {"batches": count, "wall": wall, "cpu": cpu, "nodes": nodes / count}

    def _step(self, blocks: list[Any], x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(self.wrapped(blocks, x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _cpu(self) -> float:
        return time.process_time() + sum(map(_cpu_of, self.helpers))


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Ours(_Contender):
    """A rank with its partition."""

    def __init__(self, parts: str, fanouts: list[int], **options: Any) -> None:
        super().__init__()
        import sar
        from sar.sampling import NeighborLoader

        data = sar.load_dgl_partition_data(parts, sar.initialize_comms().rank, "cpu")
        fields = {"_N": ["feat", "label"]}
        given = {"batch_size": BATCH, "shuffle": True, "as_": "dgl", "fields": fields, **options}
        self.loader = NeighborLoader(data, fanouts, **given)

    def batches(self) -> Iterator[tuple[list[Any], Tensor, Tensor]]:
        for _, _, blocks in self.loader:
            if blocks[-1].num_dst_nodes():
                yield blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]

    def spared(self) -> dict[str, float]:
        """What the cache had of other ranks' rows."""
        return {"needed": self.loader.cache.needed, "had": self.loader.cache.had}


class DistDgl(_Contender):
    """A client of DistDGL and the server beside it, on an address of this host's own."""

    def __init__(self, servers: int, parts: str, fanouts: list[int]) -> None:
        super().__init__()
        rank, size, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        _end_with_parent()
        folder = tempfile.mkdtemp()
        addresses = Path(folder) / "addresses"
        addresses.write_text("".join(f"127.0.0.{p + 1} {servers}\n" for p in range(size)))
        os.environ |= {
            "DGL_DIST_MODE": "distributed", "DGL_NUM_SAMPLER": "0", "DGL_NUM_CLIENT": str(size),
            "DGL_NUM_SERVER": "1", "DGL_CONF_PATH": parts, "DGL_IP_CONFIG": str(addresses),
            "DGL_GRAPH_FORMAT": "csc", "DGL_KEEP_ALIVE": "0",
        }  # fmt: skip
        own = {"DGL_ROLE": "server", "DGL_SERVER_ID": str(rank)}
        words = [sys.executable, "-m", __name__, str(rank)]
        server = subprocess.Popen(words, env=os.environ | own, stdout=subprocess.DEVNULL)
        self.helpers.append(server.pid)
        threading.Thread(target=_end_with, args=(server,), daemon=True).start()
        os.environ["DGL_ROLE"] = "client"
        dgl, distributed = _dist_dgl(rank)
        distributed.initialize(str(addresses))
        torch.distributed.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
        )
        name = Path(parts).stem
        self.graph = distributed.DistGraph(name, part_config=parts)
        seeds = self.graph.get_partition_book().partid2nids(rank)
        sampler = dgl.dataloading.NeighborSampler(fanouts[::-1])
        self.loader = dgl.dataloading.DistNodeDataLoader(
            self.graph, seeds, sampler, batch_size=BATCH, shuffle=True, drop_last=False
        )

    def batches(self) -> Iterator[tuple[list[Any], Tensor, Tensor]]:
        for inputs, seeds, blocks in self.loader:
            yield blocks, self.graph.ndata["feat"][inputs], self.graph.ndata["label"][seeds]


def _end_with_parent() -> None:
    """Be killed when the process that started this one has ended: DistDGL would wait on."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


def _end_with(server: subprocess.Popen) -> None:
    """End this process with its server: it would wait for the server for ever."""
    print(f"DistDGL's server ended with status {server.wait()}", file=sys.stderr, flush=True)
    os._exit(1)


def _dist_dgl(rank: int) -> Any:
    """DGL and its distributed part, which finds this rank's machine by its address."""
    import dgl
    from dgl import distributed
    from dgl.distributed import rpc_client

    rpc_client.local_ip4_addr_list = lambda: {f"127.0.0.{rank + 1}"}
    return dgl, distributed


class OneDgl(_Contender):
    """DGL's loader in one process that has the whole graph."""

    def __init__(self, file: str, fanouts: list[int]) -> None:
        super().__init__()
        import dgl

        from benchmarks.graphs import read_graph

        whole = read_graph(file)
        self.feat, self.label = whole["feat"], whole["label"]
        graph = dgl.graph((whole["src"], whole["dst"]), num_nodes=len(self.label)).formats("csc")
        sampler = dgl.dataloading.NeighborSampler(fanouts[::-1])
        self.loader = dgl.dataloading.DataLoader(
            graph, torch.arange(len(self.label)), sampler, batch_size=BATCH, shuffle=True
        )

    def batches(self) -> Iterator[tuple[list[Any], Tensor, Tensor]]:
        for inputs, seeds, blocks in self.loader:
            yield blocks, self.feat.index_select(0, inputs), self.label[seeds]


class Wire(Ours):
    """A rank on a host of its own: what sampling, training and both take."""

    def __init__(self, plain: bool = False, **given: Any) -> None:
        super().__init__(**given)
        if plain:
            _send_plainly(self.loader)
        self.begin(2)

    def training(self, steps: int) -> float:
        """Seconds a step on one batch that is there."""
        kept = next(iter(self.batches()))
        self.loader.leave()
        self._step(*kept)
        started = time.perf_counter()
        for _ in range(steps):
            self._step(*kept)
        return (time.perf_counter() - started) / steps


def _send_plainly(loader: Any) -> None:
    """Exchange by torch's ``all_to_all_single`` alone."""
    import torch.distributed as dist

    group = dist.new_group()

    def exchange(recv: Tensor, send: Tensor, take: Any, give: Any, *_: Any) -> Any:
        dist.all_to_all_single(recv, send, list(take), list(give), group=group)
        return _Waited()

    loader._exchange.group.exchange = exchange


class _Waited:
    def wait(self) -> None:
        return None


def main(rank: int) -> None:
    """Be DistDGL's server of a rank, and end with it."""
    _end_with_parent()
    _, distributed = _dist_dgl(rank)
    distributed.initialize(os.environ["DGL_IP_CONFIG"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
