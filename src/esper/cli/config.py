"""`esper config`: what a training would be, every setting with its meaning."""

from argparse import ArgumentParser
from collections.abc import Sequence

HELP = "print all settings of a training, with their meaning"
EXAMPLES = """\
examples:
  esper config > mine.toml             a file to edit: esper train --config mine.toml
  esper config --preset thorough --tasks letter
"""


def add(parser: ArgumentParser) -> None:
    """Its options are those of `esper train`, which take torch to know."""
    parser.add_argument("settings", nargs="*", help="as of esper train (see there)")


def run_words(words: Sequence[str]) -> int:
    """Print what these words stand for."""
    from esper.experiment.config import as_toml
    from esper.experiment.settings.arguments import parse_options, resolve, train_parser

    parser = train_parser("esper config")
    parser.description, parser.epilog = f"{HELP}.", EXAMPLES
    print(as_toml(resolve(parse_options(parser, words)), explain=True), end="")
    return 0
