"""`esper ppo` and `esper doctor`."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Final

from esper.cli.arguments import (
    RNG_SEED,
    Command,
    add_option,
    add_settings,
    given_options,
    integer,
    path_text,
    positive_float,
)
from esper.cli.output import print_line
from esper.cli.train import add_resume, report_interruption, unfinished_run
from esper.workers.deadline import TIMEOUT


def add_ppo_options(parser: ArgumentParser) -> None:
    """Add the environment, every setting of a run, and `--resume`."""
    from esper.rl.settings import PPORunConfig

    text = "Gymnasium id of the environment"
    parser.add_argument(
        "env_id", nargs="?", default=SUPPRESS, metavar="ENV_ID", help=text
    )
    add_resume(parser)
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume: import the module that the run names in its environment "
        "id (module:Id-v0). Use it only for runs that you trust, or give --env instead",
    )
    add_settings(parser, PPORunConfig())


def ppo(options: Namespace) -> int:
    """Train PPO on an environment, or resume such a run."""
    from esper.contracts.messages import refusal
    from esper.rl.settings import PPORunConfig
    from esper.rl.training import AGENT, begin_ppo, ppo_settings_of, resume_ppo
    from esper.runs.settings import construct, parsed_options
    from esper.training.callbacks import ConsoleProgress

    given = given_options(options)
    trust, console = given.pop("trust"), ConsoleProgress(details=True)
    if "env_id" in given:
        given.setdefault("env", given.pop("env_id"))
    if "resume" in given:
        env = given.pop("env", None)
        mutable = ("env_timeout", "device", "logger")
        changes = {name: given.pop(name) for name in mutable if name in given}
        path = unfinished_run(given, ppo_settings_of, "Omit it.")
        if path is None:
            return 0
        more, _ = parsed_options(PPORunConfig, changes)
        result = resume_ppo(path, [console], env=env, trust=trust, **more)
    else:
        if "env" not in given:
            raise refusal("expected the id of an environment, or --resume RUN.")
        config = construct(PPORunConfig, *parsed_options(PPORunConfig, given))
        result = begin_ppo(config, [console])
    if result.signal is not None:
        return report_interruption(result, "ppo")
    from esper.report import write_report

    print_line(f"The agent is in {result.path / AGENT}.")
    print_line(f"The report is in {write_report(result.path)}.")
    return 0


def add_doctor_options(parser: ArgumentParser) -> None:
    """Add the options of `esper doctor`."""
    text = "Gymnasium id of the environment"
    parser.add_argument("env", nargs="?", type=path_text, metavar="ENV_ID", help=text)
    device = "check a device such as cuda instead: train on it and on the CPU, compare"
    add_option(parser, "--device", path_text, None, "NAME", device)
    add_option(
        parser, "--steps", integer(1, 10**9), 2_000, "N", "number of steps to take"
    )
    add_option(
        parser, "--rng-seed", RNG_SEED, 0, "N", "random seed of resets and actions"
    )
    seconds = "time limit of one environment call in seconds"
    add_option(parser, "--timeout", positive_float, TIMEOUT, "X", seconds)


def doctor(options: Namespace) -> int:
    """Print problems of an environment or a device; returns 1 if there is a fault."""
    from esper.contracts.messages import refusal
    from esper.rl.doctor import examine

    if (options.env is None) == (options.device is None):
        raise refusal("expected either the id of an environment or --device NAME.")
    if options.device is not None:
        return check_device(options.device)
    findings = examine(
        options.env, options.steps, options.rng_seed, timeout=options.timeout
    )
    for finding in findings:
        print_line(str(finding))
    if any(finding.is_fault for finding in findings):
        return 1
    print_line(f"{options.env}: no faults found in {options.steps} steps.")
    return 0


def check_device(device: str) -> int:
    """Print a comparison of the device with the CPU; returns 1 if they differ."""
    from esper.rl.device_check import TOLERANCE, compare

    passed = True
    for row in compare(device):
        passed &= row.passed
        print_line(
            f"memory {row.memory}: largest difference {row.difference:.1e}, "
            f"{row.cpu_seconds:.1f} s on the CPU, {row.device_seconds:.1f} s there."
        )
    if not passed:
        print_line(f"{device}: some weights differ by more than {TOLERANCE:g}.")
        return 1
    print_line(f"{device}: same weights as on the CPU, up to rounding.")
    return 0


PPO: Final = Command(
    run=ppo,
    options=add_ppo_options,
    settings=True,
    environments=True,
    help="train PPO on a Gymnasium environment, or resume a run",
    examples="""\
examples:
  esper ppo CartPole-v1
  esper ppo CartPole-v1 --memory mingru --total_steps 300000 --num_envs 64
  esper ppo my_package:Mine-v0
  esper ppo --resume RUN
  esper ppo --resume RUN --env my_package:Mine-v0
""",
)

DOCTOR: Final = Command(
    run=doctor,
    options=add_doctor_options,
    environments=True,
    help="find problems in a Gymnasium environment, or check a device",
    description="""\
Step an environment with random legal actions and report problems that prevent learning.
Each finding names the step and a fix. With --device, train a few updates on the CPU
and on the device, and compare the weights. The exit code is 1 if a fault was found.""",
    examples="""\
examples:
  esper doctor CartPole-v1
  esper doctor my_package:Mine-v0 --steps 10000
  esper doctor --device cuda
""",
)
