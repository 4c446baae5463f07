"""`esper completion`: shell completion of commands and options."""

from argparse import ArgumentParser, Namespace

HELP = "print a script with which a shell completes commands and options"
EXAMPLES = """\
examples:
  eval "$(esper completion bash)"                       in ~/.bashrc
  esper completion zsh > ~/.zfunc/_esper                with fpath+=(~/.zfunc)
"""


def add(parser: ArgumentParser) -> None:
    """Add the name of the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")


def run(options: Namespace) -> int:
    """Print the script."""
    import shtab

    from esper.cli import COMMANDS, parser

    print(shtab.complete(parser(COMMANDS), options.shell))
    return 0
