"""`sar evaluate`: full-graph inference from a checkpoint."""

from __future__ import annotations

import argparse
import os
import warnings
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.cli.inputs import forget_columns, load_rank, resolve_parts, stored_columns
from sar.cli.launch import check_rank_arguments, launch, run_rank
from sar.cli.outputs import check_writable
from sar.cli.rank_environment import joined
from sar.cli.turns import check_out_of_core
from sar.comm import Group
from sar.files import naming, remove_left_over, staged
from sar.models import ModelOptions, build_model, call_of, prepare_graph
from sar.partition.load import PartitionData
from sar.run_options import DataOptions, TrainOptions
from sar.train.checkpoint import FILE_NAME, check_fields, load_checkpoint, load_model
from sar.train.data import NodeData, check_names
from sar.train.embedding import load_tables
from sar.train.metrics import predict
from sar.train.trainer import Trainer


def _check_output(args: argparse.Namespace) -> None:
    out = Path(args.out)
    check_writable(out, "--out")
    check_out_of_core(args)
    remove_left_over(out, ["predictions*.npz"])


def run(args: argparse.Namespace) -> int:
    check_rank_arguments(args)
    if joined():
        run_rank(args, work, _check_output)
        return 0
    _check_output(args)
    if not (Path(args.checkpoint) / FILE_NAME).is_file():
        raise ValueError(f"--checkpoint: {args.checkpoint!r} holds no {FILE_NAME}")
    args.input, nproc = resolve_parts(args, args.nproc)
    check_names(args.input, {"features": args.features, "labels": args.labels})
    launch("evaluate", args, nproc)
    return 0


def work(args: argparse.Namespace, group: Group, device: torch.device) -> None:
    content = load_checkpoint(args.checkpoint, group)
    check_fields(content)
    config = content["config"]
    given = {name: getattr(args, name) for name in ("features", "labels", "model")}
    config |= {name: value for name, value in given.items() if value is not None}
    model_options = ModelOptions(**_chosen(config, ModelOptions))
    _check_sizes(model_options, content["model"])
    data_options = DataOptions(**_chosen(config, DataOptions))
    partition, graph, data = load_rank(args, data_options, group, device, need_labels=False)
    if not model_options.is_own:
        forget_columns(graph)
    graph = prepare_graph(graph, model_options)
    if data.widths != config["in_feats"]:
        raise ValueError(
            f"features: {data_options.features!r} has {data.widths} columns, the "
            f"checkpoint's model takes {config['in_feats']}"
        )
    sizes = config["in_feats"], config["num_classes"]
    model = build_model(model_options, *sizes, graph=graph, target_type=data.ntype).to(device)
    epoch = load_model(model, content, args.which)
    load_tables(args.checkpoint, content.get("tables", {}), model, None, group)
    call = call_of(model_options, model)
    stored_columns(partition, call)
    options = TrainOptions(metric=config["metric"], mfgs="off")
    trainer = Trainer(model, graph, data, options, group=group, call=call)
    logits = trainer.predict()
    results = _results(partition, logits, args, data, group)
    if args.gather:
        results = _gathered(results, group)
    _write(results if group.rank == 0 or not args.gather else None, args, group)
    scores = {} if data.labels is None else trainer.evaluate(logits)
    if group.rank == 0:
        _tell(args, config["metric"], epoch, scores, content.get("best"))


def _chosen(config: dict[str, Any], kind: type) -> dict[str, Any]:
    """The options of class ``kind`` that the checkpoint's run had."""
    # files of before do without
    newer: dict[str, Any] = {"args": {}, "call": None, "front_end": None, "target_type": None}
    newer["edge_features"] = None
    config = newer | config
    missing = [field.name for field in fields(kind) if field.name not in config]
    if missing:
        raise ValueError(
            f"the checkpoint does not say {', '.join(missing)}: expected one of `sar train`"
        )
    chosen = {field.name: config[field.name] for field in fields(kind)}
    for field in fields(kind):
        kinds = str(field.type).partition("[")[0].split(" | ")
        if type(chosen[field.name]).__name__.replace("NoneType", "None") not in kinds:
            got = f"{chosen[field.name]!r}"
            raise ValueError(f"the checkpoint's {field.name!r}: got {got}, expected {field.type}")
    return chosen


def _check_sizes(options: ModelOptions, state: dict[str, Any]) -> None:
    """Refuse sizes that the stored parameters are not of before a model of any size is built."""
    numbers = sum(value.numel() for value in state.values() if isinstance(value, Tensor))
    for name, most in (("layers", len(state)), ("hidden", numbers), ("heads", numbers)):
        if not options.is_own and getattr(options, name) > most:
            got = f"{getattr(options, name)}, expected at most {most}, as many as its model has"
            raise ValueError(f"the checkpoint's {name!r}: got {got}")


def _results(
    partition: PartitionData,
    logits: Tensor,
    args: argparse.Namespace,
    data: NodeData,
    group: Group,
) -> dict[str, Tensor]:
    """int64 [n] ``node_id`` and ``prediction`` (int64 [n], or uint8 [n, C]) of this rank."""
    guess = predict(logits, data.multilabel)
    guess = guess.to(torch.uint8) if data.multilabel else guess
    results = {"node_id": _node_ids(partition, data.ntype, group), "prediction": guess.cpu()}
    return results | ({"logits": logits.float().cpu()} if args.logits else {})


def _node_ids(partition: PartitionData, ntype: str, group: Group) -> Tensor:
    name = f"{ntype}/orig_id"
    if name in partition.node_features:
        return partition.node_features[name].long()
    if group.rank == 0:
        warnings.warn(
            "the partitions hold no orig_id: predictions are by the partitioning's own node ids",
            stacklevel=2,
        )
    start, end = partition.book.node_ranges[ntype][partition.part_id]
    return torch.arange(int(start), int(end))


def _gathered(results: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """All ranks' rows on rank 0 by ascending node id, nothing on the others; collective."""
    counts = [int(n) for n in group.all_gather(torch.tensor([len(results["node_id"])]))]
    send = [counts[group.rank]] + [0] * (group.size - 1)
    recv = counts if group.rank == 0 else [0] * group.size
    together = {
        name: group.all_to_all(rows.contiguous(), send, recv) for name, rows in results.items()
    }
    order = together["node_id"].argsort()
    return {name: rows[order] for name, rows in together.items()}


def _write(results: dict[str, Tensor] | None, args: argparse.Namespace, group: Group) -> None:
    """Write the files of all ranks, or none of them; ``results`` is ``None`` on a rank without a
    file. Collective."""
    name = "predictions.npz"
    if not args.gather:
        name = f"predictions-{group.rank:05d}-of-{group.size:05d}.npz"
    path, partial, error = Path(args.out) / name, None, None
    with ExitStack() as stack:
        try:
            if results is not None:
                arrays = {key: rows.numpy() for key, rows in results.items()}
                with naming(path):
                    made = staged(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
                    partial = stack.enter_context(made)
        except Exception as problem:  # any, too little memory as well: the others would wait
            error = problem
        group.agree(error)
        if partial is not None:
            with naming(path):
                os.replace(partial, path)


def _tell(
    args: argparse.Namespace,
    metric: str,
    epoch: int,
    scores: dict[str, float | None],
    best: dict[str, Any] | None,
) -> None:
    hint = ""
    if args.which == "last" and best and best["epoch"] != epoch:
        hint = f"; the best by validation is of epoch {best['epoch']}: --which best"
    print(f"model    of epoch {epoch}, the {args.which}{hint}")
    known = [f"{split} {value:.4f}" for split, value in scores.items() if value is not None]
    if known:
        print(f"{metric}: {', '.join(known)}")
    print(f"written  {args.out}")
