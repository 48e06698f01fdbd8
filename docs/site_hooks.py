"""What `mkdocs` does for this site beyond its plugins: pages from outside of docs/, and formulas.

The pages are written for a viewer of plain files, too, so they link to files of the repository.
Here these files become pages, and links to them lead there. A picture that is drawn light has a
dark twin, whose name differs in that word alone. MathJax comes from a package and is
loaded by the pages that have formulas, so the site needs no other server.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import mathjax
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
MATHJAX = Path(mathjax.__file__).parent / "static" / "mathjax"
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").iterdir()
    if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
)
OPTIONS = "<!-- options -->"
REPOSITORY = "<!-- repository -->"
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples/README.md"]
PAIR = re.compile(r'<img ([^>]*src="[^"]*-)light(\.(?:svg|png))"([^>]*)>')
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")

FORMULAS = """
<script>
window.MathJax = {
  options: {ignoreHtmlClass: ".*", processHtmlClass: "arithmatex", enableMenu: false},
  tex: {inlineMath: [["\\\\(", "\\\\)"]], displayMath: [["\\\\[", "\\\\]"]]},
};
</script>
<script defer src="%sassets/mathjax/tex-svg.js"></script>
"""


def place(path: str) -> str:
    """Where a file of the repository is among the site's sources."""
    path = posixpath.normpath(path)
    if path == "README.md":
        return "index.md"
    if path.startswith("examples/") and not path.endswith(".md"):
        return f"examples/{Path(path).parts[1].removesuffix('.py')}.md"
    return path.removeprefix("docs/") + (".md" if path == "LICENSE" else "")


def on_files(files: Files, config: Any) -> Files:
    for name in PAGES:
        text = (ROOT / name).read_text()
        files.append(File.generated(config, place(name), content=text))
    for path in EXAMPLES:
        files.append(File.generated(config, place(f"examples/{path.name}"), content=example(path)))
    for name in ("es5/tex-svg.js", "LICENSE"):
        target = f"assets/mathjax/{Path(name).name}"
        files.append(File.generated(config, target, abs_src_path=str(MATHJAX / name)))
    return files


def example(path: Path) -> str:
    """A page with the text of a file, or of all files of a folder."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    names = [f"## {file.name}\n\n" if path.is_dir() else "" for file in files]
    kinds = {".py": "python", ".slurm": "bash", "": "docker"}
    texts = [f"```{kinds.get(f.suffix, 'text')}\n{f.read_text()}```\n" for f in files]
    return f"# {path.name}\n\n" + "\n".join(map(str.__add__, names, texts))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them; `page` may come from anywhere in the repository."""
    here = page.file.src_uri
    home = posixpath.dirname(here if page.file.generated_by else f"docs/{here}")

    def as_here(found: re.Match[str]) -> str:
        there = place(posixpath.join(home, found[1]))
        return posixpath.relpath(there, posixpath.dirname(here) or ".")

    if OPTIONS in markdown:
        tables = "\n".join(commands())
        markdown = markdown.replace(OPTIONS, f'<div class="options" markdown>\n{tables}\n</div>')
    markdown = LINK.sub(as_here, markdown)
    address = repository()
    return markdown.replace(REPOSITORY, f"[{address}]({address})" if address else "")


def repository() -> str:
    """Where this checkout was cloned from, if a browser can go there."""
    try:
        asked = ["git", "config", "--get", "remote.origin.url"]
        told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except OSError:  # no git
        return ""
    web = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", told.strip())
    return web.removesuffix(".git") if re.fullmatch(r"https://[\w.-]+/[^\s@]+", web) else ""


def commands() -> Iterator[str]:
    """The options of all commands as Markdown, from what declares them."""
    from sar.cli.commands import COMMANDS

    for name, command in COMMANDS.items():
        yield f"\n### sar {name}\n\n{in_html(command.description)}\n"
        for group in command.groups:
            yield f"\n| {group.title} | |\n|---|---|"
            yield from map(row, group.options)


def row(option: Any) -> str:
    """A line of the table: what is written, and what it means."""
    value = option.value_word
    shapes = {"?": f"[{value}]", "+": f"{value} [{value} ...]", "*": f"[{value} ...]"}
    written = " ".join(filter(None, [*option.flags[-1:], shapes.get(option.many, value)]))
    written = written.replace("|", "\\|")
    return f"| `{written}` | {in_html(option.text())} |"


def in_html(text: str) -> str:
    """Text of a terminal as Markdown: nothing in it but backquotes is a mark."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<>|#\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Pictures NAME-light and NAME-dark take turns with the colors of the page."""
    each = (rf'<img \1{color}\2#only-{color}"\3>' for color in ("light", "dark"))
    html = PAIR.sub("".join(each), html)
    if 'class="arithmatex"' not in html:
        return html
    up = "../" * page.file.src_uri.count("/")
    return html + FORMULAS % up


class PlainRoles(griffe.Extension):
    """Docstrings as Markdown: of ``:func:`` the name alone, and a heading for all ``Raises``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
            everywhere = "Errors are raised on every rank.\n\nRaises:"
            text = re.sub(r"^Raises, on every rank:$", everywhere, text, flags=re.M)
            obj.docstring.value = text
