"""The report: what is in it, that it needs nothing else, and how it stands in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_longattn.evaluation.readings import LOSS, Readings
from hf_longattn.evaluation.report import Figure, Section, Table, table_html, write_report
from hf_longattn.evaluation.report.figures import COLOURS, curves, heat_map, pair, styles
from hf_longattn.evaluation.report.page import colour, png, shown
from hf_longattn.evaluation.settings import UNMODIFIED

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


def picture() -> Figure:
    drawn = curves({"a": [(1024, 3.0), (2048, 2.9)], "b <i>": [(1024, 3.1), (2048, 4.0)]}, "x", "y", mark={"trained": 1500})
    return Figure("loss", drawn, "Loss <by> length", "A caption.")


def test_values_far_above_the_rest_get_a_second_figure() -> None:
    assert [f.name for f in pair(lambda limits: limits, [3.0, 3.1, 3.2], "loss", "")] == ["loss"]
    _, closer = pair(lambda limits: limits, [3.0, 3.1, 3.2, 9.0], "loss", "")
    assert closer.name == "loss-closer"


def example(folder: Path) -> Path:
    wide = Table(
        "Many columns",
        ["setting", *(f"positions {1024 * i:,}" for i in range(16))],
        [["a_very_long_name" * 5, *[3.14159] * 16]],
    )
    shaded = Table("Shares", ["s", "1k"], [["a", 0.25], ["b", None]], digits=2, shade=(0.0, 1.0), note="A note.")
    grid = heat_map(
        [[0.0, 1.0], [None, 0.5]], ["0 %", "100 %"], ["1k", "2k"], "length", "depth", "title", (0.0, 1.0), "accuracy"
    )
    sections = [
        Section("First", "", [wide], [picture()], "The protocol.", "hf-longattn eval " + "x" * 300),
        Section("Second", "Two\n\nparagraphs & <signs>.", [shaded], [Figure("heat", grid, "Heat map")]),
    ]
    return write_report(folder, "A model <under> test", "One sentence.", sections, {"Model": "m" * 200})


@pytest.mark.slow
def test_page_json_and_pictures_say_the_same(tmp_path: Path) -> None:
    page = example(tmp_path).read_text()
    data = json.loads((tmp_path / "report.json").read_text())
    assert [s["title"] for s in data["sections"]] == ["First", "Second"]
    assert data["sections"][1]["tables"][0]["rows"] == [["a", 0.25], ["b", None]]
    assert page.index("First</h2>") < page.index("Second</h2>")
    for expected in (
        "3.142",
        "0.25",
        "–</td>",
        "One sentence.",
        "A note.",
        "The protocol.",
        "&lt;signs&gt;",
        "A model &lt;under&gt; test",
    ):
        assert expected in page
    assert (tmp_path / data["sections"][0]["figures"][0]["png"]).read_bytes() == picture().png


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    page = example(tmp_path).read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]{0,40})', page))
    assert '<meta name="viewport" content="width=device-width' in page
    assert all(re.search(r'alt="[^"]+"', tag) for tag in re.findall(r"<img[^>]{0,80}alt=.{0,40}", page))


@pytest.mark.slow
def test_a_page_written_again_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    example(tmp_path)
    page = write_report(tmp_path, "A model", "New.", [Section("Only", "This.", figures=[picture()])], {}).read_text()
    assert "This." in page
    assert "paragraphs" not in page
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["loss.png"]


def test_a_table_stands_alone_in_a_notebook_and_in_markdown() -> None:
    table = Table("Shares <by> length", ["s", "1k"], [["a+b", 0.25], ["c", None]], digits=2, note="A note.")
    shown = table_html(table)
    assert "Shares &lt;by&gt; length" in shown
    assert "<td>0.25</td>" in shown
    assert table.markdown().splitlines() == ["| s | 1k |", "| --- | --- |", "| a+b | 0.25 |", "| c | – |"]


def test_titles_of_any_alphabet_name_their_sections() -> None:
    assert Section("Внимание").slug == "внимание"
    assert Section("Max_retrieval, at 4k").slug == "max-retrieval-at-4k"


def test_what_makes_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a row of 1 cells under 2 columns"):
        Table("t", ["a", "b"], [["x"]])
    with pytest.raises(ValueError, match="a figure's name"):
        Figure("../evil", None, "alt")
    example(tmp_path)
    with pytest.raises(ValueError, match=r"two figures share a name.*loss"):
        write_report(tmp_path, "T", "S.", [Section("One", figures=[picture()]), Section("Another", figures=[picture()])], {})


def test_cells() -> None:
    assert [shown(c, 2) for c in (1.005, -0.5, 12345, None, float("nan"), "x", 1234.5)] == [
        "1.00", "−0.50", "12,345", "–", "–", "x", "1,234.50",
    ]  # fmt: skip
    table = Table("t", ["a"], [], shade=(0.0, 1.0))
    assert colour(0.0, table) == "background:rgb(255,255,255);color:#000"
    assert colour(1.0, table) == "background:rgb(0,90,156);color:#fff"
    assert colour("x", table) == colour(None, table) == ""


def luminance(red: float, green: float, blue: float) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_on_shaded_cells_is_legible() -> None:
    """WCAG's contrast ratio is at least 4.5 at every value."""
    table = Table("t", ["a"], [], shade=(0.0, 1.0))
    for i in range(101):
        style = colour(i / 100, table)
        ground = luminance(*(int(c) for c in re.findall(r"\d+", style.split(";")[0])))
        ink = 1.0 if style.endswith("#fff") else 0.0
        assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 4.5, i


def test_a_setting_has_the_same_colour_in_every_picture() -> None:
    def colours(*names: str) -> dict[str, str]:
        drawn = styles(names)
        assert len({(style["color"], style["linestyle"]) for style in drawn}) == len(names)
        return {name: str(style["color"]) for name, style in zip(names, drawn, strict=True)}

    few = colours("unmodified", "infoscale")
    many = colours("YaRN", "unmodified", "logn", "rerope", "infoscale", "@yarn:2", "other")
    assert few.items() <= many.items()
    assert many["YaRN"] == many["@yarn:2"] == colours("@yarn:2")["@yarn:2"]
    assert len(set(many.values())) == 6
    assert len(set(colours("rerope", "rerope+infoscale", "rerope+infoscale, trained").values())) == 1


def test_a_command_is_told_once_and_wide_tables_say_so(tmp_path: Path) -> None:
    table = Table("Wide", ["a", "b", "c", "d"], [["x", 1, 2, 3]])
    sections = [Section(f"Part {n}", "", [table], command="hf-longattn eval M") for n in (1, 2)]
    page = write_report(tmp_path, "T", "S.", sections, {"Commands": "hf-longattn eval M"}).read_text()
    assert page.count("hf-longattn eval M") == 1
    assert page.count("4 columns: scroll sideways where they do not fit.") == 2


def test_lines_differ_in_more_than_colour() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == 8
    drawn = curves({str(i): [(1, i), (2, i)] for i in range(10)}, "x", "y", log_x=True)
    assert png(drawn).startswith(b"\x89PNG")


@pytest.mark.skipif(BROWSER is None, reason="NO BROWSER: the page is not looked at; apt-get install chromium")
@pytest.mark.parametrize("width", [360, 1280])
def test_page_in_a_browser_is_never_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    page = example(tmp_path / "report").read_text()
    probe = tmp_path / "probe.html"  # a frame, because a browser's own window has a least width
    probe.write_text(
        f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(page)}"></iframe><script>'
        "addEventListener('load', () => { const f = document.querySelector('iframe').contentWindow, d = f.document;"
        " document.title = 'measured ' + JSON.stringify({inner: f.innerWidth, scroll: d.documentElement.scrollWidth,"
        " pictures: [...d.images].map(i => i.naturalWidth && i.width),"
        " font: parseFloat(f.getComputedStyle(d.body).fontSize)}) })</script>"
    )
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(BROWSER), *flags, "--dump-dom", probe.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    found = json.loads(re.search(r"<title>measured (.*?)</title>", dom)[1])  # type: ignore[index]
    assert found["inner"] == width
    assert found["scroll"] <= width
    assert len(found["pictures"]) == 2
    assert all(250 < w <= width for w in found["pictures"])
    assert found["font"] >= 16


def test_what_a_setting_costs_by_position() -> None:
    """Bins of 512 positions, the first token left out; over the documents that both have read."""
    rows = [
        {"setting": s, "task": LOSS, "which": which, "length": 1024, "loss": 0.0, "bins": bins}
        for s, which, bins in (
            (UNMODIFIED, "one", [1.0, 2.0]),
            (UNMODIFIED, "two", [3.0, 3.0]),
            ("longer", "one", [1.5, 2.25]),
            ("longer", "two", [3.0, 3.5]),
            ("longer", "three", [9.0, 9.0]),
        )
    ]
    readings = Readings(rows, [UNMODIFIED, "longer"])
    assert readings.bucket_difference("longer", 0, 512) == pytest.approx(0.25)
    whole = ((0.5 * 511 + 0.25 * 512) / 1023 + 0.5 * 512 / 1023) / 2
    assert readings.bucket_difference("longer", 0, 1024) == pytest.approx(whole)
    assert readings.bucket_difference("other", 0, 512) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cost_$x_1$, $\\frac{$", "_hidden", "a|b\nc", "leaky_rerope:window=1024:stretch=4.0+infoscale"]
)
def test_names_are_shown_as_they_are(name: str) -> None:
    """In a picture and its legend, and in a Markdown table, whatever signs they have."""
    drawn = curves({"a": [(1, 1)], name: [(1, 2)]}, "x", "y", title=name)
    assert png(drawn).startswith(b"\x89PNG")
    _, shown = (text.get_text() for text in drawn.legends[0].get_texts())
    assert shown.strip().replace(r"\$", "$") == " ".join(name.split())
    assert drawn.legends[0].get_window_extent().width <= drawn.bbox.width
    many = curves({f"{n} {name * 2}": [(1, n)] for n in range(8)}, "x", "y")
    png(many)
    assert many.legends[0].get_window_extent().width <= many.bbox.width
    assert many.axes[0].get_window_extent().height > 0.8 * drawn.axes[0].get_window_extent().height
    _, _, row = Table("t", ["s", "x"], [[name, 1.0]]).markdown().split("\n")
    assert row == f"| {' '.join(name.split()).replace('|', chr(92) + '|')} | 1.000 |"
