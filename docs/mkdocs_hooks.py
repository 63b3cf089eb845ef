"""Hooks of the site: files outside docs/ that pages link to join it, README.md comes first, formulas become MathML, and
reports lead back.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def _address(source: str) -> str:
    """Where a file of the repository stands on the site."""
    return "index.md" if source == "README.md" else source.removeprefix("docs/")


def _source(address: str) -> str:
    """The inverse of `_address`."""
    if address == "index.md":
        return "README.md"
    return address if not (ROOT / "docs" / address).exists() else f"docs/{address}"


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, CHANGELOG.md, and every file outside docs/ that a page links to."""
    pages = ["README.md", "CHANGELOG.md", *(f"docs/{f.src_uri}" for f in files.documentation_pages())]
    others = set()
    for page in pages:  # grows while pages from outside lead to more
        for _, target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            source = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            if not source.startswith("docs/") and (ROOT / source).is_file():
                if not source.endswith(".md"):
                    others.add(source)
                elif source not in pages:
                    pages.append(source)
    for source in (*sorted(others), *(p for p in pages if not p.startswith("docs/"))):
        files.append(File.generated(config, _address(source), abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they read in the repository, written as they read on the site."""
    source = _source(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return match[1] + posixpath.relpath(_address(target), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show without a script; an interval stays on the line of its mean."""

    def formula(match: re.Match[str]) -> str:
        return convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(formula, content.replace(" ± ", "\u00a0±\u00a0"))


def on_post_build(config: Any, **_: Any) -> None:
    """Reports are pages of their own, made by a command: give them a way back."""
    for page in Path(config.site_dir).glob("*/*/index.html"):
        if (ROOT / "docs" / page.relative_to(config.site_dir)).is_file():
            page.write_text(led_back(page.read_text(encoding="utf-8")), encoding="utf-8")


def led_back(page: str) -> str:
    """A report's page with a link to the first of the site."""
    return page.replace("<body>", '<body>\n<p><a href="../../index.html">← hf_longattn</a></p>', 1)
