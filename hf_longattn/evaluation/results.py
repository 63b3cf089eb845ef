"""Results of `evaluate` and the commands: rows as tables, curves and a page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from .readings import Readings
from .report import Section, Table, html, table_html, write_report
from .tasks import task_of
from .tasks.answers import effective
from .verdict import headline, of_fewer, verdict

#: Of tasks on the page; effective lengths come third, behind all tasks that have no place here.
PLACES = {"loss": 0, "long_ppl": 1, "probe": 4, "attention": 5}


class Results(Readings):
    """Finished rows, and all that they say. A notebook shows the tables that say most, `print` too."""

    def to_pandas(self) -> Any:
        """The rows as a DataFrame; lists and mappings stay in their cells."""
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise ImportError("rows as a DataFrame need pandas: pip install pandas") from None
        return pandas.DataFrame(list(self.rows))

    def sections(self) -> list[Section]:
        """All that is known, as a page tells it: the verdict, and what every task says of its rows."""
        if (whole := self.complete()) is not self:
            first, *others = whole.sections()
            return [dataclasses.replace(first, tables=[*first.tables, of_fewer(self)]), *others]
        told = [(PLACES.get(name, 2), s) for name in self.all_tasks for s in task_of(name).sections(self, name)]
        told += [(3, section) for section in effective(self)]
        return [*verdict(self), *(section for _, section in sorted(told, key=lambda x: x[0]))]

    def tables(self) -> list[Table]:
        """The tables that say most; of those that are called alike, each with its section's title."""
        found = [(s.title, t) for s in self.sections() for t in s.tables if t.brief]
        alike = Counter(t.title for _, t in found)
        return [dataclasses.replace(t, title=f"{of}: {t.title}") if alike[t.title] > 1 else t for of, t in found]

    def plot(self) -> Any:
        """The first of the page's curves as a matplotlib Figure: loss by length, where losses were measured at several.

        A notebook shows it; `results.plot().savefig("losses.png")` writes a file.

        Raises:
            ValueError: there is nothing to draw.
        """
        if (figure := next((f for s in self.sections() for f in s.figures), None)) is None:
            raise ValueError("there is nothing to draw: measure more than one length, or another task")
        return figure.drawn

    def page(self, title: str = "Evaluation") -> str:
        """The report as HTML that needs nothing else."""
        return html(title, self.headline(), self.sections(), self.facts)

    def write(self, folder: Path, title: str = "Evaluation") -> Path:
        """Write the report: index.html, the same in report.json, and figures/; returns the page."""
        return write_report(folder, title, self.headline(), self.sections(), self.facts)

    def headline(self) -> str:
        """The sentence for a reader in a hurry, and what it leaves out."""
        said = [headline(self), self.left_out()]
        if self.own is not None:
            as_saved = f"The checkpoint itself runs {self.own}: “unmodified” is the model as it was saved, and other settings "
            said.insert(0, f"{as_saved}keep {self.own} in the slots that they leave free.")
        return "\n\n".join(text for text in said if text)

    def left_out(self) -> str:
        """Name the settings of earlier commands whose rows the folder keeps; empty where there are none."""
        if not self.others:
            return ""
        names = ", ".join(self.others)
        return f"Rows of {names} are kept in the folder and not judged here: name them too, to compare with them."

    def __str__(self) -> str:
        return "\n\n".join(f"{t.title}\n\n{t.markdown()}" for t in self.tables())

    def _repr_html_(self) -> str:
        return "\n".join(map(table_html, self.tables()))
