"""Hosts that are network namespaces, laid out by ``multihost.sh`` and held for a measurement."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

_SCRIPT = Path(__file__).with_name("multihost.sh")


def missing() -> str | None:
    """Why this machine cannot lay out hosts, or ``None`` when it can."""
    for tool in ("ip", "tc", "bash"):
        if shutil.which(tool) is None:
            return f"needs {tool}: install iproute2"
    if os.geteuid() != 0:
        return "needs root: network namespaces are made"
    done = subprocess.run(
        [_SCRIPT, "--hosts", "1", "--rate", "1gbit", "--", "true"], capture_output=True, text=True
    )
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()[-200:]}"


class Hosts:
    """``num`` hosts with a link each; gone when closed, or when this process ends.

    Attributes:
        names: of the namespaces, in rank order.
        addresses: of the hosts in their own network.
    """

    def __init__(self, num: int, rate: str = "none") -> None:
        self.num = num
        self._script = subprocess.Popen(
            [_SCRIPT, "--hosts", str(num), "--rate", rate, "--hold"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt reaches it as the end of its input
        )
        pairs = [self._line().split() for _ in range(num)]
        self.names, self.addresses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def command(self, rank: int) -> list[str]:
        """What comes before a command that shall run on a host."""
        return ["ip", "netns", "exec", self.names[rank]]

    def environment(self) -> dict[str, str]:
        """Where rank 0 is, and the interface to use, for every host."""
        names = ("GLOO_SOCKET_IFNAME", "SAR_SOCKET_NAME")
        return {"MASTER_ADDR": self.addresses[0], **dict.fromkeys(names, "eth0")}

    def set_rate(self, rate: str) -> None:
        """Limit either direction of every link, for example to ``"100mbit"``; or ``"none"``."""
        self._order(f"rate {rate}")

    def sent_bytes(self) -> list[int]:
        """What each host's interface has sent so far, all headers included."""
        return [int(line.split()[0]) for line in self._order("bytes")]

    def close(self) -> None:
        """Remove the namespaces, ending what runs in them; harmless when they are gone."""
        if self._script.poll() is None:
            self._script.communicate()

    def _order(self, order: str) -> list[str]:
        stdin = self._script.stdin
        if stdin is not None:
            stdin.write(order + "\n")
            stdin.flush()
        lines: list[str] = []
        while (line := self._line()) != "ok":
            lines.append(line)
        return lines

    def _line(self) -> str:
        line = self._script.stdout.readline() if self._script.stdout else ""
        if not line:
            raise RuntimeError(f"{_SCRIPT.name} ended with status {self._script.wait()}")
        return line.strip()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
