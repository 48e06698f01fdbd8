"""Tests that need a library which is not installed: they are skipped, and the reason names it.

A test says what it needs by importing it. So no list of tests is kept beside them; where the
library is there, an import that fails is an error as ever.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

LIBRARIES = {"dgl": "DGL", "torch_geometric": "PyG"}
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def reason(text: str) -> str | None:
    """Which missing library an error is about, as a reason to skip."""
    for name in MISSING:
        told = (f"No module named '{name}", f"needs {name}", f"could not import '{name}")
        if any(words in text for words in told):
            return f"needs {LIBRARIES[name]}, which is not installed"
    return None


class LeftOut:
    """The plugin that turns such errors into skips."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        report = yield
        why = reason(str(report.longrepr)) if report.failed else None
        if why is not None:
            report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {why}")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        why = reason(str(report.longrepr)) if report.failed else None
        if why is not None:
            place, line, _ = item.location
            report.outcome, report.longrepr = "skipped", (place, line or 0, f"Skipped: {why}")
        return report
