"""`esper completion`."""

from argparse import ArgumentParser, Namespace
from typing import Final

from esper.cli.arguments import Command


def add_completion_options(parser: ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument(
        "shell", choices=("bash", "zsh", "tcsh"), help="shell to write the script for"
    )


def completion(options: Namespace) -> None:
    """Print a completion script for all commands whose packages are installed."""
    from importlib.util import find_spec

    import shtab

    from esper.cli import COMMANDS, parser

    known = {*COMMANDS} - ({"ppo"} if find_spec("gymnasium") is None else set())
    print(shtab.complete(parser(known), options.shell))


COMPLETION: Final = Command(
    run=completion,
    options=add_completion_options,
    help="print a shell completion script",
    examples="""\
examples:
  eval "$(esper completion bash)"                       in ~/.bashrc
  esper completion zsh > ~/.zfunc/_esper                with fpath+=(~/.zfunc)
""",
)
