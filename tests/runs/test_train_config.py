"""One tree of settings: the same from a file, the command line or Python.

Refusals are one line of at most 200 characters, whatever was written.
"""

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import InvalidInputError
from esper.runs.settings import as_flat, as_toml, known_settings, parse_toml, toml_value
from esper.runs.train_config import (
    PRESETS,
    Budget,
    CheckpointConfig,
    EvalConfig,
    Learner,
    TrainConfig,
    World,
    digest,
    from_toml,
    preset,
    resolve,
)
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.registry import CONTROLLERS

TASKS = ("digits", "mnist1d", "letter", "satimage", "mnist5k", "text", "teacher")


def numbers(low, high):
    return st.floats(low, high, exclude_min=True)


def names(of, least=0):
    return st.lists(st.sampled_from(of), unique=True, min_size=least).map(tuple)


def terms(low):
    ends = st.tuples(numbers(low, 1e30), numbers(low, 1e30))
    return numbers(low, 1e30) | ends.map(sorted).map(tuple)


def maybe(values):
    return st.none() | values


texts = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=30
)
learners = st.builds(
    Learner,
    gamma=st.floats(0, 1),
    ppo=st.builds(
        PPOConfig,
        learning_rate=numbers(0, 1),
        minibatches=st.integers(1, 4),
        clip_range=numbers(0, 1e300),
        clip_mode=st.sampled_from(("joint", "per_head", "mixed")),
        target_kl=numbers(0, 9) | st.just(inf),
        head_entropy=st.dictionaries(st.sampled_from(HEAD_NAMES), st.floats(0, 9)),
        value_clip=maybe(numbers(0, 9)),
    ),
    policy=st.builds(PolicyConfig, memory=st.sampled_from(("mingru", "lstm", "none"))),
)
worlds = st.builds(
    World,
    horizon=maybe(st.integers(1, 10_000)),
    rent=terms(-1e30),
    budget=terms(0),
    rate=terms(1e-300),
    blueprints=maybe(names([b.name for b in BLUEPRINTS], 1)),
)
configs = st.builds(
    TrainConfig,
    tasks=names(TASKS, 1),
    num_envs=st.integers(4, 65_536),
    rng_seed=st.integers(0, 2**32 - 1),
    name=maybe(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}x", fullmatch=True)),
    runs=texts,
    start_from=maybe(texts.filter(lambda text: text != "recordings")),
    budget=st.builds(
        Budget,
        rounds=maybe(st.integers(1, 4_096)),
        minutes=numbers(0, 525_600),
        env_steps=maybe(st.integers(1, 10**12)),
    ),
    learner=learners,
    world=worlds,
    evaluation=st.builds(EvalConfig, controllers=names(list(CONTROLLERS))),
    logger=st.sampled_from([(), ("csv",), ("csv:some/where", "wandb")]),
    checkpoint=st.builds(CheckpointConfig, last=st.integers(1, 1_000)),
)


def refused(call, *arguments):
    """The error message, which must be one short line."""
    with pytest.raises(InvalidInputError) as stop:
        call(*arguments)
    line = str(stop.value)
    assert len(line) <= 200
    assert line.isprintable()
    return line


@given(configs)
@settings(max_examples=20)
def test_written_settings_are_read_back(config):
    assert from_toml(as_toml(config)) == config
    assert from_toml(as_toml(config, explain=True)) == config


def test_options_hide_files_which_hide_presets(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("num_envs = 3\nrng_seed = 3\n[evaluation]\nhosts = 3\n")
    second.write_text("rng_seed = 4\n[evaluation]\nhosts = 4\n")
    quick = preset("quick")
    wanted = replace(
        quick, num_envs=3, rng_seed=4, evaluation=replace(quick.evaluation, hosts=5)
    )
    options = {"evaluation.hosts": "5", "preset": "quick", "config": [first, second]}
    assert resolve(options) == wanted


def test_a_table_of_weights_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "weights.toml"
    file.write_text("[learner.ppo.head_entropy]\nslot = 1\n")
    assert preset("default").learner.ppo.head_entropy
    assert resolve({"config": [file]}).learner.ppo.head_entropy == {"slot": 1.0}
    option = {"learner.ppo.head_entropy": "{op = 2}"}
    assert resolve(option).learner.ppo.head_entropy == {"op": 2.0}


def test_presets_are_valid_differ_and_take_longer_and_longer():
    assert resolve({}) == preset("default") == TrainConfig() == from_toml("")
    for name in PRESETS:
        assert from_toml(as_toml(preset(name))) == preset(name)
        assert [other for other in PRESETS if preset(other) == preset(name)] == [name]
    rounds = [preset(n).budget.rounds for n in ("quick", "default", "thorough")]
    assert rounds == sorted(rounds)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tasks", "letter", ("letter",)),
        ("tasks", "letter, digits", ("letter", "digits")),
        ("tasks", '["letter", "digits"]', ("letter", "digits")),
        ("rng_seed", "7", 7),
        ("name", "12", "12"),
        ("name", "none", None),
        ("world.rent", "[0, 1]", (0.0, 1.0)),
        ("world.rent", "-1", -1.0),
        ("world.blueprints", "none", None),
        ("world.blueprints", "conv", ("conv",)),
        ("evaluation.controllers", "[]", ()),
        ("logger", "csv,wandb:a b", ("csv", "wandb:a b")),
        ("world.at_once", "true", True),
        ("world.at_once", "false", False),
        ("learner.ppo.target_kl", "inf", inf),
        ("learner.ppo.value_clip", "none", None),
        ("learner.policy.memory", "none", "none"),
    ],
)
def test_an_option_is_read_as_its_setting_wants_it(name, text, value):
    found = as_flat(resolve({name: text}))[name]
    assert found == value
    assert type(found) is type(value)


def test_minutes_replace_the_rounds_of_a_preset():
    assert resolve({"budget.minutes": "3"}).budget == Budget(minutes=3.0)
    both = {"budget.minutes": "3", "budget.rounds": "4"}
    assert resolve(both).budget == Budget(minutes=3.0, rounds=4)
    assert resolve({"budget.minutes": "none"}).budget == Budget(rounds=150)


INTEGER = "--num_envs must be a valid integer; got "
REFUSED_OPTIONS = [
    *(("num_envs", text, INTEGER) for text in ("4.0", "1e9", "٤", "", "nan", "true")),
    *(("num_envs", text, INTEGER) for text in ("9" * 5_000, "[" * 3_000, "'4'")),
    ("num_envs", "1\nrng_seed=2", INTEGER),
    ("num_envs", "0", "--num_envs must be greater than or equal to 1; got 0"),
    ("num_envs", "-1", "--num_envs must be greater than or equal to 1; got -1"),
    ("num_envs", "65537", "--num_envs must be less than or equal to 65536"),
    ("num_env", "4", "no option '--num_env'; did you mean '--num_envs'"),
    ("num_envs.more", "4", "no option '--num_envs.more'; did you mean '--num_envs'"),
    ("learning_rate", "1", "did you mean '--learner.ppo.learning_rate'"),
    ("learner", "{}", "no option '--learner'"),
    ("tasks", "lettr", "--tasks: there is no task 'lettr'; did you mean 'letter'"),
    ("tasks", "letter,letter", "--tasks has 'letter' twice"),
    ("tasks", "[]", "--tasks is empty"),
    ("tasks", "simulated,letter", "tasks has 'simulated' and others"),
    ("evaluation.controllers", "erly", "did you mean 'early'"),
    ("evaluation.controllers", "early,early", "'early' twice"),
    ("world.blueprints", "widen8", "did you mean 'widen_8'"),
    ("world.rent", "[2, 1]", "--world.rent must be"),
    ("world.rent", "[1, 2, 3]", "--world.rent must be a valid number or Tuple"),
    ("world.rate", "0", "--world.rate must be"),
    ("world.penalty", "-0.1", "--world.penalty must be"),
    ("budget.rounds", "none", "budget: set at least one of"),
    ("learner.gamma", "1.1", "--learner.gamma must be less than or equal to 1"),
    ("learner.gamma", "1e999", "must be a finite number; got inf"),
    ("learner.gamma", '"0.9"', "got '0.9'"),
    ("learner.ppo.learning_rate", "0", "--learner.ppo.learning_rate must be"),
    ("learner.ppo.learning_rate", "2", "must be in (0, 1], got 2"),
    ("learner.ppo.entropy_coef", "inf", "--learner.ppo.entropy_coef must be a finite"),
    (
        "learner.ppo.clip_mode",
        "joints",
        "clip_mode: there is no 'joints'; did you mean",
    ),
    ("world.clock", "bathces", "--world.clock: there is no 'bathces'; did you mean 'b"),
    ("world.stop", "x" * 999, "did you mean 'end'? There are end, anytime."),
    ("learner.ppo.head_entropy", "{opp = 1}", "head_entropy must name heads"),
    (
        "learner.ppo.head_entropy",
        "{op = nan}",
        "--learner.ppo.head_entropy must be a finite",
    ),
    ("learner.policy.memory", "rnn", "--learner.policy.memory"),
    ("learner.policy.width", "5000", "must be less than or equal to 4096"),
    ("world.at_once", "yes", "must be a valid boolean; got 'yes'"),
    ("logger", "csv:", "logger 'csv:' needs a folder after the colon"),
    ("logger", "runs/mine", "there is no logger 'runs/mine'; did you mean"),
    ("checkpoint.every", "0", "--checkpoint.every must be greater than or equal to 1"),
    ("rng_seed", "-1", "--rng_seed must be greater than or equal to 0"),
    ("rng_seed", str(2**64), "--rng_seed must be less than or equal to 4294967295"),
    ("name", "../x", "a run cannot be called '../x'"),
    ("name", "a\nb", "printable"),
    ("runs", "\udc80", "settings must be plain values"),
    ("runs", "", "printable"),
    ("preset", "quik", "no preset 'quik'; did you mean 'quick'"),
    ("config", ["missing.toml"], "missing.toml does not exist"),
    ("config", ["a\0b"], "does not exist"),
    ("config", ["x" * 5_000], "does not exist"),
    ("config", ["/tmp"], "is not a regular file"),
    ("config", ["/dev/zero"], "is not a regular file"),
]


def test_options_are_refused_in_one_line():
    for name, text, message in REFUSED_OPTIONS:
        assert message in refused(resolve, {name: text}), (name, text)


def test_contradictions_are_refused_in_one_line():
    for options, message in (
        ({"tasks": "simulated", "world.horizon": "3"}, "world.horizon is 3"),
        (
            {"tasks": "text", "num_envs": "1", "learner.ppo.minibatches": "2"},
            "minibatches is 2",
        ),
        (
            {"tasks": "simulated", "start_from": "recordings"},
            "start_from is 'recordings'",
        ),
    ):
        assert message in refused(resolve, options)


REFUSED_FILES = [
    ("learning_rte = 1", "no setting 'learning_rte'; did you mean 'learner"),
    ("Envs = 4", "no setting 'Envs'; did you mean 'num_envs'"),
    ("[learner.ppo]\nlearning_rte = 1", "did you mean 'learner.ppo.learning_rate'"),
    ("num_envs = 4\nnum_envs = 4", "expected TOML; got Cannot overwrite"),
    ("[budget]\n[budget]", "expected TOML; got Cannot declare"),
    ('num_envs = "4"', "num_envs must be a valid integer; got '4'"),
    ("num_envs = true", "got True"),
    ("num_envs = 4.0", "got 4.0"),
    (f"num_envs = {'9' * 4_000}", "num_envs must be less than or equal to 65536"),
    (f"num_envs = {'9' * 5_000}", "expected TOML"),
    (f"learner.gamma = {'9' * 4_000}", "learner.gamma must be a finite number"),
    ("num_envs = 1979-05-27", "num_envs must be a valid integer"),
    ("runs = 1979-05-27", "runs must be a valid string"),
    ("num_envs = {}", "got {}"),
    ("learner = 3", "learner must be a table of settings; got 3"),
    ("budget = []", "budget must be a table of settings; got []"),
    ("tasks = 'letter'", "tasks must be a valid array; got 'letter'"),
    ("tasks = [3]", "tasks must be a valid string; got 3"),
    ("learner.ppo.head_entropy = 3", "must be an object; got 3"),
    ("runs = 3", "runs must be a valid string; got 3"),
    ("world.stop = 3", "world.stop must be 'end' or 'anytime'; got 3"),
    ('runs = "a\\u202eb"', "printable"),
    ("learner.ppo.max_grad_norm = nan", "learner.ppo.max_grad_norm must be"),
    ("x = " + "[" * 60_000, "brackets too deep"),
    ("num_envs" + ".a" * 30_000 + " = 1", "too many dots"),
    ("learner.ppo.head_entropy" + ".a" * 900 + " = 1", "too many dots"),
    ("= 3", "expected TOML"),
    ("\x00", "expected TOML"),
]
REFUSED_BYTES = [
    ("\ufeffnum_envs = 4".encode(), "expected TOML"),
    ("num_envs = 4".encode("utf-16"), "must be text in UTF-8, but byte 0"),
    ("num_envs = 4".encode("utf-16-le"), "expected TOML"),
    ("# é\nenvs = 4".encode("latin-1"), "must be text in UTF-8, but byte 2"),
    (bytes(range(256)), "must be text in UTF-8, but byte 128"),
    (b"#" * 2**20, "has more than 65,536 bytes"),
]


def test_a_text_is_parsed_within_limits():
    assert parse_toml("a.b = 1") == {"a": {"b": 1}}
    for text, message in (
        (
            "#" * (1 << 16) + "\n",
            "mine: expected TOML; got more than 65,536 characters",
        ),
        ("a" + ".a" * 30_000 + " = 1", "mine: expected TOML; got a line of too many"),
        ("a = " + "[" * 30_000, "mine: expected TOML; got brackets too deep"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            parse_toml(text, "mine: ")


def test_files_are_refused_in_one_line_with_their_name(tmp_path):
    file = tmp_path / "mine.toml"
    for data, message in (
        *((text.encode(), message) for text, message in REFUSED_FILES),
        *REFUSED_BYTES,
    ):
        file.write_bytes(data)
        line = refused(resolve, {"config": [file]})
        assert message in line
        assert "mine.toml" in line


def test_python_is_refused_as_files_are():
    for make, message in (
        (
            lambda: TrainConfig(num_envs=0),
            "num_envs must be greater than or equal to 1",
        ),
        (lambda: TrainConfig(num_envs="4"), "num_envs must be a valid integer"),
        (lambda: TrainConfig(tasks=()), "tasks is empty"),
        (lambda: Budget(rounds=None), "at least one of rounds"),
        (lambda: Learner(gamma=float("nan")), "gamma must be a finite number"),
        (lambda: Learner(ppo=PPOConfig(learning_rate=2.0)), "learning_rate must be"),
        (lambda: World(rate=(2.0, 1.0)), "rate must be"),
        (lambda: World(blueprints=()), "at least one name"),
        (lambda: EvalConfig(hosts=0), "hosts must be"),
        (lambda: CheckpointConfig(every=0), "every must be"),
    ):
        assert message in refused(make)


def test_the_digest_depends_on_every_setting():
    found = {digest(config) for config in PRESETS.values()}
    assert len(found) == len(PRESETS)
    assert digest(TrainConfig()) == digest(from_toml(as_toml(TrainConfig())))
    assert digest(TrainConfig(world=World(rent=-0.0))) == digest(
        TrainConfig(world=World(rent=0.0))
    )
    changed = [
        ("num_envs", "17"),
        ("learner.ppo.clip_range", "0.3"),
        ("world.rent", "[0, 0.02]"),
    ]
    found |= {digest(resolve({name: text})) for name, text in changed}
    assert len(found) == len(PRESETS) + len(changed)


def test_every_setting_has_a_description_and_its_default_can_be_an_option():
    known, defaults = known_settings(TrainConfig), as_flat(TrainConfig())
    assert [*known] == [*defaults]
    assert all(setting.description for setting in known.values())
    texts = {name: toml_value(value) for name, value in defaults.items()}
    for name, setting in known.items():
        if setting.type == "string" or texts[name] == '"none"':
            texts[name] = texts[name].strip('"')
    assert resolve({"preset": "simulated", **texts}) == TrainConfig()


JUNK = (
    *("", "0", "-1", "4", "4.0", "1e9", "1e999", "nan", "-inf", "true", "none", "[]"),
    *("{}", "[0, 1]", "['a']", '"x"', "letter", "{op = 1}", "٤", "\x00", "\udcff"),
    *("%s", "9" * 5_000, "[" * 2_000, "a." * 3_000, "1979-05-27", "--", "-x", "a\nb"),
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


@pytest.mark.parametrize("count", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(tmp_path, count):
    chance = random.Random(count)
    texts = [as_toml(config) for config in PRESETS.values()]
    file = tmp_path / "damaged.toml"

    lines = []
    for _ in range(count):
        file.write_bytes(mutated(chance, chance.choice(texts)))
        try:
            config = resolve({"config": [file]})
        except InvalidInputError as error:
            lines.append(str(error))
        else:
            assert from_toml(as_toml(config)) == config
    assert all(len(line) <= 200 and line.isprintable() for line in lines)
    assert 0.25 * count < len(lines) < count
