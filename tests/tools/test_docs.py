"""The docs site builds without warnings, lists every function, and its code runs."""

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from playwright import sync_api as playwright

import npu_ops
from npu_ops.core.registry import Table

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("docs")  # shares one build of the site
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md"))))
CHINESE = [f"README{(SUFFIX := '.zh-CN.md')}", *(page for page in PAGES if page.endswith(SUFFIX))]
PAGES = [page for page in PAGES if page not in CHINESE]
LONGEST = 300  # lines per page


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_every_public_function_is_on_it(site):
    page = (site / "api.html").read_text()
    shown = set(re.findall(r'<h3 id="npu_ops\.[\w.]*?(\w+)"', page))
    assert shown == set(npu_ops.__all__) - {"__version__"}


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*?(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert loaded == [], page.name


HOOKS = runpy.run_path(str(ROOT / "docs/hooks.py"))


def test_no_link_and_no_picture_leads_nowhere(site):
    """Checks the picture of cpu-speed.md, too: it is raw HTML, not a Markdown link."""
    assert list(HOOKS["missing_targets"](site)) == []
    pages = {
        str(page.relative_to(site)): HOOKS["_Page"](page.read_text())
        for page in site.rglob("*.html")
    }
    assert {"report.png", "report-dark.png"} <= set(pages["cpu-speed.html"].targets)
    assert "../report.png" in pages["zh-CN/cpu-speed.html"].targets
    assert sum(len(page.targets) for page in pages.values()) > 500


MISSING = {
    '<img src="no.png">': "no.png",
    '<source srcset="there.png, no.png 2x">': "no.png",
    '<a href="no.html">x</a>': "no.html",
    '<a href="folder">x</a>': "folder",
    '<a href="other.html#no">x</a>': "other.html#no",
    '<a href="#no">x</a>': "#no",
}


@pytest.mark.parametrize("link", MISSING)
def test_a_site_with_a_link_that_leads_nowhere_is_not_built(tmp_path, link):
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.png").touch()
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="other.html#here">x</a> <img src="there.png"> <a href="https://x.org/y">x</a>'
        + link
    )
    assert list(HOOKS["missing_targets"](tmp_path)) == [f"a.html: {MISSING[link]}"]
    with pytest.raises(Exception, match="links that lead nowhere"):
        HOOKS["on_post_build"]({"site_dir": str(tmp_path)})


@pytest.mark.parametrize(
    "words, page, result",
    [
        ("rms_norm_gated", "index.html", "api.html#npu_ops.ops.rms_norm_gated.rms_norm_gated"),
        ("视觉塔", "zh-CN/index.html", "zh-CN/frameworks.html#vllm"),  # within a sentence
    ],
    ids=["name", "Chinese"],
)
def test_it_is_searched_as_files(site, words, page, result):
    """Chromium starts no web worker for a page opened as a file. The theme's search needs one;
    docs/assets/iframe-worker.js replaces it."""
    with playwright.sync_playwright() as running:
        system = shutil.which("chromium") or shutil.which("google-chrome")
        if not system and not pathlib.Path(running.chromium.executable_path).exists():
            pytest.skip("no Chromium to search the site with: apt-get install chromium")
        browser = running.chromium.launch(executable_path=system, args=["--no-sandbox"])
        view = browser.new_page()
        view.goto((site / page).as_uri())
        # The theme loads its index when the field gets the focus, then changes its message. It
        # misses keys pressed before that. It searches on key presses, so End stands for the last
        # key of an input method.
        field, said = "[data-md-component=search-query]", ".md-search-result__meta"
        loading = view.locator(said).text_content()
        view.locator(field).focus()
        view.wait_for_function(
            "([said, before]) => document.querySelector(said).textContent != before",
            arg=[said, loading],
        )
        view.locator(field).press_sequentially(words)
        view.locator(field).press("End")
        view.wait_for_selector(".md-search-result__link")
        found = [
            a.get_attribute("href") for a in view.query_selector_all(".md-search-result__link")
        ]
        browser.close()
    assert f"{site.as_uri()}/{result}" in found


def test_names_in_tables_are_whole(site):
    """The theme breaks code at any character; the site's stylesheet turns that off."""
    assert "assets/site.css" in (site / "index.html").read_text()
    assert "td code { word-break: normal" in (site / "assets/site.css").read_text()


def test_every_page_is_in_the_navigation(site):
    index = (site / "index.html").read_text()
    linked = set(re.findall(r'href="(?:\./)?([\w/-]+)\.html"', index))
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in PAGES}
    assert pages - {"README"} <= linked


@pytest.mark.parametrize("trainer", ["relax", "slime"])
def test_the_guide_of_a_trainer_asks_for_no_patch_and_no_python(trainer):
    text = (ROOT / f"docs/train-with-{trainer}.md").read_text()
    assert not [asked for asked in ("git apply", "```py", "PYTHONPATH", "sed -i") if asked in text]


def test_no_page_is_long():
    lengths = {page: len((ROOT / page).read_text().splitlines()) for page in PAGES}
    assert {page: lines for page, lines in lengths.items() if lines > LONGEST} == {}


def test_who_computes_what():
    """The table in operators.md lists the registry's implementations in order."""
    text = (ROOT / "docs/operators.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([\w, ]+) \|$", text, re.M)
    shown = {name: chosen for names, chosen in rows for name in re.findall(r"\w+", names)}
    operators = {
        name: ", ".join(implementation.name for implementation in table.implementations)
        for name, table in Table.tables.items()
        if "toy" not in name  # from test_new_op.py
    }
    assert shown == operators


def test_each_op_has_a_figure(tmp_path):
    """Each figure, drawn again, has the size of the committed one, and the page describes it."""
    figures = runpy.run_path(str(ROOT / "docs/figures.py"))
    figures["write"](tmp_path)
    text = (ROOT / "docs/operators.md").read_text()
    described = dict(re.findall(r"!\[(.+)\]\(assets/figures/(\w+)\.svg\)", text))
    ops = {path.parent.name for path in (ROOT / "npu_ops/ops").glob("*/cases.py")}
    assert set(figures["FIGURES"]) == set(described.values()) == ops
    for name in ops:
        drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, figures["FOLDER"]))
        assert re.search("viewBox=.*", drawn.read_text())[0] in kept.read_text()


def test_the_files_of_the_architecture_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    files = set(re.findall(r"`((?:npu_ops|python|csrc)/[^`]+)`", text))
    missing = [file for file in files if not list(ROOT.glob(re.sub("<[a-z]+>", "*", file)))]
    assert missing == [] and len(files) > 20


def outline(page: str) -> dict:
    """Return a page's heading levels, code blocks, links, numbers and cells per table row."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S)
    links = re.findall(r"\]\(([^)]+)\)", text)
    other = re.findall(r"^\[(?:中文|English)\]\(([^)]+)\)$", text, re.M)
    tables = [line.count(" | ") for line in text.splitlines() if line.startswith("|")]
    return {
        "headings": re.findall(r"^#+(?= )", text, re.M), "code": blocks,
        "links": {link.replace(SUFFIX, ".md") for link in links if link not in other},
        "tables": tables, "numbers": re.findall(r"\| \**(\d+)\** ", text),
        "other language": len(other),
    }  # fmt: skip


@pytest.mark.parametrize("page", CHINESE)
def test_a_chinese_page_has_all_of_the_english(page):
    english, chinese = outline(page.replace(SUFFIX, ".md")), outline(page)
    assert chinese == english and english["other language"] == 1


def test_the_pages_of_a_user_are_there_in_chinese():
    trainers = (f"train-with-{name}" for name in ("relax", "slime", "verl"))
    pages = "frameworks", "help", "images", "first-card", *trainers
    assert {f"docs/{page}{SUFFIX}" for page in pages} <= set(CHINESE)


def test_the_site_switches_between_a_page_and_its_translation(site):
    switch = '<a href="{}" hreflang="{}" class="md-select__link">'
    for page, there, back in (
        ("help.html", "zh-CN/help.html", "../help.html"),
        ("index.html", "zh-CN/index.html", "../index.html"),
    ):
        assert switch.format(there, "zh-CN") in (site / page).read_text()
        chinese = (site / "zh-CN" / page).read_text()
        assert switch.format(back, "en") in chinese and re.search("<h2[^>]*>.*[一-鿿]", chinese)


@pytest.mark.parametrize("page", PAGES)
def test_its_code_runs(page):
    """Each block runs with names of its own; lines of output that the page shows are right."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    code = "\n".join(f"exec({block!r}, {{}})" for block in blocks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shown = ("Verdict(", "chunked  ", "half  ", "interleaved ")
    said = [line for line in text.splitlines() if line.startswith(shown)]
    assert said == [line for line in done.stdout.splitlines() if line.startswith(shown)]
