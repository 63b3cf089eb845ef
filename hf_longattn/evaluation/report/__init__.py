"""A report: sections of tables and figures, and one page for all that was measured of a model."""

from .page import Figure, Section, Table, by_length, html, markdown, table_html, write_report

__all__ = ["Figure", "Section", "Table", "by_length", "html", "markdown", "table_html", "write_report"]
