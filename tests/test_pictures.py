"""Pictures and reports: what they say, that nothing is hidden, that both grounds are readable."""

from __future__ import annotations

import builtins
import json
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sar.__main__ import main
from sar.pictures import DARK, LIGHT, Plan, draw_cut, draw_plan, draw_run, read_run, save
from sar.pictures.report import page
from sar.pictures.run import SIZE
from sar.plan import estimate, numbers, other_number

pytest.importorskip("matplotlib")
HOSTILE = "</td><script>alert(1)</script>\"'&$x_1$"


def result(epochs: int = 12, ranks: int = 4, **config: Any) -> dict[str, Any]:
    """What `sar train --json` writes; the best epoch is the one before the last."""
    score = [0.5 + 0.4 * at / epochs for at in range(epochs)]
    score[-1] -= 0.3 * (epochs > 1)
    records = [
        {"epoch": at + 1, "loss": 2.0 / (at + 1), "train_acc": value, "val_acc": value - 0.05,
         "test_acc": None, "seconds": 30.0 if at == 0 else 0.2}
        for at, value in enumerate(score)
    ]  # fmt: skip
    sizes = [
        {"rank": rank, "peak_rss_mb": 900.0 + rank, "baseline_rss_mb": 400.0,
         "sent_bytes": 3_000_000 * epochs, "received_bytes": 2_000_000 * epochs,
         "avoided_bytes": 0}
        for rank in range(ranks)
    ]  # fmt: skip
    seconds = {"compute": 2.4, "wait": 1.2, "longest_compute": 3.6, "longest_wait": 2.4}
    moved = {"sent": 4800, "received": 4800, "exchanges": 3}
    layers = [{"layer": "convs.0", "pass": "forward", **seconds, **moved}]
    told = {"input": "parts/mine.json", "model": "sage", "metric": "accuracy", "num_nodes": 12345}
    return {
        "epochs": records, "ranks": sizes, "layers": layers, "config": told | config,
        "versions": {"sar": "0.1.0"},
    }  # fmt: skip


def texts(svg: Path) -> list[str]:
    """The words of an SVG, which has to be well-formed XML."""
    root = ElementTree.fromstring(svg.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    return str(path)


def plan(limit: float | None = 2.0**34) -> Plan:
    near = {"a": 1.0, "b": 1.02, "c": 1.05, "d": 1.6}  # lines whose names must make room
    memory = {name: [(n, k * 2**33 / n) for n in (1, 2, 4)] for name, k in near.items()}
    seconds = {name: [(n, k * 5.0 / n) for n in (1, 2, 4)] for name, k in near.items()}
    return Plan("graph, model", "dotted: 2 ranks", memory, seconds, 2, limit)


def cut(parts: int) -> dict[str, Any]:
    names = ("num_nodes", "num_edges", "halo_nodes", "boundary_nodes", "train_nodes")
    one = {name: 20_000 + 10 * place for place, name in enumerate(names)}
    halo = [[0 if p == q else 1000 * (p + q) for q in range(parts)] for p in range(parts)]
    return {
        **{name: parts * value for name, value in one.items()}, "graph_name": "mine",
        "num_parts": parts, "cut_edges": 10_000, "parts": [one] * parts, "rows": {"halo": halo},
    }  # fmt: skip


def test_a_run_says_all_in_words(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run.svg"
    assert main(["report", written(tmp_path, result()), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    found = texts(out)
    for word in (
        "Training loss", "Accuracy", "best: epoch 11, val 0.7833", "above: epoch 1, 30 s",
        "train 0.567", "val 0.517", "ms", "MiB", "MB", "epoch", "rank", "sent", "received",
        "process with its libraries", "900", "3", "2",
    ):  # fmt: skip
        assert word in found, word
    assert not any(word.startswith("test ") for word in found), "it was never evaluated"


@pytest.mark.parametrize("dark", [False, True])
def test_png_and_svg_in_light_and_dark(dark: bool, tmp_path: Path) -> None:
    words = ["report", written(tmp_path, result(1, 1)), *["--dark"] * dark]
    for suffix, begin in (("PNG", b"\x89PNG"), ("svg", b"<?xml")):
        out = tmp_path / f"new/run.{suffix}"
        assert main([*words, "--out", str(out)]) == 0
        assert out.read_bytes().startswith(begin)
    paper = (DARK if dark else LIGHT).paper
    assert f"fill: {paper}" in (tmp_path / "new/run.svg").read_text()


DRAWN = {
    "run": (partial(draw_run, read_run(result())), SIZE),
    "long run": (partial(draw_run, read_run(result(500, 64))), SIZE),
    "one epoch": (partial(draw_run, read_run(result(1, 1))), SIZE),
    "plan": (partial(draw_plan, plan()), (13.0, 5.4)),
    "cut": (partial(draw_cut, cut(4)), (13.0, 7.5)),
    "cut in one": (partial(draw_cut, cut(1)), (13.0, 7.5)),
    "cut in many": (partial(draw_cut, cut(40)), (13.0, 7.5)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_lies_over_anything(name: str, tmp_path: Path) -> None:
    """Legends are outside of the axes; words are inside of the figure and not over each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    draw, size = DRAWN[name]

    def look(figure: Any, colors: Any) -> None:
        draw(figure, colors)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        check_words(figure, canvas.get_renderer())

    save(tmp_path / "x.svg", look, size)


def check_words(figure: Any, renderer: Any) -> None:
    for axes in figure.axes:
        inside = axes.get_window_extent(renderer)
        legend = axes.get_legend()
        if legend is not None:
            assert legend.get_window_extent(renderer).y0 >= inside.y1 - 1
    boxes = [(text.get_text(), box) for text, box in words_of(figure, renderer)]
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for at, (text, box) in enumerate(boxes):
        for other, second in boxes[:at]:
            assert not overlap(box, second), f"{text!r} lies over {other!r}"


def words_of(figure: Any, renderer: Any) -> list[tuple[Any, Any]]:
    from matplotlib.text import Text

    hidden = {
        text
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        for text in (tick.label1, tick.label2)
        if not low(axis) <= tick.get_loc() <= high(axis) or not text.get_visible()
    }
    shown = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    return [(t, t.get_window_extent(renderer)) for t in shown if t not in hidden]


def low(axis: Any) -> float:
    return min(axis.get_view_interval()) - 1e-9


def high(axis: Any) -> float:
    return max(axis.get_view_interval()) + 1e-9


def overlap(a: Any, b: Any) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1


def test_numbers_of_ranks_of_a_plan() -> None:
    assert numbers(8) == [1, 2, 4, 8, 16, 32] and numbers(1) == [1, 2, 4]
    assert numbers(2048) == [256, 512, 1024, 2048]
    whole = estimate("mine", 1000, 20_000, 4, features=7, classes=3)
    half = estimate("mine", 1000, 20_000, 4, features=7, classes=3, halo_share=1.2)
    for graph in (whole, half):  # the same number gives the same rows, others the same ratio
        assert other_number(graph, 4).rows_sent() == pytest.approx(graph.rows_sent(), rel=0.01)
    other, random = other_number(half, 8), estimate("mine", 1000, 20_000, 8)
    ratio = half.rows_sent() / whole.rows_sent()
    assert other.rows_sent() == pytest.approx(ratio * random.rows_sent(), rel=0.01)
    assert (other.features, other.classes, other.size) == (7, 3, 8)
    assert other_number(half, 1).rows_sent() == 0


def test_numbers_of_an_svg_are_whole(tmp_path: Path) -> None:
    """What shortens the file leaves the words alone; the same picture has the same bytes."""

    def draw(figure: Any, _: Any) -> None:
        figure.add_subplot().set_title("0.123456789 $y_2$ <&>")

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "x.svg", draw, (4, 3))
    assert "0.123456789 $y_2$ <&>" in texts(tmp_path / "a/x.svg")
    assert (tmp_path / "a/x.svg").read_bytes() == (tmp_path / "b/x.svg").read_bytes()


class Page(HTMLParser):
    """Tags and attributes of a page, and the words of each cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words += f"\n{data}"


def test_a_page_holds_each_setting_and_asks_for_nothing() -> None:
    run = result(lr=0.01, kept={"place": None, "share": 1.0}, batch_norm=True)
    text = page(read_run(run), cut(3))
    found = Page(text)
    for name, value in run["config"].items():
        assert name in found.words or name == "num_nodes", name
        assert isinstance(value, (dict, bool, int)) or str(value) in found.words, name
    for word in (
        "12,345", "place -, share 1.0", "yes", "convs.0", "200 ms", "100 ms", "100 B", "3 MB",
        "0.1.0", "Halo rows between parts",
    ):  # fmt: skip
        assert word in found.words, word
    assert not {"script", "link", "iframe", "img", "base", "object"} & set(found.tags)
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    links = [value for name, value in found.attributes if name in ("href", "xlink:href", "src")]
    assert links and all(value.startswith(("#", "data:image/png;base64,")) for value in links)
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and {v[1:] for v in links if v[0] == "#"} <= set(ids)
    assert "prefers-color-scheme:dark" in text and LIGHT.first not in text.split("</style>")[1]


def test_hostile_names_are_words() -> None:
    run = result(input=HOSTILE, model=HOSTILE, metric=HOSTILE, odd={HOSTILE: HOSTILE})
    run["config"][HOSTILE] = HOSTILE
    run["layers"][0] |= {"layer": HOSTILE, "pass": HOSTILE}
    run["versions"][HOSTILE] = HOSTILE
    text = page(read_run(run), cut(2) | {"graph_name": HOSTILE})
    found = Page(text)
    assert "script" not in found.tags and HOSTILE in found.words
    assert "<script" not in text and text.count("<!DOCTYPE") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "run: got list, expected the JSON of sar train --json"),
        ({"epochs": [], "ranks": []}, "got no layers, config"),
        (result() | {"epochs": []}, "got no epoch"),
        (result() | {"ranks": []}, "got no epoch or no rank"),
        (result() | {"epochs": ["a"]}, "run: epochs: got no number for 'epoch'"),
        (result() | {"epochs": [{"epoch": 1, "loss": None}]}, "epochs: got no number for 'loss'"),
        (result() | {"epochs": [{"epoch": 10**400}]}, "epochs: got no number for 'epoch'"),
        (result() | {"layers": [{}]}, "layers: got no number for 'compute'"),
        (result() | {"ranks": [{"rank": 0}]}, "ranks: got no number for 'peak_rss_mb'"),
        (result() | {"config": [1]}, "got no options in config"),
    ],
)
def test_what_is_no_run(content: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    out = ["--out", str(tmp_path / "run.html")]
    assert main(["report", written(tmp_path, content), *out]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run.html").exists()


def test_wrong_files_of_a_report(tmp_path: Path, capsys: Any) -> None:
    run, page_ = written(tmp_path, result()), str(tmp_path / "run.html")
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for words, message in (
        ([run, "--out", str(tmp_path / "run.pdf")], "ends in .html or .png or .svg"),
        ([str(tmp_path / "text.json"), "--out", page_], "is no JSON"),
        ([str(tmp_path / "deep.json"), "--out", page_], "is no JSON"),
        ([str(tmp_path / "none.json"), "--out", page_], "No such file"),
        ([run, "--out", page_, "--cut", run], "run.json"),
    ):
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "parts.json", "--plot", "x.svg"],
        ["plan", "ogbn-arxiv", "--hosts", "2", "--plot", "x.svg"],
        ["train", "parts.json", "--plot", "x.svg"],
        ["train", "parts.json", "--report", "x.html"],
        ["report", "run.json", "--out", "x.html"],
        ["bench"],
    ],
)
def test_without_matplotlib(
    words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before any file is read or rank started."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(words) == 2
    assert "pip install 'sar-gnn[plot]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def linear(color: str) -> list[float]:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(color: str) -> float:
    return sum(k * p for k, p in zip((0.2126, 0.7152, 0.0722), linear(color)))


def contrast(a: str, b: str) -> float:
    high_, low_ = sorted((luminance(a), luminance(b)), reverse=True)
    return (high_ + 0.05) / (low_ + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colors_are_readable(dark: bool) -> None:
    """WCAG's 4.5, for words and for what is drawn."""
    colors = DARK if dark else LIGHT
    for color in (colors.ink, colors.quiet, *colors.data):
        assert contrast(color, colors.paper) >= 4.5, color
