"""Hooks of mkdocs: add files outside docs/ to the site, adapt links, and fail on broken links.

The files outside docs/ are pages, such as README.md, and results that pages link to.
"""

from __future__ import annotations

import html.parser
import pathlib
import re
import urllib.parse
from collections.abc import Iterator

from markdown.extensions.toc import slugify
from mkdocs.exceptions import PluginError
from mkdocs.plugins import CombinedEvent, event_priority
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]


def _above() -> dict[str, str]:
    """Return files outside docs/, by their names in the site. README.md becomes the first page."""
    validation = ROOT.glob("python/npu_ops_tools/model/validation/*.md")
    paths = (*ROOT.glob("*.md"), *validation, *ROOT.glob("benchmarks/results/**/*.csv"))
    names = (path.relative_to(ROOT).as_posix() for path in paths)
    return {name.replace("README", "index"): str(ROOT / name) for name in names}


def _add_files(files, config):
    """Add these files as if they were in docs/, because the plugin i18n drops all others."""
    for name in _above():
        there = f"{config.docs_dir}/{name}"
        files.append(File.generated(config, name, abs_src_path=there))
    return files


@event_priority(-200)  # after i18n, which replaces the file objects
def _find_files(files, config):
    above = _above()
    for file in files:
        if file.src_uri in above:
            file.abs_src_path = above[file.src_uri]
    return files


on_files = CombinedEvent(_add_files, _find_files)


def on_page_markdown(markdown, page, **_):
    """Shorten links between docs/ and the folder above it: the site has both in one folder.

    Remove the link to the page's other language, because the site has a language switch.
    """
    markdown = re.sub(r"^\[(中文|English)\]\(\S+\)\n", "", markdown, flags=re.MULTILINE)
    path = pathlib.Path(page.file.abs_src_path)
    if path.name.endswith(".zh-CN.md"):
        english = path.with_name(path.name.replace(".zh-CN", "")).read_text()
        markdown = _with_anchors_of(english, markdown)
    up = "../" * page.file.src_uri.count("/")  # from a page of docs/evidence to docs/
    for begins in ("](", 'src="', 'srcset="', 'href="'):
        markdown = markdown.replace(f"{begins}{up}../", f"{begins}{up}")
        markdown = markdown.replace(f"{begins}docs/", begins)
    if page.file.dest_uri.startswith("zh-CN/"):  # one folder deeper than the pictures
        markdown = re.sub(r'(src(?:set)?=")(?!http)', r"\1../", markdown)
    return markdown.replace("](README", "](index")


_CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)", re.MULTILINE)


def _with_anchors_of(english: str, translated: str) -> str:
    """Return `translated` with the anchors of the English headings, to which pages link."""
    titles = _HEADING.findall(_CODE.sub("", english))
    anchors = iter([slugify(title, "-") for title in titles])
    translated = re.sub(r'^<a id="\S+"></a>\n', "", translated, flags=re.MULTILINE)
    parts = _CODE.split(translated)  # text, code, text, ...
    parts[::2] = [_HEADING.sub(lambda m: f"{m[0]} {{ #{next(anchors)} }}", p) for p in parts[::2]]
    return "".join(parts)


@event_priority(-200)  # after i18n, which builds the other language here
def on_post_build(config):
    """Fail if a link or picture leads nowhere. mkdocs checks neither pictures nor HTML.

    Raises:
        PluginError: the site has such links.
    """
    missing = list(missing_targets(pathlib.Path(config["site_dir"])))
    if missing:
        raise PluginError("links that lead nowhere:\n" + "\n".join(missing))


def missing_targets(site: pathlib.Path) -> Iterator[str]:
    """Yield "page: target" for each link and picture whose file or heading is not in the site."""
    pages = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":  # a server answers with it at any address
            continue
        for target in page.targets:
            scheme, host, file, _, _, heading = urllib.parse.urlparse(target)
            if scheme or host:
                continue
            there = (path.parent / urllib.parse.unquote(file)).resolve() if file else path
            found = pages.get(there)
            if not there.is_file() or (heading and found and heading not in found.headings):
                yield f"{path.relative_to(site)}: {target}"


class _Page(html.parser.HTMLParser):
    """A page. targets: addresses of its links and pictures. headings: ids that links can use."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[str] = []
        self.headings: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "srcset" and value:
                self.targets += [part.split()[0] for part in value.split(",")]
            elif name in ("id", "name") and value:
                self.headings.add(value)
