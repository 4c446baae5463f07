"""What came of a run, in a terminal: its course, tables, words, and where it is."""

from contextlib import closing

from rich.console import Console

from esper.experiment.evaluate import summary_of
from esper.experiment.run import STORE
from esper.experiment.storage.database import open_store
from esper.experiment.summary import (
    Summary,
    headline,
    return_trend,
    sparkline,
)
from esper.experiment.summary_tables import print_line, print_scores
from esper.experiment.trainer import Ending


def tell_ending(ending: Ending, console: Console | None = None) -> None:
    """Print all that is known at the end of a run, or why it ended early."""
    console = console or Console()
    if ending.signal is not None:
        print_line(
            console,
            f"Interrupted after round {ending.rounds}; all is saved. Go on with: "
            f"esper train --resume {ending.path}",
        )
        return
    with closing(open_store(ending.path / STORE)) as db:
        found = db.execute("SELECT mean_return FROM live_rounds ORDER BY round")
        returns = [float("nan") if value is None else value for (value,) in found]
        notes = db.execute("SELECT text FROM live_notes WHERE kind = 'judged'")
        judged = [str(text) for (text,) in notes]
    print_line(console, f"Mean return per round: {sparkline(returns)}")
    print_line(console, return_trend(returns))
    summary: Summary = summary_of(ending.path)
    if summary.tasks:
        print_scores(console, summary)
        for text in judged:
            print_line(console, f"{text[0].upper()}{text[1:]}.")
        for line in headline(summary):
            print_line(console, line)
    print_line(console, f"The run is in {ending.path}.")
