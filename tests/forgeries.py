"""Files that lie: agents, recordings, controllers and grown networks, sealed again.

Each function gives the bytes of one forged file. Nothing of them may run, hang, take
memory that the file's own tensors do not explain, or end in anything but one line.
"""

import copy
import json
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from esper.files import pack as pack_tensors
from esper.files import read_safetensors
from esper.rl.ppo import PPO
from esper.tamiyo import shipped as home
from esper.tamiyo.shipped import MANIFEST, WEIGHTS, shipped
from esper.tasks.family import drawn_task
from esper.training.recordings import RecordConfig, pack, record_task, world_settings
from tests.rl.environments import Chance

JUNK = (
    *(-1, 0, 1, 2, 33, 10**5, 10**9, 2**31, 2**63, 10**40, -(10**18)),
    *(
        0.5,
        -1e308,
        1e308,
        True,
        False,
        None,
        "",
        "x" * 5_000,
        "\x1b[2J\n",
        "inf",
        "nan",
    ),
    *("os.system", "__class__", "torch.save", "builtins:exec", "../../etc/passwd"),
    *([], {}, [[]], [[[[]]]], {"a": {"b": []}}, ["a", 1], [10**9] * 8),
)


def forge(chance, value):
    """A copy of plain data in which one or a few places hold something else."""
    forged = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = forged
        while True:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            if not keys:
                break
            key = chance.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and chance.random() < 0.85:
                place = inner
                continue
            kind = chance.choice(("junk", "junk", "junk", "drop", "double"))
            if kind == "drop":
                del place[key]
            elif kind == "double" and isinstance(place, list):
                place.extend(copy.deepcopy(place[:]) * chance.choice((1, 9)))
            else:
                place[key] = copy.deepcopy(chance.choice(JUNK))
            break
    return forged


def forge_tensors(chance, tensors):
    """The same, or with one tensor of another kind, shape, name or content."""
    kind = chance.choice(("none", "none", "dtype", "shape", "name", "drop", "value"))
    name = chance.choice([*tensors])
    made, one = dict(tensors), tensors[name]
    if kind == "dtype":
        other = (torch.float64, torch.int8, torch.bool, torch.float16, torch.uint8)
        made[name] = one.to(chance.choice(other))
    elif kind == "shape":
        made[name] = one.reshape(-1)[: chance.randrange(one.numel() + 1)]
    elif kind == "name":
        made[f"{name}\x1b/../x"] = made.pop(name)
    elif kind == "drop":
        del made[name]
    elif kind == "value" and not one.is_floating_point() and one.dtype != torch.bool:
        made[name] = torch.full_like(one, chance.choice((-1, 100, 127)))
    return made


def resealed(chance, data):
    """A sealed file with forged facts or tensors, or with flipped bytes or a cut."""
    if chance.random() < 0.2:
        return flipped(chance, data)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "good"
        file.write_bytes(data)
        tensors, manifest = read_safetensors(file)
    if chance.random() < 0.8:
        manifest = replace(manifest, facts=forge(chance, manifest.facts))
    return pack_tensors(forge_tensors(chance, tensors), manifest)


def flipped(chance, data):
    """The same bytes with some flipped bits, or cut."""
    if chance.random() < 0.1:
        return data[: chance.randrange(len(data))]
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 4, 64))):
        made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    return bytes(made)


@cache
def agent(memory):
    """The bytes of a small saved agent."""
    made = PPO(Chance, num_envs=2, memory=memory, width=8, rollout_steps=4).learn(8)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "agent"
        made.save(file)
        return file.read_bytes()


@cache
def recording():
    """The bytes of a small recording."""
    config = RecordConfig(stop="end", tasks=1, scripts=3)
    task = drawn_task(config.rng_seed, 0)
    return pack(record_task(task, world_settings("end"), 1, config.scripts, 5))


def controller(chance, folder):
    """Write a controller's folder with a forged manifest or forged weights."""
    body = json.loads((Path(home.__file__).parent / MANIFEST).read_text())
    weights = pack_tensors(shipped().weights)
    if chance.random() < 0.3:
        weights = pack_tensors(forge_tensors(chance, shipped().weights))
    if chance.random() < 0.2:
        weights = flipped(chance, weights)
    body["sha256"] = sha256(weights).hexdigest()
    if chance.random() < 0.8:
        body = forge(chance, body)
    (folder / WEIGHTS).write_bytes(weights)
    text = json.dumps(body).encode()
    (folder / MANIFEST).write_bytes(
        flipped(chance, text) if chance.random() < 0.1 else text
    )
