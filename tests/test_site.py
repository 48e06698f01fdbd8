"""The documentation as a site: it builds without a warning and is whole on a disk, offline.

The site needs the extra `docs`; the pages are opened by Debian's chromium. Where one of them is
missing, its tests are skipped and say so.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("mkdocs", "material", "mkdocstrings", "mathjax")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1300,1000",
]  # fmt: skip
# as if the checkout had been cloned from there
ORIGIN = {
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "remote.origin.url",
    "GIT_CONFIG_VALUE_0": "git@git.example.org:team/sar.git",
}  # fmt: skip
NO_MATH = re.compile(r"\$\$|\\\(|\\\[|\\frac|\\sum")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the site needs pip install '.[docs]'; missing: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
        env={**os.environ, **ORIGIN, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "WARNING" not in said, said[-3000:]
    return folder


class Page(HTMLParser):
    """The ids of a page, where its links lead, and what it loads by itself."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {key: value or "" for key, value in attrs}
        self.ids |= {has[key] for key in ("id", "name") if key in has}
        if "src" in has:
            self.loads.append(has["src"])
        if "href" in has:
            (self.loads if tag == "link" else self.links).append(has["href"])


page_of = cache(Page)


def pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def test_all_pages_are_there_and_in_the_navigation(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in pages(site)}
    written = {path.stem + ".html" for path in (ROOT / "docs").glob("*.md")}
    assert written <= built
    home = {urldefrag(link)[0] for link in page_of(site / "index.html").links}
    assert {name for name in written if name not in home} <= {"index.html"}


def test_links_and_files_are_there(site: Path) -> None:
    dead = []
    for path in pages(site):
        page = page_of(path)
        for link in page.links + page.loads:
            if re.match(r"(https?|mailto|data|javascript):", link):
                continue
            name, anchor = urldefrag(unquote(link))
            goal = (path.parent / name).resolve() if name else path
            if not goal.is_file():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif anchor and goal.suffix == ".html" and anchor not in page_of(goal).ids:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead, "\n".join(dead)


def test_nothing_comes_from_another_server(site: Path) -> None:
    foreign = [
        f"{path.relative_to(site)}: {link}"
        for path in pages(site)
        for link in page_of(path).loads
        if "//" in link and not link.startswith("data:")
    ]
    styles = [
        path.name
        for path in site.rglob("*.css")
        if re.search(r"(?:url\(|@import )['\"]?https?:", path.read_text())
    ]
    assert not foreign + styles, "\n".join(foreign + styles)


def test_reference_says_what_docstrings_say(site: Path) -> None:
    """Names with their arguments, roles as plain names, and the options of all commands."""
    api = (site / "api.html").read_text()
    assert {"sar.check", "sar.Policy", "sar.sampling.NeighborLoader"} <= page_of(
        site / "api.html"
    ).ids
    assert "the fewest rounds that fit" in " ".join(re.sub("<[^>]+>", " ", api).split())
    assert not re.findall(r":(?:func|class|meth|mod):", api)
    commands = (site / "command_line.html").read_text()
    assert "--activations" in commands and "--soft-limit" in commands


def test_signatures_have_no_private_names(site: Path) -> None:
    found = re.findall(
        r'<div class="doc-signature[^>]*>(.*?)</div>', (site / "api.html").read_text(), re.S
    )
    signatures = [unescape(re.sub("<[^>]+>", "", one)) for one in found]
    assert len(signatures) > 150
    private = [one for one in signatures if re.search(r"(?<!\w)_[A-Za-z]", one)]
    assert not private, "\n".join(private)


@pytest.fixture(scope="module")
def browser(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium", reason="pages are opened with selenium: .[docs]")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("pages are opened by chromium: apt install chromium chromium-driver")
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    opened = selenium.webdriver.Chrome(options=options, service=Service(driver))
    opened.set_page_load_timeout(60)
    opened.set_script_timeout(60)
    yield opened
    opened.quit()


READY = """
const done = arguments[0];
const formulas = document.querySelectorAll(".arithmatex").length;
const ready = formulas ? () => window.MathJax?.startup?.promise : () => Promise.resolve();
(function wait() { const p = ready(); p ? p.then(() => done({
    text: document.querySelector("article").innerText,
    left: formulas - document.querySelectorAll(".arithmatex mjx-container").length,
    broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
    wide: document.documentElement.scrollWidth - window.innerWidth,
})) : setTimeout(wait, 20); })();
"""


def test_pages_show_what_they_should(site: Path, browser: Any) -> None:
    """Of the listings of examples, which are made alike, two."""
    listings = sorted((site / "examples").glob("[!i]*.html"))  # the index is a page like others
    assert len(listings) > 20
    wrong = []
    for path in [one for one in pages(site) if one not in listings[2:]]:
        browser.get(path.as_uri())
        seen = browser.execute_async_script(READY)
        name = path.relative_to(site).as_posix()
        wrong += [f"{name}: {found}" for found in NO_MATH.findall(seen["text"])]
        wrong += [f"{name}: a picture is not there: {src}" for src in seen["broken"]]
        if seen["left"]:
            wrong.append(f"{name}: {seen['left']} formulas are not drawn")
        if seen["wide"] > 0:
            wrong.append(f"{name}: {seen['wide']} points wider than the window")
        wrong += [f"{name}: {entry['message']}" for entry in browser.get_log("browser")]
    assert not wrong, "\n".join(wrong)


def test_search_finds(site: Path, browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support import expected_conditions
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "index.html").as_uri())
    field = browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]")
    browser.execute_script("document.querySelector('#__search').click()")
    WebDriverWait(browser, 30).until(lambda _: field.is_displayed() and field.is_enabled())
    for typed, page in [("GATConv", "pyg"), ("explain", "api"), ("AMP", "precision")]:
        field.clear()
        field.send_keys(typed)
        link = (By.CSS_SELECTOR, f"a.md-search-result__link[href*='{page}.html']")
        found = expected_conditions.presence_of_element_located(link)
        WebDriverWait(browser, 30).until(found, f"no {page}.html for {typed}")


HOME = """
const seen = [...document.querySelectorAll("article pre, article a, article img")].filter(
    one => one.getBoundingClientRect().bottom <= 800 && one.checkVisibility());
return {
    texts: seen.map(one => one.textContent),
    links: seen.map(one => one.href),
    pictures: seen.map(one => one.src).filter(Boolean),
};
"""


def test_home_shows_install_code_and_repository_at_once(site: Path, browser: Any) -> None:
    """In a window of 1280 x 800; the picture follows the colors of the page."""
    size = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get((site / "index.html").as_uri())
        seen = browser.execute_script(HOME)
        assert any(text.startswith("pip install .") for text in seen["texts"])
        code = next(text for text in seen["texts"] if "sar.initialize_comms()" in text)
        assert len([line for line in code.splitlines() if line.strip()]) >= 10
        assert "https://git.example.org/team/sar" in seen["links"]
        for scheme, picture in (("default", "rounds-light.svg"), ("slate", "rounds-dark.svg")):
            set_scheme = f"document.body.setAttribute('data-md-color-scheme', '{scheme}')"
            browser.execute_script(set_scheme)
            (shown,) = browser.execute_script(HOME)["pictures"]
            assert Path(urldefrag(shown)[0]).name == picture
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
