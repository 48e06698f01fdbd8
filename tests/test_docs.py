"""The documentation runs: Python blocks are executed, commands parsed, links followed. Messages
that it explains are those of the library, and its sentences are short enough to be read once.

Python blocks of a page run in order, in one process with one rank, in a folder that holds
`parts/products.json`. A block that cannot run there is preceded by an HTML comment
`<!-- not run: reason -->`. In shell blocks, `sar` commands must be ones that the command line
accepts and `make` targets must exist.

Of sentences running text alone is counted: code, tables, headings, formulas and comments are apart,
a piece of code or a formula inside a sentence is one word, and a link is its text. Each paragraph
and each item of a list begins a new sentence.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from harness.nursery import Nursery

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "examples/*.md")
    for path in sorted(ROOT.glob(pattern))
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SKIP = re.compile(r"<!-- not run: \S.* -->\n\Z")
EXPLAINED = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
OF_TORCH = "has been modified by an inplace operation"
MOST_WORDS = 40

# What is no prose: fences, comments, formulas and what stands at the head of a page; then lines of
# headings, tables, boxes and tags, and what asks for the reference of a name, with its options.
BLOCK = re.compile(r"^ *(```|~~~).*?^ *\1 *$|<!--.*?-->|\$\$.*?\$\$|\A---\n.*?^---$", re.M | re.S)
LINE = re.compile(
    r"^:::.*(?:\n+ {4}.*)*|^ *(?:#|\||!!!|\?\?\?|===).*$|^ *</?[a-z][^>\n]*> *$", re.M
)
ITEM = re.compile(r"^ *(?:[*+-]|\d+\.) +", re.M)
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)[.!?][)\"'*_]*(?=\s|$)")
ONE_WORD = re.compile(r"(`+)[^`].*?\1|\$[^$]+\$", re.S)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, first line in the page, text, and whether it may run."""

    language: str
    line: int
    text: str
    runs: bool


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(found[1], line, found[2], not SKIP.search(text[: found.start()]))


def python_pages() -> list[str]:
    return [p for p in PAGES if any(b.language == "python" and b.runs for b in blocks(p))]


def commands(page: str) -> Iterator[list[str]]:
    """Commands of the shell blocks, without comments, prompts and leading assignments."""
    for block in blocks(page):
        if block.language in ("shell", "bash", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.strip().removeprefix("$ "), comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    yield words


def sar_arguments(words: list[str]) -> list[str] | None:
    """What `sar` gets in `sar ...` or in anything that ends in `-m sar ...`; else None."""
    if words[0] == "sar":
        return words[1:]
    for here, pair in enumerate(zip(words, words[1:])):
        if pair == ("-m", "sar"):
            return words[here + 2 :]
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with parts/products.json: 200 nodes in one part."""
    import sar

    where = tmp_path_factory.mktemp("docs")
    source = "synthetic:nodes=200,edges=1200,seed=0,features=20"
    sar.partition_graph(source, where / "parts", 1, name="products")
    return where


@pytest.mark.parametrize("page", python_pages())
def test_python_blocks_run(page: str, folder: Path, nursery: Nursery) -> None:
    environment = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    child = nursery.start([__file__, page], environment, folder)
    try:
        assert child.wait(100) == 0, child.text("err")[-3000:]
    finally:
        child.kill()


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_accepted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import registry
    from sar.__main__ import read_words

    monkeypatch.chdir(tmp_path)
    Path("mynet.py").write_text("class Net: ...\nclass GraphSAGE: ...\n")  # the reader's models
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(page):
        arguments = sar_arguments(words)
        if arguments is not None:
            try:
                read_words(arguments)
            except SystemExit as stop:  # argparse prints the reason and exits; --help exits with 0
                assert stop.code == 0, " ".join(words)
        elif words[:4] == ["python", "-m", "benchmarks", "run"]:
            assert registry.select(registry.load_all(), words[4])  # raises for an unknown name
        elif words[0] == "make":
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= targets, " ".join(words)


def test_install_commands_work_from_a_checkout() -> None:
    """No registry has the package."""
    (first, *_) = (words for words in commands("README.md") if "install" in words)
    assert first == ["pip", "install", "."]
    asked = re.compile(r"pip install [^`\n]*?(sar-gnn[^\s`]*)")
    assert not [
        (page, found[1])
        for page in PAGES
        if page != "CHANGELOG.md"
        for found in asked.finditer((ROOT / page).read_text())
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        goal = (ROOT / page).parent / name if name else ROOT / page
        assert goal.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(goal), f"{page}: {link}"


def anchors(page: Path) -> set[str]:
    """The ids that headings get: lower case, words joined by dashes, no punctuation; and names."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    names = re.findall(r"^::: (\S+)$", text, re.M)  # the reference of a name
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {*names, *(heading.replace(" ", "-") for heading in plain)}


def test_every_public_name_is_documented() -> None:
    import sar

    text = (ROOT / "docs/api.md").read_text()
    words = set(re.findall(r"\w+", text))
    missing = [name for name in sar.__all__ if name not in words and not name.startswith("__")]
    assert not missing, missing


def test_messages_that_are_explained_are_the_librarys() -> None:
    """Literals that Python joins are joined."""
    text = "".join(path.read_text() for path in (ROOT / "sar").rglob("*.py"))
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)
    assert len(EXPLAINED) > 30
    pieces = {message: message.split("...") for message in EXPLAINED if OF_TORCH not in message}
    assert not [m for m, parts in pieces.items() if any(p.strip() not in source for p in parts)]


def test_performance_is_tables_not_a_diary() -> None:
    assert len((ROOT / "docs/performance.md").read_text().splitlines()) <= 300


def lines_kept(found: re.Match[str]) -> str:
    """An empty paragraph in place of what is no prose; later lines keep their numbers."""
    return "\n" * found[0].count("\n")


def as_one_word(found: re.Match[str]) -> str:
    return "_".join(found[0].split()) + lines_kept(found)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a page, each with the number of the line on which it begins."""
    prose = LINE.sub(lines_kept, BLOCK.sub(lines_kept, text))
    prose = ITEM.sub(lambda found: "\0" + found[0][1:], prose)  # an item begins a paragraph
    for paragraph in re.finditer(r"(?:[^\n\0]|\n(?!\s*\n))+", prose):
        plain = ONE_WORD.sub(as_one_word, paragraph[0])
        plain = LINK.sub(lambda found: found[1] or "x", plain)
        above = prose.count("\n", 0, paragraph.start()) + 1
        begin = 0
        for end in [*(found.end() for found in END.finditer(plain)), len(plain)]:
            sentence = plain[begin:end]
            begin = end - len(sentence.lstrip())
            yield above + plain.count("\n", 0, begin), sentence
            begin = end


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ("CHANGELOG.md", "CONTRIBUTING.md")]
)
def test_no_sentence_is_long(page: str) -> None:
    long = [
        f"{page}:{line}: {words(sentence)} words: {' '.join(sentence.split())}"
        for line, sentence in sentences((ROOT / page).read_text())
        if words(sentence) > MOST_WORDS
    ]
    if long:
        found = "\n".join(long)
        pytest.fail(f"{len(long)} sentences above {MOST_WORDS} words:\n{found}", pytrace=False)


def run_page(page: str) -> None:
    """Execute a page's blocks in one module; tracebacks point into the page."""
    module = sys.modules["__page__"] = ModuleType("__page__")
    for block in blocks(page):
        if block.language == "python" and block.runs:
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(ROOT / page), "exec"), vars(module))


if __name__ == "__main__":
    run_page(sys.argv[1])
