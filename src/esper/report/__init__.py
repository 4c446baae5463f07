"""One page that shows a run: what it did, what it grew, and how controllers compare."""

from esper.report.page import write_report

__all__ = ["write_report"]
