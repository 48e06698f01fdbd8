"""Kinds of values, and the options that several commands take and no dataclass declares."""

from __future__ import annotations

import re
from pathlib import Path

from sar.config import SIZE, parse_bytes
from sar.options import ABOVE_ZERO, COUNT, POSITIVE, Kind, Option, one_of
from sar.words import ALLOCATORS, BALANCES, DEFAULT_METHOD, METHODS, MODELS

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_rate(text: str) -> float:
    """Bits a second of ``"25Gbit"`` or ``"100 Mbit"``; raises ``ValueError``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?bit)(?:/s)?\s*", text.lower())
    if match is None or not float(match.group(1)) > 0:
        raise ValueError(f"got {text!r}, expected a rate like '25Gbit' or '100Mbit'")
    return float(match.group(1)) * _BITS[match.group(2)]


def parse_disk_rate(text: str) -> int:
    """Bytes a second of ``"1GB/s"``; raises ``ValueError``."""
    try:
        return parse_bytes(re.sub(r"\s*/\s*s\s*$", "", text), "")
    except ValueError as error:
        raise ValueError(f"got {text!r}, expected a rate like '1GB/s' or '500MB/s'") from error


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and int(port) <= 65535


def _is_own(model: str) -> bool:
    return all(model.rpartition(":"))


FILE = Kind("FILE", "a path")
PATH = Kind("FILE", "a path", Path, Path)
FILES = (FILE, PATH)  # what a shell completes as such
RATE = Kind("RATE", "a rate like '25Gbit'", lambda text: parse_rate(text) and text)  # text is kept
DISK_RATE = Kind("RATE", "a rate like '1GB/s'", lambda text: parse_disk_rate(text) and text)
ADDRESS = Kind("HOST:PORT", "HOST:PORT, such as 10.0.0.1:29500", fits=_is_address)
_BALANCED = ("nodes", *BALANCES)
_BALANCE = Kind("WHAT", f"some of {','.join(_BALANCED)}", fits=_BALANCED.__contains__)
BALANCE = Kind("WHAT", "names", lambda text: [*map(_BALANCE.read, text.split(","))], list)
OWN_MODEL = Kind("NAME", "module:Class or file.py:Class", fits=_is_own)
_WHOLE = "rows travel whole; --zeros skip sends fewer bytes"


def picture(what: str, dark_for_experts: bool = False) -> tuple[Option, ...]:
    """``--plot FILE`` and ``--dark``, for drawing ``what``."""
    return (
        Option("plot", f"draw {what}, .png or .svg", FILE),
        Option("dark", "draw --plot on a dark ground", expert=dark_for_experts),
    )


def gone(name: str, instead: str, was: str | None = None) -> Option:
    """A removed option: whoever gives it is told what there is ``instead``, unless the value is
    ``was``, its old default, which a saved file of options may hold."""

    def parse(text: str) -> str:
        if text != was:
            raise ValueError(f"got {text!r}, but the option is gone: {instead}")
        return text

    return Option(name, f"gone: {instead}", Kind("VALUE", "nothing", parse))


# A line or two an option: the formatter would give each argument a line of its own.
# fmt: off
COMMON = (
    Option("config", "read options from this YAML file", FILE),
    Option("save_config", "write all options in effect to it", FILE),
    Option("debug", "show the traceback of an error", expert=True),
)
JSON = Option("json", "print one JSON object")
INPUT = (
    Option("input", "partitions (.json, folder), or a graph to cut first", FILE, None, "INPUT",
           place=True),
    Option("method", "of the cut, where INPUT is not cut yet", one_of(METHODS), DEFAULT_METHOD,
           expert=True),
    Option("cut_seed", "seed of that cut", COUNT, 0, expert=True),
    Option("verify", "compare features with the digests in the JSON at once, not when they are "
           "first read", expert=True),
)
CUT_MODEL = (
    Option("model", "sage where another option is given, rgcn for several types", one_of(MODELS)),
    Option("layers", "graph layers; default: 3", POSITIVE),
    Option("hidden", "width of layers; default: 256", POSITIVE),
)
TIMEOUT = Option("timeout", "seconds to wait for a rank", ABOVE_ZERO, 300.0, "S")
ALLOCATOR = (
    Option("allocator", "of the ranks' memory; tbb is faster, and larger where buffers differ",
           one_of(ALLOCATORS), "system"),
    gone("soft_limit", "system keeps nothing, tbb all that it likes"),
)
RANKS = (
    Option("nproc", "ranks to start; default: one for each part", POSITIVE, None, "P"),
    Option("device", "where ranks compute", one_of(("cpu", "cuda")), "cpu"),
)
MORE_RANKS = (
    Option("backend", "of the ranks' exchanges; default: gloo on the CPU, nccl on CUDA",
           one_of(("gloo", "nccl", "ccl", "mpi"))),
    Option("threads", "of a rank; default: its share of the cores", POSITIVE),
    TIMEOUT,
    *ALLOCATOR,
)
OUT_OF_CORE = (
    Option("out_of_core", "train the parts in turns in one process, with a file in DIR, on a disk, "
           "for what does not fit into memory", FILE, None, "DIR"),
    Option("memory", "of that process, like 20GiB; default: half of what is free", SIZE),
)
MAP_FEATURES = Option("map_features", "leave features in a temporary file (in DIR) instead of in "
                      "memory", FILE, False, "DIR", many="?")
LOSSY = (
    gone("lossy_wire", _WHOLE),
    gone("lossy_gradient_wire", _WHOLE),
    gone("lossy_boundary_rate", _WHOLE, was="1.0"),
)
# fmt: on
