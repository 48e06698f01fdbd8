"""Resident memory of this process, from Linux' /proc; MB are 2**20 bytes."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_mb() -> float:
    """Memory of this process that is in RAM now, mapped files included."""
    return _field("VmRSS")


def anonymous_mb() -> float:
    """Memory in RAM now that no file backs: what allocations take."""
    return _field("RssAnon")


def peak_mb() -> float:
    """Largest :func:`resident_mb` since the process began or :func:`reset_peak` worked."""
    return _field("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak() -> bool:
    """Start the peak anew; False where the kernel does not allow it (some containers)."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> float:
    """A field of /proc/self/status in MB; 0.0 where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":")), 0.0)
