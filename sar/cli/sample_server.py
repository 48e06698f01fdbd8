"""`sar sample-server`: ranks that hold the partitions and make mini-batches for others."""

from __future__ import annotations

import argparse
import math
import socket
from typing import Any

import torch

import sar
from sar.cli.inputs import add_input_arguments, parts_of_rank, resolve_parts
from sar.cli.launch import joined, launch, run_rank, set_allocator_arguments
from sar.comm import Group, use_group
from sar.sampling.serve import serve

_HERE = "127.0.0.1"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "sample-server",
        help="make mini-batches of a partitioned graph for ranks that train",
        description="Hold the partitions, one rank for each, and make mini-batches for trainers: "
        "scripts that call sar.sampling.connect. Ends when they have left.",
    )
    add_input_arguments(parser)
    parser.add_argument(
        "--trainers", type=int, required=True, metavar="T", help="ranks that will train"
    )
    parser.add_argument(
        "--address",
        default=f"{_HERE}:0",
        metavar="HOST:PORT",
        help="where they and the servers meet, an address of this host; default any free port of "
        "the loopback interface, which is printed",
    )
    parser.add_argument(
        "--nproc", type=int, metavar="P", help="servers to start here, default one for each part"
    )
    parser.add_argument("--threads", type=int, help="threads a server, default its share of cores")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for a rank, default 300"
    )
    set_allocator_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    for name in ("trainers", "nproc", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: got {value}, expected at least 1")
    if not 0 < args.timeout < math.inf:
        raise ValueError(f"--timeout: got {args.timeout}, expected more than 0 seconds")
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
    """What one server does."""
    num_servers = group.size - args.trainers
    servers = group.part(range(num_servers))
    with use_group(servers):
        path = parts_of_rank(args, servers)
        data = sar.load_dgl_partition_data(path, group.rank, device, verify=args.verify)
    serve(data, group, num_servers, args.timeout)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--address: got {text!r}, expected HOST:PORT, such as 10.0.0.1:29500")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        raise ValueError(f"--address: got {text!r}: {error}") from error
    return host, int(port)
