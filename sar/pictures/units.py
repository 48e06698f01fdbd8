"""Numbers as people read them. MiB is 2**20 bytes and MB is a million: neither is called the other.

Memory is counted in the first, what travels in the second, as machines and networks are sold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MEMORY = ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"), (2.0**40, "TiB"))
TRAFFIC = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))
SECONDS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_RATES = ((1.0, "bit/s"), (1e3, "kbit/s"), (1e6, "Mbit/s"), (1e9, "Gbit/s"), (1e12, "Tbit/s"))
_COUNTS = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))

Units = Sequence[tuple[float, str]]


def unit_of(values: Iterable[float], units: Units) -> tuple[float, str]:
    """The largest (size, name) that the largest value has at least one of."""
    top = max(values, default=0.0)
    return next((unit for unit in reversed(units) if top >= unit[0]), units[0])


def short(value: float, units: Units) -> str:
    """`1.5 GiB`: three digits and the unit that fits."""
    size, name = unit_of([value], units)
    return f"{_digits(value / size)} {name}".strip()


def rate(bits: float) -> str:
    """`100 Mbit/s`, `1 Gbit/s` of bits a second."""
    return short(bits, _RATES)


def count(value: float) -> str:
    """`1.23M` of 1,234,567; numbers below ten thousand as they are."""
    if value < 1e4:
        return f"{value:,.0f}"
    return short(value, _COUNTS).replace(" ", "")


def _digits(value: float) -> str:
    """Three digits, but never fewer than stand before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis that counts: parts, ranks, epochs."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def powers(axis: Any, low: float, high: float) -> None:
    """Ticks 1, 2, 5 of each power of ten on a logarithmic axis, written out; low < high."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if high < 5 * low:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=2))
    else:
        axis.set_major_locator(LogLocator(10, subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def these(axis: Any, values: Sequence[float], texts: Sequence[str]) -> None:
    """Ticks at ``values`` alone, with their texts."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(list(values), list(texts))
    axis.set_minor_locator(NullLocator())
