"""`esper tasks`: what there is to learn, with sizes, or what to install for it."""

from argparse import Namespace

HELP = "list what networks can be grown on"
EXAMPLES = """\
examples:
  esper tasks
  esper grow --task letter             one of them, grown for real
"""


def run(options: Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from esper.tasks.catalogue import table

    shown = Table()
    columns = ("name", "rows", "inputs", "classes", "host", "parameters", "macs")
    for column in columns:
        shown.add_column(
            column, justify="left" if column in ("name", "host") else "right"
        )
    for row in table():
        if row["missing"]:
            shown.add_row(row["name"], "-", row["missing"])
        else:
            shown.add_row(*(_number(row[column]) for column in columns))
    Console().print(shown)
    return 0


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
