"""Sixty hostile requests: refused, or answered from runs alone."""

import hashlib
import json

import pytest

from esper.watch.reading import run_id
from tests.watch.serving import TASK, serving, shown_run

SECRET = "SENTINEL-OF-ANOTHER-FOLDER"
PAGES = "https://evil.example"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of runs; a secret lies next to it, and links lead there."""
    base = tmp_path_factory.mktemp("watch")
    shown_run(base / "runs")
    secret = shown_run(base / "other", "secret")
    (secret / "config.toml").write_text(f'tasks = ["{SECRET}"]\n')
    (base / "secret.txt").write_text(SECRET)
    (base / "runs" / "link").symlink_to(secret)
    return base / "runs"


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as started:
        yield started


METHODS = ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "CONNECT"]
METHODS += ["QUERY", "get"]
HOSTS = [
    "evil.example",
    "127.0.0.1",
    "localhost",
    "0.0.0.0:{port}",
    "[::1]:{port}",
    "127.1:{port}",
    "127.0.0.1:{port}.evil.example",
    "evil.example:{port}",
    "127.0.0.1:{port}@evil.example",
    "127.0.0.1:1",
    "",
    " 127.0.0.1:{port}\t.",
]
ORIGINS = [PAGES, "null", "http://127.0.0.1:1", "https://{host}", "http://{host}.evil"]
FERN = run_id("fern")
PATHS = [
    "/static/../reading.py",
    "/static/..%2freading.py",
    "/static/%2e%2e%2f%2e%2e%2fcli%2fwatch.py",
    "/static/..%252f..%252fsecret.txt",
    "/static/..\\..\\secret.txt",
    "/static//etc/passwd",
    "/static/%00",
    "/static/index.html/..",
    "/..//..//secret.txt",
    "//etc/passwd",
    "/etc/passwd",
    "/file:///etc/passwd",
    "/api/runs/fern/learning",
    f"/api/runs/{run_id('link')}/learning",
    f"/api/runs/{run_id('secret')}/learning",
    f"/api/runs/{run_id('..')}/learning",
    "/api/runs/..%2f..%2fother%2fsecret/learning",
    "/api/runs/%2e%2e/learning",
    f"/api/runs/{FERN}/../{FERN}/learning/../../../..",
    f"/api/runs/{FERN}/close",
    f"/api/runs/{FERN}/__class__",
    f"/api/runs/{FERN}%00/learning",
    f"/api/runs/{FERN.upper()}x/learning",
    f"/api/runs/{FERN}/host?task={TASK}&env=-1",
    f"/api/runs/{FERN}/host?task={TASK}&env=99999999999999999999",
    f"/api/runs/{FERN}/host?task={TASK}&env=%D9%A4",
    f"/api/runs/{FERN}/host?task={TASK}&env=1e3&episode=nan",
    f"/api/runs/{FERN}/stream?after=1-1;DROP",
    f"/api/runs/{FERN}/stream?after=" + "9" * 400,
    "/api/runs?" + "&".join(f"a{n}={n}" for n in range(10_000)),
    "/" + "a" * 5_000,
]
HARMLESS = [
    f"/api/runs/{FERN}/host?task=%27%3B+DROP+TABLE+rounds%3B--&env=0",
    f"/api/runs/{FERN}/host?task=%00%ff&env=0&episode=999999999999999",
    f"/api/runs/{FERN}/host?env=0&env=1&env=2",
]


def assert_safe(status, headers, text):
    assert status < 500
    assert "Traceback" not in text
    assert SECRET not in text
    assert "root:" not in text
    assert not [name for name in headers if name.lower().startswith("access-control")]


def refused(server, path="/", headers=(), method="GET", host=True):
    own = [("Host", server.host)] if host else []
    status, answer, text = server.get(path, [*own, *headers], method)
    assert_safe(status, answer, text)
    assert 400 <= status < 500, (path, headers, method)
    return status


def digests(folder):
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.is_file() and not file.name.endswith(("-shm", "-wal"))
    }


def test_hostile_requests_are_refused_and_change_nothing(server, folder):
    before = digests(folder / "fern")
    port = server.host.partition(":")[2]
    for method in METHODS:
        assert refused(server, method=method) in (400, 405), method
    for name in HOSTS:
        own = [("Host", name.format(port=port))]
        assert refused(server, headers=own, host=False) in (400, 421), name
    twice = [("Host", server.host), ("Host", "evil.example")]
    assert refused(server, headers=twice, host=False) in (400, 421)
    for origin in ORIGINS:
        given = [("Origin", origin.format(host=server.host))]
        assert refused(server, "/api/runs", given) == 403, origin
    for site in ("cross-site", "same-site"):
        assert refused(server, "/api/runs", [("Sec-Fetch-Site", site)]) == 403
    for path in PATHS:
        assert refused(server, path) in (400, 404, 414), path
    for path in HARMLESS:
        status, headers, text = server.get(path)
        assert_safe(status, headers, text)
        assert json.loads(text)["decisions"] == []
    raw = (
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"\x00\x01\x02\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Key: AA==\r\n\r\n",
    )
    for data in raw:
        answer = server.send(data)
        assert answer.startswith("HTTP/1.1 4") or not answer, data[:60]
        assert_safe(400, {}, answer)
    count = len(METHODS) + len(HOSTS) + len(ORIGINS) + len(PATHS) + len(raw) + 3
    assert count >= 60
    assert server.json("/api/runs")[1]["runs"][0]["name"] == "fern"
    assert server.process.poll() is None
    assert digests(folder / "fern") == before


def test_the_page_may_run_no_script_of_others_and_lists_no_links(server):
    status, headers, text = server.get("/")
    policy = headers["content-security-policy"]
    assert (status, headers["x-content-type-options"]) == (200, "nosniff")
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "server" not in {name.lower() for name in headers}
    assert "<script>" not in text
    assert [run["name"] for run in server.json("/api/runs")[1]["runs"]] == ["fern"]
    local = server.get("/", [("Host", server.host.replace("127.0.0.1", "localhost"))])
    assert local[0] == 200


def test_the_server_listens_on_no_other_address_of_the_machine(server):
    import psutil

    (own,) = psutil.Process(server.process.pid).net_connections("inet")
    assert own.laddr.ip == "127.0.0.1"
