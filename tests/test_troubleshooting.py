"""Messages that the page on troubleshooting explains are messages that the library has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.M)
OF_TORCH = "has been modified by an inplace operation"


@pytest.fixture(scope="module")
def source() -> str:
    """All of the package, literals that Python joins being joined."""
    text = "".join(path.read_text() for path in (ROOT / "sar").rglob("*.py"))
    return re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)


@pytest.mark.parametrize("message", QUOTED)
def test_message_is_one_of_the_library(message: str, source: str) -> None:
    pieces = [piece.strip() for piece in message.split("...")]
    missing = [piece for piece in pieces if piece not in source]
    assert not missing or OF_TORCH in message, missing


def test_some_are_explained() -> None:
    assert len(QUOTED) > 30
