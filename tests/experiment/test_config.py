"""One tree of settings: the same from a file, the command line or Python.

Refusals are one line of at most 200 characters that names what is nearest, whatever
was written: thousands of damaged files and command lines say so.
"""

import random
from dataclasses import fields, replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import BadInput
from esper.experiment.config import (
    RULES,
    Budget,
    Judging,
    Keeping,
    Learner,
    TrainConfig,
    World,
    as_toml,
    digest,
    from_toml,
)
from esper.experiment.settings import typed
from esper.experiment.settings.arguments import (
    parse_options,
    parse_train,
    read_config,
    train_parser,
)
from esper.experiment.settings.presets import PRESETS, preset
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.registry import CONTROLLERS

TASKS = ("digits", "mnist1d", "letter", "satimage", "mnist5k", "text", "teacher")


def numbers(low, high):
    return st.floats(low, high, exclude_min=True)


def names(of, least=0):
    return st.lists(st.sampled_from(of), unique=True, min_size=least).map(tuple)


def terms(low):
    ends = st.tuples(numbers(low, 1e300), numbers(low, 1e300))
    return numbers(low, 1e300) | ends.map(sorted).map(tuple)


def maybe(values):
    return st.none() | values


counts = st.integers(1, 4_096)
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=30
)
trees = st.fixed_dictionaries(
    {
        "tasks": names(TASKS, 1),
        "envs": st.integers(4, 65_536),
        "rng_seed": st.integers(0, 2**32 - 1),
        "name": maybe(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}x", fullmatch=True)),
        "runs": texts,
        "start_from": maybe(texts),
        "budget": st.fixed_dictionaries(
            {
                "rounds": maybe(counts),
                "minutes": numbers(0, 525_600),
                "env_steps": maybe(st.integers(1, 10**12)),
            }
        ),
        "gamma": st.floats(0, 1),
        "ppo": st.fixed_dictionaries(
            {
                "learning_rate": numbers(0, 1),
                "minibatches": st.integers(1, 4),
                "clip": numbers(0, 1e300),
                "clip_mode": st.sampled_from(("joint", "per_head", "mixed")),
                "target_kl": numbers(0, 9) | st.just(inf),
                "head_entropy": st.dictionaries(
                    st.sampled_from(HEAD_NAMES), st.floats(0, 9)
                ),
                "value_clip": maybe(numbers(0, 9)),
            }
        ),
        "memory": st.sampled_from(("mingru", "lstm", "none")),
        "world": st.fixed_dictionaries(
            {
                "horizon": maybe(st.integers(1, 10_000)),
                "rent": terms(-1e300),
                "budget": terms(0),
                "rate": terms(1e-300),
                "blueprints": maybe(names([b.name for b in BLUEPRINTS], 1)),
            }
        ),
        "controllers": names(list(CONTROLLERS)),
        "tensorboard": st.booleans(),
    }
)


def grown(tree):
    """A configuration out of plain values."""
    tree = dict(tree)
    return TrainConfig(
        budget=Budget(**tree.pop("budget")),
        learner=Learner(
            gamma=tree.pop("gamma"),
            ppo=PPOConfig(**tree.pop("ppo")),
            policy=PolicyConfig(memory=tree.pop("memory")),
        ),
        world=World(**tree.pop("world")),
        judging=Judging(controllers=tree.pop("controllers")),
        keeping=Keeping(tensorboard=tree.pop("tensorboard")),
        **tree,
    )


def refused(call, *arguments):
    """What was said, after making sure that it is fit to be said."""
    with pytest.raises(BadInput) as stop:
        call(*arguments)
    line = str(stop.value)
    assert len(line) <= 200
    assert line.isprintable()
    return line


@given(trees)
@settings(max_examples=50)
def test_what_was_written_is_read_back(tree):
    config = grown(tree)
    assert from_toml(as_toml(config)) == config
    assert from_toml(as_toml(config, explain=True)) == config


@given(texts.filter(lambda text: text not in ("none", "--")))
@settings(max_examples=25)
def test_any_printable_text_survives_quoting(text):
    config = TrainConfig(runs=text, start_from=text)
    assert from_toml(as_toml(config)) == config
    assert parse_train([f"--runs={text}", f"--start_from={text}"]) == config


@given(trees)
@settings(max_examples=5)
def test_a_written_configuration_hides_every_preset(tmp_path_factory, tree):
    config = grown(tree)
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(as_toml(config), encoding="utf-8")
    for name in PRESETS:
        assert parse_train(["--preset", name, "--config", str(file)]) == config
    assert read_config(file) == config


def test_options_hide_files_which_hide_presets(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("envs = 3\nrng_seed = 3\n[judging]\nhosts = 3\n")
    second.write_text("rng_seed = 4\n[judging]\nhosts = 4\n")
    files = ["--config", str(first), "--config", str(second)]
    quick = preset("quick")
    wanted = replace(quick, envs=3, rng_seed=4, judging=replace(quick.judging, hosts=5))
    options = ["--judging.hosts", "5", "--preset", "quick"]
    assert parse_train([*files, *options]) == wanted
    assert parse_train([*options, *files]) == wanted


def test_a_table_of_weights_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "weights.toml"
    file.write_text("[learner.ppo.head_entropy]\nslot = 1\n")
    assert preset("default").learner.ppo.head_entropy
    assert parse_train([f"--config={file}"]).learner.ppo.head_entropy == {"slot": 1.0}
    option = "--learner.ppo.head_entropy={op = 2}"
    assert parse_train([option]).learner.ppo.head_entropy == {"op": 2.0}


def test_without_options_the_default_preset_is_meant():
    assert parse_train([]) == preset("default") == TrainConfig() == from_toml("")


@pytest.mark.parametrize("name", ["quick", "default", "thorough", "simulated"])
def test_presets_are_valid_and_differ(name):
    assert from_toml(as_toml(preset(name))) == preset(name)
    assert [other for other in PRESETS if preset(other) == preset(name)] == [name]


def test_presets_by_time():
    rounds = [preset(n).budget.rounds for n in ("quick", "default", "thorough")]
    assert rounds == sorted(rounds)


@pytest.mark.parametrize(
    ("argv", "setting", "value"),
    [
        (["--tasks", "letter"], "tasks", ("letter",)),
        (["--tasks", "letter, digits"], "tasks", ("letter", "digits")),
        (["--tasks", '["letter", "digits"]'], "tasks", ("letter", "digits")),
        (["--rng-seed", "7"], "rng_seed", 7),
        (["--rng_seed=7"], "rng_seed", 7),
        (["--name", "12"], "name", "12"),
        (["--name", "none"], "name", None),
        (["--world.rent", "[0, 1]"], "world.rent", (0.0, 1.0)),
        (["--world.rent", "-1"], "world.rent", -1.0),
        (["--world.blueprints", "none"], "world.blueprints", None),
        (["--world.blueprints", "conv"], "world.blueprints", ("conv",)),
        (["--judging.controllers", "[]"], "judging.controllers", ()),
        (["--keeping.tensorboard"], "keeping.tensorboard", True),
        (["--keeping.tensorboard", "false"], "keeping.tensorboard", False),
        (["--learner.ppo.target_kl", "inf"], "learner.ppo.target_kl", inf),
        (["--learner.policy.memory", "none"], "learner.policy.memory", "none"),
        (["--budget.rounds=none", "--budget.minutes=3"], "budget.rounds", None),
    ],
)
def test_an_option_is_read_as_its_setting_wants_it(argv, setting, value):
    found = parse_train(argv)
    for name in setting.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


COUNT = "--envs must be a whole number from 1 to 65536; got "


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        *((["--envs", text], COUNT) for text in ("0", "4.0", "1e9", "٤", "", "nan")),
        *((["--envs", text], COUNT) for text in ("true", "9" * 5_000, "[" * 3_000)),
        *((["--envs", text], COUNT) for text in ("1\nrng_seed=2", "65537", "'4'")),
        (["--envs=-1"], COUNT),
        (["--env", "4"], "no option '--env'; did you mean '--envs'"),
        (["--envs.more", "4"], "no option '--envs.more'; did you mean '--envs'"),
        (["--learning-rate", "1"], "did you mean '--learner.ppo.learning_rate'"),
        (["--learner", "{}"], "no option '--learner'"),
        (["--envs"], "--envs: expected one argument"),
        (["more"], "more"),
        (["--"], "--"),
        (["--tasks", "lettr"], "no task 'lettr'; did you mean 'letter'"),
        (["--tasks", "letter,letter"], "'letter' twice"),
        (["--tasks", "[]"], "tasks is empty"),
        (["--tasks", "simulated,letter"], "cannot be mixed"),
        (["--tasks", "simulated", "--world.horizon", "3"], "world.horizon is 3"),
        (
            ["--tasks", "text", "--envs", "1", "--learner.ppo.minibatches", "2"],
            "minibatches is 2",
        ),
        (["--judging.controllers", "erly"], "did you mean 'early'"),
        (["--judging.controllers", "early,early"], "'early' twice"),
        (["--world.blueprints", "widen8"], "did you mean 'widen_8'"),
        (["--world.rent", "[2, 1]"], "world: rent must be"),
        (["--world.rent", "[1, 2, 3]"], "--world.rent must be 2 numbers"),
        (["--world.rate", "0"], "world: rate must be"),
        (["--budget.rounds", "none"], "budget: at least one of"),
        (["--learner.gamma", "1.1"], "--learner.gamma must be a number from 0 to 1"),
        (["--learner.gamma", "1e999"], "got inf"),
        (["--learner.gamma", '"0.9"'], "got '0.9'"),
        (["--learner.ppo.learning_rate", "0"], "must be a number above 0 to 1"),
        (["--learner.ppo.learning_rate", "2"], "must be a number above 0 to 1"),
        (["--learner.ppo.entropy", "inf"], "must be a number from 0; got inf"),
        (["--learner.ppo.clip_mode", "joints"], "did you mean 'joint'"),
        (["--learner.ppo.head_entropy", "{opp = 1}"], "did you mean 'op'"),
        (["--learner.ppo.head_entropy", "{op = nan}"], "head_entropy.op must be"),
        (["--learner.policy.memory", "gru"], "did you mean 'mingru'"),
        (["--keeping.tensorboard", "yes"], "must be true or false; got 'yes'"),
        (["--keeping.every", "0"], "whole number from 1"),
        (["--rng-seed=-1"], "--rng_seed must be a whole number from 0 to 4294967295"),
        (["--rng-seed", str(2**64)], "--rng_seed must be a whole number from 0"),
        (["--name", "../x"], "a run cannot be called '../x'"),
        (["--name", "a\nb"], "printable"),
        (["--runs", "\udc80"], "printable"),
        (["--runs="], "printable"),
        (["--preset", "quik"], "no preset 'quik'; did you mean 'quick'"),
        (["--config", "missing.toml"], "missing.toml cannot be read: No such file"),
        (["--config", "a\0b"], "cannot be read"),
        (["--config", "x" * 5_000], "cannot be read"),
    ],
)
def test_a_command_line_is_refused_in_one_line(argv, complaint):
    assert complaint in refused(parse_train, argv)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("learning_rte = 1", "no setting 'learning_rte'; did you mean 'learner"),
        ("Envs = 4", "no setting 'Envs'; did you mean 'envs'"),
        ("[learner.ppo]\nlearning_rte = 1", "did you mean 'learner.ppo.learning_rate'"),
        ("envs = 4\nenvs = 4", "expected TOML; got Cannot overwrite"),
        ("[budget]\n[budget]", "expected TOML; got Cannot declare"),
        ('envs = "4"', "envs must be a whole number from 1 to 65536; got '4'"),
        ("envs = true", "got True"),
        ("envs = 4.0", "got 4.0"),
        (f"envs = {'9' * 4_000}", "envs must be a whole number"),
        (f"envs = {'9' * 5_000}", "expected TOML"),
        (f"learner.gamma = {'9' * 4_000}", "learner.gamma must be a number"),
        ("envs = 1979-05-27", "envs must be a whole number"),
        ("envs = {}", "got {}"),
        ("learner = 3", "learner must be a table of settings; got 3"),
        ("budget = []", "budget must be a table of settings; got []"),
        ("tasks = 'letter'", "tasks must be a list in brackets; got 'letter'"),
        ("tasks = [3]", "tasks must be text; got 3"),
        ("learner.ppo.head_entropy = 3", "must be a table of numbers; got 3"),
        ("runs = 3", "runs must be text; got 3"),
        ('runs = "a\\u202eb"', "printable"),
        ("world.penalty = -0.1", "world.penalty must be a number from 0; got -0.1"),
        ("learner.ppo.max_grad_norm = nan", "above 0; got nan"),
        ("x = " + "[" * 60_000, "brackets too deep"),
        ("envs" + ".a" * 30_000 + " = 1", "too many dots"),
        ("learner.ppo.head_entropy" + ".a" * 900 + " = 1", "no head 'a'"),
        ("learner.ppo.head_entropy.op" + ".a" * 900 + " = 1", "op must be a number"),
        ("= 3", "expected TOML"),
        ("\x00", "expected TOML"),
    ],
)
def test_a_file_is_refused_in_one_line_with_its_name(tmp_path, text, complaint):
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    for line in (
        refused(parse_train, ["--config", str(file)]),
        refused(read_config, file),
    ):
        assert complaint in line
        assert "mine.toml: " in line


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        ("\ufeffenvs = 4".encode(), "byte order mark"),
        ("envs = 4".encode("utf-16"), "byte order mark"),
        ("envs = 4".encode("utf-16-le"), "expected TOML"),
        ("# é\nenvs = 4".encode("latin-1"), "must be TOML in UTF-8; byte 2"),
        (bytes(range(256)), "must be TOML in UTF-8; byte 128"),
        (b"#" * 2**20, "larger than 65,536 bytes"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, data, complaint):
    file = tmp_path / "mine.toml"
    file.write_bytes(data)
    assert complaint in refused(parse_train, ["--config", str(file)])


def test_a_folder_is_no_file(tmp_path):
    assert "Is a directory" in refused(parse_train, ["--config", str(tmp_path)])


def test_an_endless_file_is_not_read_to_its_end():
    assert "larger than" in refused(read_config, Path("/dev/zero"))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: TrainConfig(envs=0), "envs must be a whole number from 1"),
        (lambda: TrainConfig(tasks=()), "tasks is empty"),
        (lambda: Budget(rounds=None), "at least one of rounds"),
        (lambda: Learner(gamma=float("nan")), "gamma must be a number"),
        (lambda: Learner(ppo=PPOConfig(learning_rate=2.0)), "learning_rate must be"),
        (lambda: Learner(ppo=PPOConfig(entropy=inf)), "entropy must be"),
        (lambda: Learner(policy=PolicyConfig(memory="gru")), "did you mean 'mingru'"),
        (lambda: World(rate=(2.0, 1.0)), "rate must be"),
        (lambda: World(blueprints=()), "at least one name"),
        (lambda: Judging(hosts=0), "hosts must be"),
        (lambda: Keeping(every=0), "every must be"),
    ],
)
def test_python_is_refused_as_files_are(make, complaint):
    assert complaint in refused(make)


def test_the_digest_tells_every_setting():
    told = {digest(config) for config in PRESETS.values()}
    assert len(told) == len(PRESETS)
    assert digest(TrainConfig()) == digest(from_toml(as_toml(TrainConfig())))
    assert digest(TrainConfig(world=World(rent=-0.0))) == digest(
        TrainConfig(world=World(rent=0.0))
    )
    changed = ["--envs=17", "--learner.ppo.clip=0.3", "--world.rent=[0.01, 0.02]"]
    told |= {digest(parse_train([option])) for option in changed}
    assert len(told) == len(PRESETS) + len(changed)


def test_every_setting_has_its_meaning_as_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_train(["--help"])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    trees = [TrainConfig, Budget, Learner, World, Judging, Keeping]
    for tree in (*trees, PPOConfig, PolicyConfig):
        assert [*typed.meanings(tree)] == [field.name for field in fields(tree)]
    for name in typed.settings(TrainConfig, RULES):
        assert f"--{name} " in said
    assert "Rounds between two checkpoints (default: 10)" in said


def test_a_caller_may_add_options():
    parser = train_parser()
    parser.add_argument("--resume")
    found = parse_options(parser, ["--resume", "x", "--envs", "4"])
    assert found == {"resume": "x", "envs": "4"}
    assert "'--resume'" in refused(parse_options, parser, ["--resum", "x"])


JUNK = (
    *("", "0", "-1", "4", "4.0", "1e9", "1e999", "nan", "-inf", "true", "none", "[]"),
    *(
        "{}",
        "[0, 1]",
        "['a']",
        '"x"',
        "letter",
        "{op = 1}",
        "٤",
        "\x00",
        "\udcff",
        "%s",
    ),
    *(
        "9" * 5_000,
        "[" * 2_000,
        "a." * 3_000,
        "1979-05-27",
        "--",
        "-x",
        "a\nb = 1",
        "=",
    ),
)


def mutated(chance, text):
    """A file with some of its bytes or some of its lines changed."""
    if chance.random() < 0.5:
        data = bytearray(text.encode())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            cut = chance.choice((0, 1, 1, 9))
            data[at : at + cut] = chance.randbytes(chance.choice((0, 1, 1, 3)))
        return bytes(data)
    lines = text.split("\n")
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(lines))
        key, _, value = lines[at].partition(" = ")
        junk = chance.choice(JUNK)
        lines[at] = chance.choice(
            (
                f"{key} = {junk}",
                f"{junk} = {value}",
                f"{key[:-1]} = {value}",
                f"{key}\n{lines[at]}",
                f"{lines[at]}\n{lines[at]}",
                f"[{key}]",
                f"{key}.{key} = {value}",
                chance.choice(lines),
            )
        )
    return "\n".join(lines).encode(errors="surrogateescape")


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(tmp_path, count):
    chance, accepted, lines = random.Random(count), 0, []
    texts = [as_toml(config) for config in PRESETS.values()]
    file = tmp_path / "damaged.toml"
    for _ in range(count):
        file.write_bytes(mutated(chance, chance.choice(texts)))
        try:
            config = read_config(file)
        except BadInput as error:
            lines.append(str(error))
        else:
            accepted += 1
            assert from_toml(as_toml(config)) == config
    assert accepted + len(lines) == count
    assert accepted / count < 0.75
    assert accepted or count < 1_000  # one damaged file in a hundred does no harm
    assert all(len(line) <= 200 and line.isprintable() for line in lines)


def options_of_default():
    """Every setting as an option, with the text of its default."""
    options, where = {}, ""
    for line in as_toml(TrainConfig()).split("\n"):
        name, is_setting, value = line.partition(" = ")
        if is_setting:
            options[f"--{where}{name}"] = value
        elif line:
            where = f"{line[1:-1]}."
    return options


def test_the_text_of_every_default_can_be_an_option():
    options = options_of_default()
    quoted = ("name", "runs", "start_from", "memory", "clip_mode")
    for name in options:
        if name.endswith(quoted) or options[name] == '"none"':
            options[name] = options[name].strip('"')
    argv = [f"{name}={value}" for name, value in options.items()]
    assert parse_train(["--preset", "simulated", *argv]) == TrainConfig()


def test_five_hundred_command_lines_are_read_or_refused(capsys):
    chance, accepted, lines = random.Random(0), 0, []
    usual = {"--preset": "quick", "--config": "missing.toml", **options_of_default()}
    for _ in range(500):
        argv = []
        for _ in range(chance.randint(1, 3)):
            option = chance.choice([*usual])
            value = chance.choice([usual[option], chance.choice(JUNK)])
            if chance.random() < 0.2:
                at = chance.randrange(len(option))
                option = option[:at] + chance.choice("-.=_x ") + option[at + 1 :]
            form = chance.choice(("{} {}", "{}={}", "{}", "{} {}"))
            argv += form.format(option, value).split(" ", 1)
        try:
            config = parse_train(argv)
        except BadInput as error:
            lines.append(str(error))
        else:
            accepted += 1
            assert from_toml(as_toml(config)) == config
    assert 50 < accepted < 450
    assert all(len(line) <= 200 and line.isprintable() for line in lines)
    assert capsys.readouterr() == ("", "")
