"""Options that were removed: their names stay and say what to use instead."""

from __future__ import annotations

import pytest

import sar


@pytest.mark.parametrize("arguments", [(), ("bfloat16", "int8", 0.5)])
def test_rows_always_travel_whole(arguments: tuple) -> None:
    with pytest.raises(sar.NotSupportedError, match=r"sar.Lossy: .* gone.*zeros='skip'"):
        sar.Policy(lossy=sar.Lossy(*arguments))  # type: ignore[call-arg]
