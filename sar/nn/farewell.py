"""Whether ranks part with the same model, told without a collective, as some may be gone.

It is a warning of rank 0: results are computed, and others cannot be told any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from sar._private import version_of
from sar.nn.replicas import digest_of, layout_of, replicated
from sar.nn.steps import Steps


class Farewell:
    """A :class:`sar.comm.group.FinalCheck` with the models of a loop that still live."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def report(self) -> str:
        """JSON: per model its class, what has to be alike for it to be compared, digests by name.

        Ranks may write to a model after training, as rank 0 does that loads the best one; so only
        those with as many writes are compared.
        """
        return json.dumps([] if self._steps.is_told else list(self._models()))

    def _models(self) -> Iterator[tuple[str, list[int], dict[str, int]] | None]:
        for model in (known() for known in self._steps.roots):
            params = {} if model is None else replicated(model)
            if model is None or any(map(is_lazy, params.values())):
                yield None
                continue
            writes = sum(map(version_of, params.values()))
            digests = {name: digest_of(param) for name, param in params.items()}
            yield type(model).__name__, [*layout_of(params), writes], digests

    def compare(self, reports: Mapping[int, str]) -> str | None:
        """What is wrong, from the reports of ranks, rank 0 among them."""
        said: dict[int, list[Any]] = {rank: json.loads(word) for rank, word in reports.items()}
        for place, mine in enumerate(said.get(0, ())):
            for rank, models in sorted(said.items()):
                other = models[place] if place < len(models) else None
                if mine and other and mine[1] == other[1] and mine[2] != other[2]:
                    name = next(n for n in mine[2] if mine[2][n] != other[2].get(n))
                    return self._told(self._steps.roots[place](), mine[0], name, rank)
        return None

    def _told(self, model: nn.Module | None, kind: str, name: str, rank: int) -> str:
        missing = "" if model is None else self._steps.missing(model)
        why = f"nobody called {missing}" if missing else "sar.check(model, optimizer) says more"
        return (
            f"{kind}: at the end {name} of rank {rank} is not the same as rank 0's, so ranks have "
            f"trained models of their own; {why}"
        )
