"""One page for everything measured on a model: HTML, the same as JSON, and its figures as PNG.

A report is a folder. Each part of it is a `Section`, kept as a file in `sections/`; `add_section` writes one and renders the
page anew, so that several commands can add to one report.
"""

from .folder import add_section, read_sections, render, write_report
from .section import Figure, Section, Table

__all__ = ["Figure", "Section", "Table", "add_section", "read_sections", "render", "write_report"]
