"""`esper completion`: for the shell to finish words."""

from argparse import ArgumentParser, Namespace

HELP = "print a script with which a shell completes commands and options"
EXAMPLES = """\
examples:
  eval "$(esper completion bash)"                       in ~/.bashrc
  esper completion zsh > ~/.zfunc/_esper                with fpath+=(~/.zfunc)
"""


def add(parser: ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")


def run(options: Namespace) -> int:
    """Print the script."""
    import shtab

    from esper.cli import parser
    from esper.cli.train import settings_parser
    from esper.experiment.settings.arguments import train_parser

    whole = parser()
    below = next(a for a in whole._actions if a.dest == "command").choices
    assert isinstance(below, dict)
    for name, own in (("train", settings_parser()), ("config", train_parser())):
        for action in own._actions:
            if action.option_strings and action.dest != "help":
                below[name].add_argument(*action.option_strings, help=action.help)
    print(shtab.complete(whole, options.shell))
    return 0
