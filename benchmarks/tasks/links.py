"""DistMult on the triples of a knowledge graph: trained and ranked on partitions, ranked alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import measure

DIM, DRAWS, RATE, DECAY, BOUND = 128, 4, 0.02, 2e-3, 0.17
KEY = "_N:_E:_N/"


class Alone:
    """The reference: all rows in one process and plain torch, one query after another."""

    def __init__(self, rank: int, size: int, port: int, file: str) -> None:
        with np.load(file) as data:
            parts = [torch.from_numpy(data[name]).long() for name in ("train", "valid", "test")]
        self.triples = torch.cat(parts)
        self.test = torch.arange(len(self.triples) - len(parts[2]), len(self.triples))

    def mrr(self, weights: str) -> float:
        """Mean reciprocal rank of the test triples with the weights that the ranks wrote."""
        saved = torch.load(weights, weights_only=True)
        rows, relations = saved["rows"].double(), saved["relations"].double()
        head, relation, tail = self.triples.unbind(1)
        total = 0.0
        for known, answer in ((head, tail), (tail, head)):
            answers = _group(known * len(relations) + relation, answer)
            for part in self.test.split(256):
                query = rows[known[part]] * relations[relation[part]]
                scores = (query @ rows.T).float()  # as sar.nn.rank_links compares them
                for line, edge in zip(scores, part.tolist()):
                    true = line[answer[edge]].clone()
                    line[answers[int(known[edge] * len(relations) + relation[edge])]] = -torch.inf
                    above, level = (line > true).sum(), (line == true).sum()
                    total += 1 / (1 + float(above) + float(level) / 2)
        return total / (2 * len(self.test))


def _group(keys: Tensor, values: Tensor) -> dict[int, Tensor]:
    order = keys.argsort()
    unique, counts = keys[order].unique_consecutive(return_counts=True)
    return dict(zip(unique.tolist(), values[order].split(counts.tolist())))


class Ranks:
    """A rank that holds a partition of all triples and trains on those of the training split."""

    def __init__(self, rank: int, size: int, port: int, parts: str) -> None:
        import sar

        self.sar = sar
        self.group = sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)
        data = sar.load_dgl_partition_data(parts, rank, "cpu")
        self.graph = sar.construct_full_graph(data)
        self.graph.edata["etype"] = data.edge_features[KEY + "etype"].long()
        masks = {name: data.edge_features[f"{KEY}{name}_mask"].bool() for name in ("train", "test")}
        self.test, self.train = masks["test"], self.graph.edge_subgraph(masks["train"])
        types = self.graph.edata["etype"].max() + 1
        self.num_types = int(self.group.all_reduce(types, "max"))

    def start(self) -> None:
        """A new model, the same for any number of ranks."""
        nn_ = self.sar.nn
        torch.manual_seed(0)
        self.rows = nn_.ShardedEmbedding(self.graph, "_N", DIM, bound=BOUND)
        self.scorer = nn_.DistMultScorer(self.num_types, DIM)
        nn.init.uniform_(self.scorer.weight, -BOUND, BOUND)
        self.sar.sync_params(self.scorer)
        self.model = nn.ModuleList([self.rows, self.scorer])
        self.optimizer = torch.optim.Adam(self.model.parameters(), RATE, betas=(0.9, 0.99))
        self.samplers = [
            nn_.NegativeSampler(self.train, DRAWS, f"per_{end}", seed=1, columns=["etype"])
            for end in ("source", "destination")
        ]
        degrees = self.train.in_degrees() + self.train.out_degrees()
        self.share = degrees.unsqueeze(1) / self.train.num_edges_global()
        uses = torch.bincount(self.train.edata["etype"], minlength=self.num_types)
        self.uses = uses.unsqueeze(1) / self.train.num_edges_global()

    def fit(self, first: int, last: int) -> dict[str, Any]:
        """Steps over all training triples: the losses without the penalty, and seconds used."""
        watch = measure.Stopwatch()
        losses = [self.step(number) for number in range(first, last)]
        used = watch.read()
        return {"losses": losses, "cpu": used.cpu, "wall": used.wall}

    def step(self, number: int) -> float:
        h = self.rows()
        loss = self.sar.nn.link_loss(
            self.train, [draw(number) for draw in self.samplers], self.scorer, h, edge_type="etype"
        )
        # The mean over triples of DECAY times the squares of their three rows; each rank's share.
        penalty = (self.share * h.square()).sum() + (self.uses * self.scorer.weight.square()).sum()
        self.optimizer.zero_grad()
        (loss + DECAY * penalty).backward()
        self.sar.gather_grads(self.scorer)
        self.optimizer.step()
        return loss.item()

    def evaluate(self) -> dict[str, float]:
        """Filtered metrics of the test triples."""
        with torch.no_grad():
            ranks = self.sar.nn.rank_links(
                self.graph, self.scorer, self.rows(), self.test, edge_type="etype"
            )
        return self.sar.nn.ranking_metrics(ranks)

    def save(self, file: str) -> None:
        """Write the weights by original id, for :class:`Alone`."""
        shape = (self.graph.num_nodes_global(), DIM)
        rows = torch.zeros(shape)
        rows[self.rows.ids] = self.rows.weight.detach()
        self.group.all_reduce(rows)
        if self.group.rank == 0:
            relations = self.scorer.weight.detach()
            torch.save({"rows": rows, "relations": relations}, file)
