"""`esper config`: the settings of a training, with their descriptions."""

from argparse import ArgumentParser, Namespace

from esper.cli.arguments import add_settings

HELP = "print all settings of a training, with their meaning"
USAGE = "esper config [--help] [--preset NAME] [--config FILE] [--SETTING VALUE]"
EXAMPLES = """\
examples:
  esper config > mine.toml             a file to edit: esper train --config mine.toml
  esper config --preset thorough --tasks letter
"""


def add(parser: ArgumentParser) -> None:
    """Add the settings."""
    add_settings(parser)


def run(options: Namespace) -> int:
    """Print the resolved settings."""
    from esper.experiment.presets import resolve
    from esper.experiment.settings import as_toml

    given = vars(options)
    del given["command"]
    print(as_toml(resolve(given), explain=True), end="")
    return 0
