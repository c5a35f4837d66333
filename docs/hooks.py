"""What the site has besides this folder: the pages above it, and the results that pages link to."""

from __future__ import annotations

import pathlib

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]


def on_files(files, config):
    """README.md is the first page."""
    for path in (*ROOT.glob("*.md"), *ROOT.glob("benchmarks/results/**/*.csv")):
        name = path.relative_to(ROOT).as_posix().replace("README.md", "index.md")
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Links between this folder and the one above it, of which the site makes one."""
    markdown = markdown.replace("](docs/", "](").replace("](../", "](")
    return markdown.replace("](README.md", "](index.md")
