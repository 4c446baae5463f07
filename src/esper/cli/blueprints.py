"""`esper blueprints`: what can be planted."""

from argparse import Namespace

HELP = "list what can be planted"
NEEDS_TORCH = False
EXAMPLES = """\
examples:
  esper blueprints
  esper train --world.blueprints widen_16,conv
                                       a training in which only these can be planted
"""


def run(options: Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from esper.contracts.blueprints import BLUEPRINTS

    shown = Table()
    for column in ("name", "form", "size", "folds into the host"):
        shown.add_column(column, justify="right" if column == "size" else "left")
    for blueprint in BLUEPRINTS:
        form, merges = blueprint.form.name.lower(), "yes" if blueprint.merges else "no"
        size = f"+{blueprint.share:.0%}" if blueprint.share else str(blueprint.size)
        shown.add_row(blueprint.name, form, size, merges)
    Console().print(shown)
    return 0
