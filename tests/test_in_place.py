"""What users write in place: as DGL does it, or refused where the values do not exist yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.function as fn
import pytest
import torch
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, compare, whole
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

import sar

WIDTH = 4
Run = Callable[[Any, Tensor], Tensor]


def refused(run: Run, partitioned: Cutter, match: str) -> None:
    """``run`` raises the same ``NotSupportedError`` on both ranks."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> str:
        graph = Part(group, path).graph
        x = torch.ones(graph.num_nodes(), WIDTH, requires_grad=True)
        with pytest.raises(sar.NotSupportedError, match=match) as caught:
            run(graph, x).sum().backward()
        return str(caught.value)

    run_threads(2, case)


def through(message: Any, reduce: Any = None, apply: Any = None) -> Run:
    """A call of ``update_all`` on the rows and a column of ones of the edges."""

    def run(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["x"] = x * 1
        graph.edata["q"] = torch.ones(graph.num_edges(), WIDTH, dtype=x.dtype)
        graph.update_all(message, reduce or fn.sum("m", "out"), apply)
        return graph.ndata["out"] + graph.ndata["x"]

    return run


def relu_of_sources(edges: Any) -> dict[str, Tensor]:
    return {"m": F.relu(edges.src["x"], inplace=True) * edges.dst["x"]}


def both_ends(edges: Any) -> dict[str, Tensor]:
    edges.src["x"][:, :2].add_(1)
    edges.dst["x"].add_(edges.src["x"])
    return {"m": edges.src["x"] * edges.dst["x"]}


def mailbox(nodes: Any) -> dict[str, Tensor]:
    nodes.mailbox["m"].mul_(2)
    nodes.data["x"].add_(1)
    return {"out": torch.tanh(nodes.mailbox["m"]).sum(1) * nodes.data["x"]}


FUNCTIONS = {
    "sources": through(relu_of_sources),
    "both ends": through(both_ends),
    "mailbox": through(fn.copy_u("x", "m"), mailbox),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_write_into_copies(name: str, partitioned: Cutter) -> None:
    compare(FUNCTIONS[name], partitioned)


def test_functions_do_not_write_into_edge_columns(partitioned: Cutter) -> None:
    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": edges.data["q"].mul_(2) * edges.src["x"]}

    refused(through(message), partitioned, r"writes edge columns \['q'\] in place")


def transposed(e: Tensor) -> Tensor:
    return e.view(-1, 2, 2).transpose(1, 2)


def gated(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([F.relu(a, inplace=True), b], 1)


def edge_program(change: Callable[[Any, Tensor], Tensor]) -> Run:
    """Sums of what ``change`` returns for a lazy edge tensor."""

    def run(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["x"] = x
        graph.apply_edges(fn.u_sub_v("x", "x", "e"))
        graph.edata["m"] = change(graph, graph.edata["e"])
        graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
        return graph.ndata["out"]

    return run


def after(write: Callable[[Tensor], Any], read: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """What ``read`` makes of a tensor and its view [e, 2, 2] when ``write`` has been called."""

    def change(_: Any, e: Tensor) -> Tensor:
        view = e.view(-1, 2, 2)
        write(view)
        return read(e, view)

    return change


ALLOWED = {
    "a view alone": after(lambda view: view.mul_(3), lambda _, view: view.flatten(1)),
    "a view of what nobody reads": lambda _, e: F.relu(e.view(-1, WIDTH), inplace=True),
    "a copy": lambda _, e: (e * 2).add_(1) * e,
    "before a view": lambda _, e: e.add_(1).view(-1, 2, 2).flatten(1),
    "read before": lambda _, e: e.exp() * e.add_(1),
    "another view": lambda _, e: gated(e[:, :2], e[:, 2:]),
    "nothing": lambda _, e: (e.view(-1, 2, 2), e.detach_())[0].flatten(1),
    "a transposed copy": lambda _, e: transposed(e).contiguous().mul_(2).flatten(1) + e,
    "a reshaped copy": lambda _, e: transposed(e).reshape(-1, 4).mul_(2) + e,
    "an expanded copy": lambda _, e: e.unsqueeze(2).expand(-1, -1, 2).flatten(1).mul_(2)[:, 4:] + e,
    "zeros": lambda _, e: (e.exp(), (e * 1).zero_())[0],
    "filled": lambda graph, e: e.fill_(2.0) * graph.edata["e"],
    "copied": lambda _, e: e.copy_(e * 3) * e.copy_(torch.arange(4.0)).add_(1),
    "elu": lambda _, e: (F.elu_(e), e * 2)[1],
    "leaky relu": lambda _, e: (F.leaky_relu_(e, 0.2), e * 2)[1],
    "selu": lambda _, e: (torch.selu_(e), e * 2)[1],
}
STALE = {
    "a view": after(lambda view: view.mul_(3), lambda e, _: e),
    "a view of a view": after(lambda view: view[:, 0].add_(1), lambda e, _: e),
    "a view of a view of what is written": lambda _, e: (e.view(-1, 2, 2).flatten(1), e.add_(1))[0],
    "through a view": after(lambda view: view[:, 0].add_(1), lambda _, view: view.flatten(1)),
    "itself": lambda _, e: (e.view(-1, 2, 2), e.add_(1))[0].flatten(1),
    "no copy": lambda _, e: (e, e.contiguous().add_(1))[0],
    "detached": lambda _, e: (e, e.detach().add_(1))[0],
    "a fallback": after(lambda view: view.cumsum_(0), lambda e, _: e),
    "stale in place": after(lambda view: view.mul_(3), lambda e, _: e.add_(1)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_writes_that_nobody_else_sees(name: str, partitioned: Cutter) -> None:
    compare(edge_program(ALLOWED[name]), partitioned)


@pytest.mark.parametrize("name", STALE)
def test_what_shares_values_with_a_written_tensor_is_stale(name: str, partitioned: Cutter) -> None:
    refused(edge_program(STALE[name]), partitioned, "shares its values was written in place")


class Square(Function):
    """With a gradient of its own: three times the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 6 * x * grad


def test_a_write_without_gradients_is_refused(partitioned: Cutter) -> None:
    def change(_: Any, e: Tensor) -> Tensor:
        with torch.no_grad():
            return e.clamp_(-1, 1)

    refused(edge_program(change), partitioned, "written in place where gradients are disabled")


def test_functions_that_write_run_in_inference_mode(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        part, results = Part(group, path), []
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                x = part.node_rows(whole(mixed().total_nodes, (WIDTH,), seed=1), grad=False)
                results.append(FUNCTIONS["both ends"](part.graph, x).clone())
        assert torch.equal(*results)

    run_threads(2, case)


@pytest.mark.parametrize("p, training", [(0.5, False), (0.0, True)])
def test_dropout_that_does_nothing_writes_nothing(
    p: float, training: bool, partitioned: Cutter
) -> None:
    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": F.dropout(edges.data["q"], p, training, inplace=True) * edges.src["x"]}

    compare(through(message), partitioned)


@pytest.mark.parametrize("change", [Square.apply, lambda e: Square.apply(e.exp()).mean(1)])
def test_a_function_of_autograd_wants_values(change: Any, partitioned: Cutter) -> None:
    refused(edge_program(lambda _, e: change(e)), partitioned, r"Square.apply: got an edge tensor")


def test_a_function_of_autograd_inside_a_message_function(partitioned: Cutter) -> None:
    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": Square.apply(edges.src["x"] - edges.dst["x"])}

    compare(through(message), partitioned)
    compare(
        edge_program(lambda _, e: Square.apply(getattr(e, "materialize", e.clone)())), partitioned
    )


def shifted(nodes: Any) -> dict[str, Tensor]:
    return {"out": 2 * nodes.data["out"] + nodes.data["x"]}


def other_column(nodes: Any) -> dict[str, Tensor]:
    return {"z": torch.sigmoid(nodes.data["out"]), "y": nodes.data["out"].clamp(-9, 9)}


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("message", [fn.copy_u("x", "m"), lambda edges: {"m": -edges.src["x"]}])
def test_a_function_of_what_was_reduced(op: str, message: Any, partitioned: Cutter) -> None:
    """Rows without edges included; columns that it does not return stay as they were."""

    def run(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["x"], graph.ndata["out"] = x, x * 3
        graph.update_all(message, getattr(fn, op)("m", "out"), other_column)
        first = graph.ndata["z"] + graph.ndata["y"] + graph.ndata["out"]
        graph.update_all(message, getattr(fn, op)("m", "out"), shifted)
        return first + graph.ndata["out"]

    assert (to_dgl(mixed()).in_degrees() == 0).any()
    compare(run, partitioned)


def test_columns_written_in_pieces_of_a_reversed_graph(partitioned: Cutter) -> None:
    """Their functions read the ends of the edges as they were when they were called."""

    def run(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["x"] = x
        graph.apply_edges(lambda edges: {"m": edges.src["x"] * 3}, torch.arange(graph.num_edges()))
        back = graph.reverse(copy_edata=True)
        graph.apply_edges(lambda edges: {"m": edges.src["x"] * 7}, torch.arange(graph.num_edges()))
        back.update_all(fn.copy_e("m", "m"), fn.mean("m", "out"))
        graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
        return graph.ndata["out"] + back.ndata["out"]

    compare(run, partitioned)


class Layer(torch.nn.Module):
    """A layer whose code runs ``change`` on the graph, so that it gets lazy edge columns."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        graph.ndata["x"] = x
        result = self.change(graph)
        graph.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "out"))
        return graph.ndata["out"] if result is None else graph.ndata["out"] + result


def in_layer(change: Callable[[Any], Any]) -> Run:
    def run(graph: Any, x: Tensor) -> Tensor:
        graph.edata["w"] = torch.full((graph.num_edges(), 1), 3.0, dtype=x.dtype)
        out = Layer(change)(graph, x)
        graph.update_all(fn.copy_e("w", "m"), fn.sum("m", "w"))
        return out + graph.ndata["w"]

    return run


def add_scores(graph: Any) -> None:
    """Written with values that are computed for it."""
    graph.ndata["y"] = graph.ndata["x"].detach()[:, :1]
    graph.apply_edges(fn.u_sub_v("y", "y", "s"))
    graph.edata["w"].add_(graph.edata["s"])


def stored_again(graph: Any) -> None:
    graph.edata["w"] *= 2
    graph.edata["w"] += 1


WRITTEN = {
    "multiplied": lambda graph: (graph.edata["w"].mul_(2), None)[1],
    "stored again": stored_again,
    "some rows": lambda graph: graph.edata["w"].__setitem__((slice(None), 0), 5.0),
    "a mask": lambda graph: graph.edata["w"].__setitem__(graph.edata["w"] > 1, 7.0),
    "inplace=True": lambda graph: (F.hardtanh(graph.edata["w"], -1, 2, inplace=True), None)[1],
    "filled": lambda graph: (graph.edata["w"].fill_(2.0), None)[1],
    "with what is lazy": add_scores,
    "initialized": lambda graph: (torch.nn.init.constant_(graph.edata["w"], 4.0), None)[1],
    "by name": lambda graph: (torch.clamp_(input=graph.edata["w"], max=2.0), None)[1],
    "dropped": lambda graph: (F.dropout(graph.edata["w"], 1.0, True, inplace=True), None)[1],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_layer_writes_into_an_edge_column(name: str, partitioned: Cutter) -> None:
    compare(in_layer(WRITTEN[name]), partitioned)


def recorded_before(graph: Any) -> Tensor:
    twice = graph.edata["w"] * 2
    graph.edata["w"].add_(1)
    graph.edata["t"] = twice
    graph.update_all(fn.copy_e("t", "m"), fn.sum("m", "t"))
    return graph.ndata["t"]


REFUSED = {
    "a view of a column": (
        lambda graph: graph.edata["w"][:, 0].mul_(2),
        "a view of an edge column",
    ),
    "another place": (lambda g: torch.mul(g.edata["w"], 2, out=g.edata["w"]), "mul: .* and out="),
    "a plain place": (lambda g: torch.exp(g.edata["w"], out=torch.empty(0)), "exp: .* and out="),
    "another shape": (lambda graph: graph.edata["w"].squeeze_(-1), "squeeze_: .* expected squeeze"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_cannot_be_seen_are_refused(name: str, partitioned: Cutter) -> None:
    change, match = REFUSED[name]
    refused(in_layer(change), partitioned, match)


def test_what_was_recorded_of_a_column_before_it_was_written(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        graph = Part(group, path).graph
        x = torch.ones(graph.num_nodes(), WIDTH, requires_grad=True)
        with pytest.raises(sar.SarError, match="written in place"):
            in_layer(recorded_before)(graph, x)

    run_threads(2, case)


class Scaled(Function):
    """Rows times a parameter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        return rows * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.sum(0)


def scaled(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        graph.ndata["y"] = x
        graph.apply_edges(fn.u_sub_v("y", "y", "d"))
        rows = graph.edata["d"] * 2
    graph.edata["m"] = Scaled.apply(rows, weight)
    graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
    return graph.ndata["out"]


def test_a_function_of_autograd_would_lose_the_gradient_of_a_parameter(partitioned: Cutter) -> None:
    weight = torch.full((WIDTH,), 2.0, requires_grad=True)
    refused(lambda graph, x: scaled(graph, x, weight), partitioned, "Scaled.apply: got an edge")
    compare(lambda graph, x: scaled(graph, x, weight.detach().to(x.dtype)) + x, partitioned)
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        graph = Part(group, path).graph
        with torch.no_grad():  # nothing is lost where nobody asks
            scaled(graph, torch.ones(graph.num_nodes(), WIDTH), weight)

    run_threads(2, case)
