"""`sar inspect`: what partitions hold."""

import argparse
import json

from sar.partition.summary import summarize


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "inspect",
        help="show what partitions hold",
        description="Show nodes, edges, halo, cut, balance and features of a partitioned graph.",
    )
    parser.add_argument(
        "parts",
        metavar="PARTS.json",
        help="the JSON file of the partitions, or a folder that PyG or GraphLearn wrote",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--verify", action="store_true", help="compare all files with the digests in the JSON"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    summary = summarize(args.parts, verify=args.verify)
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print("\n".join(render(summary)))
        if args.verify:
            print("\nall files are as they were written")
    return 0


def render(summary: dict) -> list[str]:
    """The summary as lines of text."""
    edges, cut = summary["num_edges"], summary["cut_edges"]
    share = f" ({100 * cut / edges:.1f} %)" if edges else ""
    lines = [
        f"graph       {summary['graph_name']}, {summary['num_parts']} partitions "
        f"({summary['part_method']}, {summary['halo_hops']} hop of halo)",
        f"nodes       {summary['num_nodes']:,}",
        f"edges       {edges:,}, of which cut {cut:,}{share}",
        f"halo nodes  {summary['halo_nodes']:,}",
        f"sums        {summary['sum_rows']['pulled']:,} halo rows by relation, "
        f"{summary['sum_rows']['fewest']:,} with partial sums "
        f"({100 * summary['sum_rows']['saved']:.1f} % fewer)",
        f"attention   {summary['sum_rows']['pulled']:,} rows in which cut edges start, "
        f"{summary['end_rows']:,} in which they end",
        f"balance     nodes {summary['node_balance']:.3f}, edges {summary['edge_balance']:.3f} "
        "(largest / mean)",
        "",
    ]
    columns = ("num_nodes", "num_edges", "cut_edges", "halo_nodes")
    rows = [["part", "nodes", "edges", "cut edges", "halo nodes"]]
    for number, part in enumerate(summary["parts"]):
        rows.append([str(number), *(f"{part[column]:,}" for column in columns)])
    lines += aligned(rows)
    if len(summary["nodes"]) > 1 or len(summary["edges"]) > 1:
        lines += ["", *aligned(_types("node type", summary["nodes"]))]
        lines += ["", *aligned(_types("edge type", summary["edges"]))]
    return lines + _features(summary)


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
    """Rows of equal length in aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines
