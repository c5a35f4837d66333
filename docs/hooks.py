"""What the site has besides this folder: the pages above it, and the results that pages link to.

A site with a link or a picture that leads nowhere is not built.
"""

from __future__ import annotations

import html.parser
import pathlib
import urllib.parse
from collections.abc import Iterator

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]


def on_files(files, config):
    """README.md is the first page."""
    validation = ROOT.glob("python/npu_ops_tools/model/validation/*.md")
    for path in (*ROOT.glob("*.md"), *validation, *ROOT.glob("benchmarks/results/**/*.csv")):
        name = path.relative_to(ROOT).as_posix().replace("README.md", "index.md")
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Shortens links between docs/ and the folder above it: the site has both in one folder."""
    up = "../" * page.file.src_uri.count("/")  # from a page of docs/evidence to docs/
    for begins in ("](", 'src="', 'srcset="', 'href="'):
        markdown = markdown.replace(f"{begins}{up}../", f"{begins}{up}")
        markdown = markdown.replace(f"{begins}docs/", begins)
    return markdown.replace("](README.md", "](index.md")


def on_post_build(config):
    """mkdocs itself checks links of Markdown, and neither pictures nor HTML."""
    missing = list(missing_targets(pathlib.Path(config["site_dir"])))
    if missing:
        raise PluginError("links that lead nowhere:\n" + "\n".join(missing))


def missing_targets(site: pathlib.Path) -> Iterator[str]:
    """ "page: target" of each link and picture whose file or heading is not in the site."""
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
    """targets: what a page links to and shows. headings: what can be linked to in it."""

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
