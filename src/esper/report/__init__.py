"""One page that shows a run: what it did, what it grew, and what that was worth."""

from esper.report.writing import write_report

__all__ = ["write_report"]
