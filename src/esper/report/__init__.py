"""The report of a run: one HTML page with learning curves, seeds and comparisons."""

from esper.report.page import write_report

__all__ = ["write_report"]
