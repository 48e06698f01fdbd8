"""`sar sample-server`: ranks that hold the partitions and make mini-batches for others."""

from __future__ import annotations

import argparse
import socket

import torch

import sar
from sar.cli.inputs import parts_of_rank, resolve_parts
from sar.cli.launch import launch, run_rank
from sar.cli.rank_environment import joined
from sar.comm import Group, use_group
from sar.sampling.serve import serve


def run(args: argparse.Namespace) -> int:
    if joined():
        run_rank(args, work)
        return 0
    address = _address(args.address)
    args.input, nproc = resolve_parts(args, args.nproc)

    def tell(host: str, port: int) -> None:
        print(f"{nproc} servers meet {args.trainers} trainers at {host}:{port}", flush=True)

    launch("sample_server", args, nproc, address, args.trainers, tell)
    return 0


def work(args: argparse.Namespace, group: Group, device: torch.device) -> None:
    num_servers = group.size - args.trainers
    servers = group.part(range(num_servers))
    with use_group(servers):
        path = parts_of_rank(args, servers)
        data = sar.load_dgl_partition_data(path, group.rank, device, verify=args.verify)
    serve(data, group, num_servers, args.timeout)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        raise ValueError(f"--address: got {text!r}: {error}") from error
    return host, int(port)
