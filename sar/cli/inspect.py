"""`sar inspect`: what partitions hold."""

import argparse
import json
import sys
from collections.abc import Iterable

from sar.cli.cut_report import (
    model_of,
    predict_training,
    prediction_lines,
)
from sar.cli.pictures import check_pictures, plot_cut
from sar.partition.load import differing
from sar.partition.summary import summarize
from sar.plan import from_summary


def run(args: argparse.Namespace) -> int:
    check_pictures(args)
    if args.check and not _is_as_written(args.parts):
        return 1
    summary = summarize(args.parts, watch=_progress)
    predicted, is_one = None, len(summary["nodes"]) == len(summary["edges"]) == 1
    if (model := model_of(args, "sage" if is_one else "rgcn")) is not None:
        predicted = predict_training(from_summary(summary, path=args.parts), model)
    plot_cut(args, summary)
    if args.json:
        more = {} if predicted is None else {"predicted": predicted.to_dict()}
        print(json.dumps(summary | more, indent=2))
        return 0
    print("\n".join(render(summary)))
    if predicted is not None:
        print("\n" + "\n".join(prediction_lines(predicted, 12)))
    if args.plot is not None:
        print(f"\ndrawn in {args.plot}")
    if args.check:
        print("\nall files are as they were written")
    return 0


def _is_as_written(path: str) -> bool:
    found, count = differing(path, _progress)
    if found:
        lines = [f"{len(found)} of {count} files are not as they were written", *found]
        print("sar inspect: " + "\n  ".join(lines), file=sys.stderr)
    return not found


def _progress(parts: Iterable[int]) -> Iterable[int]:
    from tqdm import tqdm

    return tqdm(parts, desc="reading", unit="part", leave=False, disable=None)


def render(summary: dict) -> list[str]:
    edges, cut = summary["num_edges"], summary["cut_edges"]
    share = f" ({100 * cut / edges:.1f} %)" if edges else ""
    lines = [
        f"graph       {summary['graph_name']}, {summary['num_parts']} partitions "
        f"({summary['part_method']}, {summary['halo_hops']} hop of halo)",
        f"nodes       {summary['num_nodes']:,}",
        f"edges       {edges:,}, of which cut {cut:,}{share}",
        f"halo nodes  {summary['halo_nodes']:,}{_busiest(summary['rows']['halo'])}",
        f"boundary    {summary['boundary_nodes']:,} nodes that other partitions need",
        f"sums        {summary['sum_rows']['pulled']:,} halo rows by relation, "
        f"{summary['sum_rows']['fewest']:,} with partial sums "
        f"({100 * summary['sum_rows']['saved']:.1f} % fewer)",
        f"attention   {summary['sum_rows']['pulled']:,} rows in which cut edges start, "
        f"{summary['end_rows']:,} in which they end",
        f"balance     {_balances(summary)} (largest / mean)",
        "",
    ]
    columns = {"num_nodes": "nodes", "num_edges": "edges", "cut_edges": "cut edges"}
    columns |= {"halo_nodes": "halo nodes", "boundary_nodes": "boundary"}
    if summary["train_nodes"] is not None:
        columns["train_nodes"] = "training"
    rows = [["part", *columns.values()]]
    for number, part in enumerate(summary["parts"]):
        rows.append([str(number), *(f"{part[column]:,}" for column in columns)])
    lines += aligned(rows)
    if len(summary["nodes"]) > 1 or len(summary["edges"]) > 1:
        lines += ["", *aligned(_types("node type", summary["nodes"]))]
        lines += ["", *aligned(_types("edge type", summary["edges"]))]
    return lines + _features(summary)


def _balances(summary: dict) -> str:
    names = {"node": "nodes", "edge": "edges", "halo": "halo", "boundary": "boundary"}
    if summary["train_balance"] is not None:
        names["train"] = "training"
    return ", ".join(f"{title} {summary[f'{key}_balance']:.3f}" for key, title in names.items())


def _busiest(rows: list[list[int]]) -> str:
    """The pair of parts between which most rows travel one way, in words."""
    pairs = [(count, source, to) for to, row in enumerate(rows) for source, count in enumerate(row)]
    count, source, to = max(pairs, key=lambda pair: pair[0])
    return f", most from part {source} to part {to}: {count:,}" if count else ""


def _types(title: str, counts: dict) -> list[list[str]]:
    num_parts = max((len(one["per_part"]) for one in counts.values()), default=0)
    rows = [[title, "total", *(f"part {part}" for part in range(num_parts))]]
    for name, one in counts.items():
        rows.append([name, f"{one['total']:,}", *(f"{count:,}" for count in one["per_part"])])
    return rows


def _features(summary: dict) -> list[str]:
    lines = []
    for title, key in (("node feature", "node_features"), ("edge feature", "edge_features")):
        rows = [[title, "dtype", "row shape"]]
        for name, info in summary[key].items():
            rows.append([name, info["dtype"], " x ".join(map(str, info["shape"])) or "scalar"])
        if len(rows) > 1:
            lines += ["", *aligned(rows)]
    return lines


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines
