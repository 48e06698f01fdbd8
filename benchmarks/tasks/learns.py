"""Models of links: trained on sampled mini-batches of partitions, or by plain DGL on the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import measure

KEY = "_N:_E:_N/"


class Sage(nn.Module):
    """Two layers of GraphSAGE; a pair's score is the dot product of its rows."""

    HIDDEN, RATE, FANOUTS, DRAWS = 64, 0.01, [10, 10], 1
    EVERY, CHOICE = 1, "auc"
    NEGATIVES = {"mode": "binary", "amount": DRAWS}

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(content["width"], self.HIDDEN, "mean")
        self.second = dgl.nn.SAGEConv(self.HIDDEN, self.HIDDEN, "mean")

    def forward(self, graphs: list[Any], rows: Tensor) -> Tensor:
        """``graphs``: a block for each layer, or the whole graph for each; ``rows``: features."""
        return self.second(graphs[1], F.relu(self.first(graphs[0], rows)))

    def losses(self, ends: tuple[Tensor, Tensor], none: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        """[n] of edges and of pairs that are none, of which both ends' rows are given."""
        right, wrong = ((a * b).sum(1) for a, b in (ends, none))
        return torch.cat([F.softplus(-right), F.softplus(wrong)])


class DistMult(nn.Module):
    """Learned rows, a layer over all relations, and DistMult on what comes out.

    The layer adds the mean of the neighbors' rows times their relations', through a matrix.
    """

    HIDDEN, RATE, FANOUTS, DRAWS = 32, 0.02, [10], 4
    GROUP = 128  # edges that share what is drawn for each of them
    EVERY, CHOICE = 5, "mrr"
    NEGATIVES = {"mode": "triplet", "amount": DRAWS}

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        nodes, relations = content["nodes"], content["relations"]
        self.rows = nn.Embedding(nodes, self.HIDDEN)
        nn.init.uniform_(self.rows.weight, -0.2, 0.2)
        self.linear = nn.ModuleList(nn.Linear(self.HIDDEN, self.HIDDEN) for _ in self.FANOUTS)
        self.passed, self.scored = (nn.Embedding(relations, self.HIDDEN) for _ in range(2))

    def forward(self, graphs: list[Any], rows: Tensor) -> Tensor:
        """As :meth:`Sage.forward`; ``rows``: original ids of the nodes."""
        h = self.rows(rows)
        for layer, graph in zip(self.linear, graphs, strict=True):
            with graph.local_scope():
                graph.srcdata["h"], graph.edata["w"] = h, self.passed(graph.edata["etype"].long())
                graph.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "h"))
                h = h[: len(graph.dstdata["h"])] + torch.tanh(layer(graph.dstdata["h"]))
        return h

    def losses(
        self, ends: tuple[Tensor, Tensor], none: tuple[Tensor, Tensor], types: Tensor
    ) -> Tensor:
        """[n] of edges: cross entropy of the destination among those drawn for edges near it."""
        queries, others = ends[0] * self.scored(types), none[1].split(self.GROUP * self.DRAWS)
        right = (queries * ends[1]).sum(1, keepdim=True)
        wrong = [a @ b.T for a, b in zip(queries.split(self.GROUP), others, strict=True)]
        return torch.cat([
            F.softplus(rest.logsumexp(1) - one.squeeze(1))
            for rest, one in zip(wrong, right.split(self.GROUP), strict=True)
        ])  # fmt: skip


MODELS = {"cora": Sage, "wn18rr": DistMult}


class Alone:
    """The reference: plain DGL, layers over the whole graph in one process.

    ``content`` is a file of ``nodes`` (how many), ``src``, ``dst`` and ``etype`` of the training
    edges in both directions, ``seed`` (bool, which of them are trained on), ``feat`` or learned
    rows in its place; ``valid_pairs`` and ``test_pairs`` (source, destination, type, label). Of
    triples also ``relations`` (how many), ``valid`` and ``test`` (source, destination, type), and
    ``all`` that are known: ascending keys of source and type, and the destinations.
    """

    def __init__(self, name: str, content: str) -> None:
        import sar

        self.sar, self.group = sar, sar.current_group()
        self.content = torch.load(content, weights_only=True)
        self.kind = MODELS[name]
        self.load()

    def load(self) -> None:
        src, dst = self.content["src"], self.content["dst"]
        self.graph = dgl.graph((src, dst), num_nodes=self.content["nodes"])
        self.graph.edata["etype"] = self.content["etype"]
        self.ids = torch.arange(self.content["nodes"])
        self.inputs = self.content.get("feat", self.ids)
        self.seeds = self.content["seed"].nonzero().view(-1)

    def steps(self, epoch: int, seed: int) -> Iterator[Tensor]:
        """The losses of an epoch's batches."""
        rng = torch.Generator().manual_seed(1_000 * seed + epoch)
        order = self.seeds[torch.randperm(len(self.seeds), generator=rng)]
        for chosen in order.split(self.batch or len(order)):
            yield self._losses(chosen, rng)

    def _losses(self, chosen: Tensor, rng: torch.Generator) -> Tensor:
        src, dst = self.graph.find_edges(chosen)
        graph = self.graph
        if self.batch:  # else no edge would be left
            graph = dgl.remove_edges(graph, self._between(src, dst))
        h = self.model([graph] * len(self.kind.FANOUTS), self.inputs)
        drawn = torch.randint(len(h), (2, len(chosen) * self.model.DRAWS), generator=rng)
        none = h[drawn[0]], h[drawn[1]]
        return self.model.losses((h[src], h[dst]), none, self.graph.edata["etype"][chosen])

    def _between(self, src: Tensor, dst: Tensor) -> Tensor:
        """Edges between the same ends, either way."""
        nodes, (first, second) = self.content["nodes"], self.graph.edges()
        left_out = torch.cat([src * nodes + dst, dst * nodes + src])
        return torch.isin(first * nodes + second, left_out).nonzero().view(-1)

    def finish(self) -> None:
        """Sum the gradients over all ranks."""

    def fit(self, seed: int, epochs: int, batch: int) -> dict[str, float]:
        """Test metrics after the epoch with the best validation, and seconds used.

        ``batch``: seed edges of a step, of all ranks; 0 takes all of them.
        """
        torch.manual_seed(seed)
        self.batch = batch
        self.model = self.kind(self.content)
        optimizer = torch.optim.Adam(self.model.parameters(), self.model.RATE)
        best, watch = {"valid": -1.0}, measure.Stopwatch()
        for epoch in range(epochs):
            for losses in self.steps(epoch, seed):
                loss = self.sar.global_mean(losses)
                optimizer.zero_grad()
                loss.backward()
                self.finish()
                optimizer.step()
            if (epoch + 1) % self.model.EVERY:
                continue
            found = self.measure("valid")[self.model.CHOICE]
            if found > best["valid"]:
                best = {"epoch": epoch + 1, "valid": found, **self.measure("test")}
        used = watch.read()
        return {**best, "loss": loss.item(), "cpu": used.cpu, "wall": used.wall}

    def measure(self, split: str) -> dict[str, float]:
        """AUC of pairs and of as many that are none; of triples also MRR and Hits@10, filtered,
        against all nodes in place of either end."""
        from sar.nn import ranking_metrics
        from sar.train import score

        with torch.no_grad():
            h = self.whole(self.model([self.graph] * len(self.kind.FANOUTS), self.inputs))
            src, dst, types, label = self.content[f"{split}_pairs"][
                self.group.rank :: self.group.size
            ].T
            query = h[src] * self.model.scored(types) if "all" in self.content else h[src]
            scores = (query * h[dst]).sum(1)
            logits = torch.stack([torch.zeros_like(scores), scores], 1)
            found = {"auc": score("roc-auc", logits, label)}
            if "all" in self.content:
                asked = self.content[split][self.group.rank :: self.group.size]
                ranks = torch.cat([self._ranks(h, part) for part in asked.split(256)])
                found |= ranking_metrics(ranks)
        return found

    def whole(self, rows: Tensor) -> Tensor:
        """The rows of all nodes by original id, of which this process has some."""
        return rows

    def _ranks(self, h: Tensor, asked: Tensor) -> Tensor:
        """Of the destinations of (src, dst, type) among all nodes but those of other known edges;
        ties count half."""
        src, dst, types = asked.T
        scores = (h[src] * self.model.scored(types)) @ h.T
        true = scores.gather(1, dst.unsqueeze(1))
        keys, answers = self.content["all"]  # ascending
        key = src * self.content["relations"] + types
        first, last = torch.searchsorted(keys, key), torch.searchsorted(keys, key, right=True)
        line = torch.arange(len(asked)).repeat_interleave(last - first)
        within = torch.arange(len(line)) - (last - first).cumsum(0).sub(last - first)[line]
        scores[line, answers[first[line] + within]] = -torch.inf
        return 1 + (scores > true).sum(1) + (scores == true).sum(1) / 2


class Sampled(Alone):
    """A rank with its partition, which trains on mini-batches and is evaluated on the graph."""

    def __init__(self, name: str, content: str, parts: str) -> None:
        import sar

        self.data = sar.load_dgl_partition_data(parts, sar.initialize_comms().rank, "cpu")
        super().__init__(name, content)

    def load(self) -> None:
        self.graph = self.sar.construct_full_graph(self.data)
        self.graph.edata["etype"] = self.data.edge_features[f"{KEY}etype"].long()
        self.ids = self.data.node_features["_N/orig_id"].long()
        self.inputs = self.data.node_features.get("_N/feat", self.ids)
        self.seeds = self.data.edge_features[f"{KEY}seed"].bool()
        self.types = self.graph.edata["etype"][self.seeds]

    def fit(self, seed: int, epochs: int, batch: int) -> dict[str, float]:
        from sar.sampling import LinkNeighborLoader

        with LinkNeighborLoader(
            self.data, self.kind.FANOUTS, self.seeds, batch_size=batch // self.group.size,
            shuffle=True, neg_sampling=self.kind.NEGATIVES, exclude="reverse", as_="dgl", seed=seed,
        ) as self.loader:  # fmt: skip
            return super().fit(seed, epochs, batch)

    def steps(self, epoch: int, seed: int) -> Iterator[Tensor]:
        for inputs, pairs, none, blocks in self.loader:
            h = self.model(blocks, blocks[0].srcdata.get("feat", inputs))
            ends, others = (tuple(h[end] for end in one.edges()) for one in (pairs, none))
            yield self.model.losses(ends, others, self.types[pairs.edata["input_id"]])

    def finish(self) -> None:
        self.sar.gather_grads(self.model)

    def whole(self, rows: Tensor) -> Tensor:
        found = rows.new_zeros(self.graph.num_nodes_global(), rows.shape[1])
        found[self.ids] = rows
        return self.group.all_reduce(found)
