"""The forty texts of headline_many.yaml, cut from what Debian and Python carry: `python lab/pretrained/many_texts.py FOLDER`.

    --bible FILE    what `bible -l999 gen1:1-rev22:21` prints (package bible-kjv)
    --faq FOLDER    the pages of Debian's package anarchism, html/
    --perl FOLDER   the pods of Debian's package perl-doc, pod/
    --python FOLDER Python's library, of which the modules beside one another are read

Ten pieces of each, evenly apart; two texts that were read before stay out: argparse.py and perlfunc.pod.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
from pathlib import Path

#: Characters of a piece: 65,536 tokens of code and more.
SIZE, PIECES = 400_000, 10
READ_BEFORE = ("argparse.py", "perlfunc.pod")
#: Tables, indices and lists of changes.
NO_PROSE = re.compile(r"perl(toc|uniprops|\d+delta|hist|modlib|index)")


def whole(folder: Path, pattern: str) -> str:
    """The files of a folder by name, joined."""
    files = [f for f in sorted(folder.glob(pattern)) if f.name not in READ_BEFORE and not NO_PROSE.match(f.stem)]
    return "\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)


def without_tags(page: str) -> str:
    text = html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", "", page, flags=re.S))
    return re.sub(r"\n\s*\n+", "\n\n", text)


def pieces(text: str) -> list[str]:
    """PIECES of SIZE characters, evenly apart, each from the start of a line."""
    room = len(text) - SIZE
    if room < SIZE * (PIECES - 1):
        raise SystemExit(f"{len(text):,} characters; {SIZE * PIECES:,} are needed")
    starts = [text.index("\n", n * (room - 2000) // (PIECES - 1)) + 1 for n in range(PIECES)]
    return [text[start : start + SIZE] for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bible", type=Path, required=True)
    parser.add_argument("--faq", type=Path, required=True)
    parser.add_argument("--perl", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    sources = {
        "bible": args.bible.read_text(encoding="utf-8", errors="replace"),
        "faq": without_tags(whole(args.faq, "sec*.html")),
        "perl": whole(args.perl, "*.pod"),
        "python": whole(args.python, "*.py"),
    }
    for name, text in sources.items():
        for number, piece in enumerate(pieces(text)):
            (args.folder / f"{name}-{number}.txt").write_text(piece, encoding="utf-8")
        print(f"{name}: {len(text):,} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
