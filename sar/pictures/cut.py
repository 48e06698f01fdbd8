"""A picture of a cut: sizes of the parts beside their mean, and rows between pairs of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sar.pictures.style import Palette, count, whole_numbers

SIZE = (13.0, 7.5)  # inches
_SIZES = {
    "num_nodes": "Nodes",
    "num_edges": "Edges",
    "halo_nodes": "Halo nodes",
    "boundary_nodes": "Boundary nodes",
    "train_nodes": "Training nodes",
}
_WRITTEN_OUT = 10  # parts up to which the map has numbers


def draw_cut(found: Mapping[str, Any], figure: Any, colors: Palette) -> None:
    """Draw bars of each size and a map of rows.

    Args:
        found: what :func:`sar.partition.summary.summarize` or ``CutQuality.to_dict`` gave.
    """
    sizes = {key: text for key, text in _SIZES.items() if found[key] is not None}
    cells = figure.add_gridspec(len(sizes), 2, width_ratios=(1, 1.1), wspace=0.06)
    for row, (key, text) in enumerate(sizes.items()):
        axes = figure.add_subplot(cells[row, 0])
        draw_size(axes, text, [part[key] for part in found["parts"]], colors)
        axes.tick_params(labelbottom=row == len(sizes) - 1)
    axes.set_xlabel("part")
    draw_rows(figure.add_subplot(cells[:, 1]), np.array(found["rows"]["halo"]), colors)
    share = 100 * found["cut_edges"] / max(1, found["num_edges"])
    parts = "1 part" if found["num_parts"] == 1 else f"{found['num_parts']} parts"
    figure.suptitle(
        f"{found['graph_name']}, {parts}, {share:.1f} % of edges cut",
        x=0.01, ha="left", fontsize=14, fontweight="bold",
    )  # fmt: skip


def draw_size(axes: Any, text: str, counts: Sequence[int], colors: Palette) -> None:
    """One bar a part, as multiples of the mean, which is a line."""
    mean = sum(counts) / len(counts)
    heights = [count_ / mean if mean else 0.0 for count_ in counts]
    axes.bar(range(len(counts)), heights, width=0.8, color=colors.first)
    axes.axhline(1, color=colors.ink, linestyle="--", linewidth=1)
    axes.annotate(
        "mean", (1, 1), xycoords=("axes fraction", "data"), xytext=(6, 0),
        textcoords="offset points", va="center", color=colors.quiet, annotation_clip=False,
    )  # fmt: skip
    axes.set_ylim(0, 1.1 * max(1.2, *heights))
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.set_title(text, fontsize=10.5, pad=5)
    axes.set_title(
        f"mean {count(mean)}, largest / mean {max(heights):.3f}",
        loc="right", fontsize=10, fontweight="normal", color=colors.quiet, pad=5,
    )  # fmt: skip
    axes.locator_params(axis="y", nbins=4)
    whole_numbers(axes.xaxis)
    axes.tick_params(axis="x", length=0)


def draw_rows(axes: Any, rows: np.ndarray, colors: Palette) -> None:
    """A map of the rows [P, P] that go from the part below to the part at the side."""
    from matplotlib.colors import to_hex

    shown = np.ma.masked_array(rows, mask=np.eye(len(rows), dtype=bool))
    top = max(1, int(rows.max()))
    image = axes.imshow(shown, cmap="cividis", vmin=0, vmax=top)
    axes.set_title("Halo rows between parts", pad=10)
    axes.set(xlabel="from part", ylabel="to part")
    axes.grid(False)
    axes.set_facecolor(colors.grid)  # a part sends nothing to itself
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, format=lambda value, _: count(value))
    bar.outline.set_visible(False)
    if len(rows) <= _WRITTEN_OUT:
        for (to, source), number in np.ndenumerate(rows):
            if to != source:
                color = _readable_on(to_hex(image.cmap(image.norm(number))))
                axes.text(source, to, count(number), ha="center", va="center", color=color)


def _readable_on(color: str) -> str:
    """Black or white, what stands out more on ``#rrggbb``."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "#fefefe"
