"""What a row of the table of fused layers is, and what a user may ask of a layer.

A further fused layer is a file in this folder that ends with a :class:`FusedLayer`, and a line in
:mod:`sar.layers.table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Inputs = Mapping[str, Any]  # arguments of the layer's forward behind the graph, by their names
WhyNot = Callable[[Any, Any, Inputs], str | None]
Run = Callable[..., Tensor]  # of layer, graph and Inputs
Agree = Callable[[Any, Any, Inputs, bool], Any]

OPTIONS = "sar_options"  # of a module: what optimize() was asked for


@dataclass(frozen=True)
class LayerOptions:
    """What :func:`sar.optimize` was asked for.

    Attributes:
        donate: the layer may write over its input in backward.
        strict: it is an error where the layer is not fused.
    """

    donate: bool = False
    strict: bool = False


NO_OPTIONS = LayerOptions()


def options_of(layer: nn.Module) -> LayerOptions:
    """What the user asked of a layer."""
    found: LayerOptions = layer.__dict__.get(OPTIONS, NO_OPTIONS)
    return found


@dataclass(frozen=True)
class FusedLayer:
    """A fused layer and the foreign class that it stands for.

    What is exchanged with other ranks is what the class' own code would exchange on such a graph,
    so that ranks which choose differently meet. The exceptions are ``run_recomputed``, which runs
    where all ranks can, and what ``agree`` finds.

    Attributes:
        module, name: of the class; nothing of it is imported.
        fingerprints: of the source of the ``forward`` it stands for, see
            :func:`sar.layers.choice.fingerprint`.
        why_not: of a layer, a graph and inputs: why this call is not fused, in a few plain words;
            ``None``: it is. Looks at no other rank, and is called at each call: a few comparisons.
            What hooks, modes and autocast forbid is asked elsewhere.
        run: the result of such a call; collective.
        why_not_recomputed, run_recomputed: the same of a layer that is recomputed
            (``set_activations``), where that goes another way; asked after ``why_not``.
        agree: of a layer, a graph, inputs and whether this rank's call is fused: what the ranks
            have to agree on before either way; collective, and called on every rank. ``run`` gets
            what it returns as ``agreed``.
        reduces: of a layer: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``, which its own code
            computes of the very source rows that it is given, if it is given nothing else; ``None``
            where it first makes others of them. Looks at nothing that may differ between ranks.
    """

    module: str
    name: str
    fingerprints: tuple[str, ...]
    why_not: WhyNot
    run: Run
    why_not_recomputed: WhyNot | None = None
    run_recomputed: Run | None = None
    agree: Agree | None = None
    reduces: Callable[[Any], str | None] | None = None
