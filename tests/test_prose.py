"""Sentences of the documentation are short enough to be read once.

Counted is running text alone: code, tables, headings, formulas and comments are apart, a piece of
code or a formula inside a sentence is one word, and a link is its text. Each paragraph and each
item of a list begins a new sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "examples/README.md"] + [
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))
]
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


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_long(page: str) -> None:
    long = [
        f"{page}:{line}: {words(sentence)} words: {' '.join(sentence.split())}"
        for line, sentence in sentences((ROOT / page).read_text())
        if words(sentence) > MOST_WORDS
    ]
    if long:
        found = "\n".join(long)
        pytest.fail(f"{len(long)} sentences above {MOST_WORDS} words:\n{found}", pytrace=False)


def test_performance_is_tables_not_a_diary() -> None:
    assert len((ROOT / "docs/performance.md").read_text().splitlines()) <= 250


@pytest.mark.parametrize(
    "text, counted",
    [
        ("One two. Three four five!\n", [2, 3]),
        ("One `a b c` $x + y$ two e.g. three.\n", [6]),
        ("See [the page](a.md#b) (or two).\n", [5]),
        ("* one two\n  three\n* four\n\nfive\nsix\n", [3, 1, 2]),
        ("# A heading\n\none\n\n```python\nx = 1\n```\n| a | b |\n|---|---|\n\ntwo\n", [1, 1]),
        ("one\n\n$$ a = b + c $$\n\n<!-- not run: a reason -->\ntwo\n", [1, 1]),
        ("::: sar.nn\n    options:\n      members: [a, b]\n\none two\n", [2]),
    ],
)
def test_words_are_counted(text: str, counted: list[int]) -> None:
    assert [n for _, s in sentences(text) if (n := words(s))] == counted


def test_lines_are_named() -> None:
    text = "# Title\n\nOne two. Three\nfour. Five.\n\n```\ncode\n```\n\n* six\n* seven\n"
    found = [(line, " ".join(s.split())) for line, s in sentences(text) if words(s)]
    assert [line for line, _ in found] == [3, 3, 4, 10, 11], found
