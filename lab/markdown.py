"""Tables and numbers in Markdown pages, made anew from rows between `<!-- MARK: WHAT -->` and `<!-- end -->`.

A table stands on lines of its own, a number within a sentence.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

#: From what a mark says to what stands below it.
Contents = Mapping[str, Callable[[str], str]]


def filled(page: str, contents: Contents) -> str:
    """The page with everything below its marks made anew; marks of other names stay as they are."""

    def fill(found: re.Match[str]) -> str:
        indent, mark, what = found.groups()
        return f"{indent}<!-- {mark}: {what} -->\n{textwrap.indent(contents[mark](what), indent)}\n{indent}<!-- end -->"

    marks = "|".join(map(re.escape, contents))
    page = re.sub(rf"^( *)<!-- ({marks}): ([^\n]*?) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL | re.MULTILINE)
    number = rf"(<!-- ({marks}): ([^\n]*?) -->)[^\n]*?<!-- end -->"
    return re.sub(number, lambda found: f"{found[1]}{contents[found[2]](found[3])}<!-- end -->", page)


def fill_pages(docs: Path, contents: Contents) -> None:
    """`filled`, for every page of a folder."""
    for page in sorted(docs.rglob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8"), contents), encoding="utf-8")
