"""A Ray cluster does jobs as this process does, and loses none.

A cluster takes up to half a minute to start on two cores, and every process of the
tests has its own: but for one test, those with a cluster are slow.
"""

import os
import sys
from importlib.util import find_spec
from ipaddress import ip_address
from time import sleep
from types import SimpleNamespace

import psutil
import pytest
import torch

from esper.contracts.errors import InvalidInputError, WorkersError
from esper.workers.jobs import Workers, workers
from esper.workers.ray import do_checked_job, versions
from tests.training.test_shards import assert_same, trained
from tests.workers import test_jobs as test_workers
from tests.workers.test_jobs import Pair, halved, misbehave, require_number


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_a_cluster_without_a_token_is_refused_in_one_line(mode, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    refused = pytest.raises(
        InvalidInputError, match=r"Set RAY_AUTH_MODE=token on every"
    )
    for address in ("192.0.2.1:6379", "local"):
        with refused:
            workers(2, ray=address)
    with refused:  # on a node
        do_checked_job(versions(), halved, None, None)


def test_a_cluster_that_would_listen_to_the_network_is_not_started(monkeypatch):
    util = SimpleNamespace(get_node_ip_address=lambda: "192.0.2.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
    with pytest.raises(
        InvalidInputError, match=r"address '192\.0\.2\.1'.* Set .*=0 before"
    ):
        workers(2, ray="local")


def test_another_version_on_a_node_is_refused_before_anything_is_done(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    other = versions() | {"torch": "1.0"}
    with pytest.raises(InvalidInputError, match=r"this machine has '1\.0'; install"):
        do_checked_job(other, halved, None, None)


@pytest.fixture(scope="module")
def cluster():
    """Two workers of a cluster on this machine."""
    if find_spec("ray") is None:  # not imported: it reads its environment then
        pytest.skip("Ray is not installed")
    with workers(2, ray="local") as pool:
        yield pool


@pytest.mark.slow
def test_ray_finds_what_this_process_finds(cluster):
    jobs = [Pair(torch.full((3,), float(n)), n) for n in range(9)]
    shared = Pair(torch.tensor(0.5), None)
    here, there = ([*w.run(halved, jobs, shared)] for w in (Workers(), cluster))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.left, other.left)
        assert one.right[0] == other.right[0]
    assert os.getpid() not in {result.right[1]["id"] for result in there}


@pytest.mark.slow
def test_jobs_that_ray_loses_are_done_again_without_a_word(cluster, tmp_path, capfd):
    deeds = {0: ("die", 2), 1: ("raise", 2), 3: ("nonsense", 2)}
    jobs = [(n, *deeds.get(n, ("die", 0))) for n in range(6)]
    found = cluster.run(misbehave, jobs, str(tmp_path), check=require_number)
    assert [*found] == [*range(6)]
    assert len([*tmp_path.iterdir()]) == 2 + 2 + 2
    sleep(2)  # it speaks late
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_worker_of_ray_that_is_stopped_is_replaced(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "deadline", 3)
    jobs = [(n, "stopped", 1 if n == 3 else 0) for n in range(5)]
    assert [*cluster.run(misbehave, jobs, str(tmp_path))] == [*range(5)]
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.slow
def test_refusals_and_trouble_are_one_line_each(cluster, tmp_path):
    with pytest.raises(InvalidInputError, match="job 1 is refused"):
        [*cluster.run(test_workers.refuse, [1, 2], None)]
    jobs = [(n, "die", 3 if n == 1 else 0) for n in range(3)]
    with pytest.raises(WorkersError, match="tried 3 times; WorkerCrashedError"):
        [*cluster.run(misbehave, jobs, str(tmp_path))]


@pytest.mark.parametrize(
    "kind", ["kept", pytest.param("drawn", marks=pytest.mark.slow)]
)
def test_ray_plays_the_same_training_and_listens_on_loopback(kind, cluster):
    assert_same(trained(kind, [cluster]), trained(kind, [Workers()]))
    found = listening()
    assert {"gcs_server", "raylet"} <= found.keys()
    assert any(name.startswith("ray::") for name in found)
    for name, addresses in found.items():
        for address in addresses:
            assert address.is_loopback, f"{name} listens on {address}"


def listening():
    """The addresses on which this process and its children listen, by process name."""
    found = {}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        for socket in process.net_connections("inet"):
            if not socket.raddr:
                address = ip_address(socket.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                found.setdefault(process.name(), set()).add(address)
    return found
