"""The web view of runs: GET only, on 127.0.0.1, read-only.

A page asks for JSON about runs by their ids and listens to a stream of new rows. The id
of a message is `attempt-seq` of its last row, so a page that reconnects goes on behind
it. All queries run in one thread. Text from runs reaches the page as JSON only.
"""

import asyncio
import json
import socket
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from importlib.resources import files
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esper.contracts.errors import EsperError, InvalidInputError
from esper.contracts.messages import one_line
from esper.watch.reading import MAX_POINTS, HeadRow, RunReader, find_by_id, list_runs

ADDRESS: Final = "127.0.0.1"
POLL: Final = 0.25
"""Seconds between two looks at a store that is being streamed."""
HEARTBEAT: Final = 10.0
"""Seconds of silence after which a stream shows that it lives."""
MAX_READERS: Final = 16
"""Maximum number of stores that are open at once."""
MAX_STREAMS: Final = 32
MAX_QUERY: Final = 1_000
TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
UNPLOTTED: Final = ("attempt", "seq", "steps_planned", "steps_taken", "policy_loss")
T = TypeVar("T")
Position = tuple[int, int]
"""Attempt and seq of a row."""


class RequestGuard:
    """Refuses all but GET requests of this page itself, and adds `HEADERS`."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.encode() for host in hosts)
        self._origins = frozenset(b"http://" + host for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        if scope["type"] != "http":  # a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        if refusal := self._refusal(scope):
            code, text = refusal
            more = {"allow": "GET"} if code == 405 else None
            await PlainTextResponse(text, code, more)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        found: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            found.setdefault(name, []).append(value)
        hosts, origins = found.get(b"host", []), found.get(b"origin", [])
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 421, "This server answers to its own address only."
        if len(origins) > 1 or not self._origins.issuperset(origins):
            return 403, "Requests of other pages are refused."
        sites = {*found.get(b"sec-fetch-site", [])}
        if sites - {b"same-origin", b"none"}:
            return 403, "Requests of other pages are refused."
        if scope["method"] != "GET":
            return 405, "Only GET is allowed."
        if len(scope["query_string"]) > MAX_QUERY or len(scope["path"]) > MAX_QUERY:
            return 414, "This address is too long."
        return None


class Runs:
    """Readers of the runs in a folder, all used in one thread."""

    def __init__(self, root: Path, first: str | None = None) -> None:
        self.root, self.first = root, first
        self.streams = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._readers: dict[str, RunReader] = {}

    async def call(self, query: Callable[[], T]) -> T:
        """The result of a query in the thread of the readers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, query)

    async def ask(self, id: str, query: Callable[[RunReader], T]) -> T:
        """The result of a query about one run."""
        return await self.call(lambda: query(self.reader(id)))

    def reader(self, id: str) -> RunReader:
        """The reader of a run, opened again if its store was replaced."""
        known = self._readers.pop(id, None)
        if known is not None and known.replaced:
            known.close()
            known = None
        if known is None:
            while len(self._readers) >= MAX_READERS:  # the one used longest ago
                self._readers.pop(next(iter(self._readers))).close()
            known = RunReader(find_by_id(self.root, id))
        self._readers[id] = known
        return known

    def close(self) -> None:
        """Close all stores."""
        for reader in self._readers.values():
            self._thread.submit(reader.close)
        self._thread.shutdown()


def columns(rows: Sequence[Any], without: Collection[str] = ()) -> dict[str, list[Any]]:
    """Records as one list per field."""
    names = [field.name for field in fields(rows[0])] if rows else []
    return {
        name: [getattr(row, name) for row in rows]
        for name in names
        if name not in without
    }


def by_head(rows: Sequence[HeadRow]) -> dict[str, dict[str, list[Any]]]:
    """Rounds and entropies of each head."""
    found: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        head = found.setdefault(row.head, {"round": [], "entropy": []})
        head["round"].append(row.round)
        head["entropy"].append(row.entropy)
    return found


def plain(value: Any) -> Any:  # noqa: ANN401
    """Values for JSON: null is not measured, and "nan", "inf", "-inf" are strings."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def encoded(value: object) -> str:
    """JSON in ASCII without NaN."""
    try:
        return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    except (RecursionError, ValueError):
        raise InvalidInputError("the values are nested too deeply.") from None


def learning(run: RunReader, after: tuple[int, int] | None = None) -> dict[str, Any]:
    """All of the view of learning, or only the rows behind `after`."""
    with run.snapshot():
        return {
            "state": run.state,
            "overview": run.overview(),
            "rounds": columns(run.rounds(after), without=UNPLOTTED),
            "heads": by_head(run.heads(after)),
            "validation": columns(run.evaluations(after)),
            "notes": run.notes(),
            "events": run.events(),
        }


def curve(run: RunReader) -> dict[str, Any]:
    """What the list of runs shows of one run."""
    rounds = run.rounds()
    return {
        "overview": run.overview(),
        "env_steps": [each.env_steps for each in rounds],
        "mean_return": [each.mean_return for each in rounds],
    }


def host(run: RunReader, task: str, env: int, episode: int | None) -> dict[str, Any]:
    """All of one host in one episode; None: its newest episode."""
    first, last = run.episodes(task, env)
    number = last if episode is None else episode
    where = (task, env, number)
    return {
        "task": task,
        "env": env,
        "episode": number,
        "first": first,
        "last": last,
        "steps": columns(run.steps(*where)),
        "lanes": run.lanes(*where),
        "events": run.events_of(*where),
        "layers": run.layers(*where),
        "decisions": run.decisions(*where),
    }


VIEWS: Final[Mapping[str, Callable[[RunReader], object]]] = {
    "curve": curve,
    "learning": learning,
    "hosts": RunReader.hosts,
    "comparison": RunReader.comparison,
}


def app(root: Path, hosts: Iterable[str], run: str | None = None) -> ASGIApp:
    """The application; `hosts` are the values of the Host header that it answers."""
    runs, assets = Runs(root, run), _assets()

    async def index(request: Request) -> Response:
        return Response(assets["index.html"][0], media_type="text/html")

    async def asset(request: Request) -> Response:
        found = assets.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return Response(found[0], media_type=found[1])

    async def listed(request: Request) -> Response:
        found = await runs.call(lambda: list_runs(root))
        return _json({"runs": found, "first": runs.first, "folder": root.name})

    async def view(request: Request) -> Response:
        query = VIEWS.get(request.path_params["view"])
        if query is None:
            raise HTTPException(404)
        return _json(await runs.ask(request.path_params["id"], query))

    async def one_host(request: Request) -> Response:
        given = request.query_params
        env, episode = _whole(given.get("env")), _whole(given.get("episode"))
        task = given.get("task", "")
        return _json(
            await runs.ask(
                request.path_params["id"],
                lambda reader: host(reader, task, env or 0, episode),
            )
        )

    async def stream(request: Request) -> Response:
        id = request.path_params["id"]
        await runs.ask(id, RunReader.version)  # refuses unknown runs
        if runs.streams >= MAX_STREAMS:
            raise InvalidInputError("too many pages are open. Close one.")
        after = request.query_params.get("after", "")
        seen = _position(request.headers.get("last-event-id", after))
        lines = _updates(runs, id, seen)
        return StreamingResponse(lines, media_type="text/event-stream")

    routes = [
        Route("/", index, methods=["GET"]),
        Route("/static/{name}", asset, methods=["GET"]),
        Route("/api/runs", listed, methods=["GET"]),
        Route("/api/runs/{id}/host", one_host, methods=["GET"]),
        Route("/api/runs/{id}/stream", stream, methods=["GET"]),
        Route("/api/runs/{id}/{view}", view, methods=["GET"]),
    ]
    handlers: Any = {EsperError: _refused, OSError: _refused}
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False
    return RequestGuard(made, hosts)


async def _updates(runs: Runs, id: str, seen: Position) -> AsyncIterator[str]:
    """Messages of a stream, whenever the store or the state of the run changes."""
    known, spoke = None, monotonic()
    runs.streams += 1
    try:
        yield "retry: 1000\n\n"
        while True:
            try:
                found = await runs.ask(id, partial(_look, known=known, seen=seen))
                if found is not None:
                    known, seen, text = found
                    yield f"id: {seen[0]}-{seen[1]}\ndata: {text}\n\n"
            except (EsperError, OSError) as error:
                text = encoded({"state": "damaged", "trouble": one_line(str(error))})
                yield f"event: lost\ndata: {text}\n\n"
                return
            if found is not None:
                spoke = monotonic()
            elif monotonic() - spoke > HEARTBEAT:
                yield ": alive\n\n"
                spoke = monotonic()
            await asyncio.sleep(POLL)
    finally:
        runs.streams -= 1


def _look(
    run: RunReader, known: object, seen: Position
) -> tuple[object, Position, str] | None:
    """What a page that has all rows up to `seen` must get; None: nothing is new.

    With another attempt, or too many rows, the page must `reset`: load all again.
    """
    now = (run.version(), run.state, id(run))
    if now == known:
        return None
    message = learning(run, seen)
    position: Position = message["overview"].position
    many = len(message["rounds"].get("round", ())) >= MAX_POINTS
    message["reset"] = position[0] != seen[0] or many
    return now, position, encoded(message)


def _assets() -> dict[str, tuple[bytes, str]]:
    """All files of the page by name, read once."""
    return {
        file.name: (file.read_bytes(), TYPES[Path(file.name).suffix])
        for file in (files("esper.watch") / "static").iterdir()
        if Path(file.name).suffix in TYPES
    }


def _json(value: object) -> Response:
    return Response(encoded(value), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": one_line(str(error))}, 404)


def _whole(text: str | None) -> int | None:
    """A whole number of at most 15 digits from an address."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise InvalidInputError("env and episode must be whole numbers.")
    return int(text)


def _position(text: str) -> Position:
    """Attempt and seq of a Last-Event-ID."""
    attempt, _, seq = text.partition("-")
    return _whole(attempt or "0") or 0, _whole(seq or "0") or 0


def serve(root: Path, run: str | None, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until a signal; `ready` is called with its address.

    Args:
        root: Folder of the runs.
        run: Id of the run to show first; None: the newest.
        port: 0: any free port.
        ready: Called once the server accepts connections.
    """
    listener = socket.socket()
    try:
        listener.bind((ADDRESS, port))
    except OSError as error:
        raise InvalidInputError(
            f"port {port} cannot be used: {error.strerror}. Choose another --port."
        ) from None
    with listener:
        listener.listen(128)
        port = listener.getsockname()[1]
        hosts = [f"{name}:{port}" for name in (ADDRESS, "localhost")]
        config = uvicorn.Config(
            app(root, hosts, run),
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            ws="none",
            http="h11",
            lifespan="off",
            proxy_headers=False,
            limit_concurrency=128,
            timeout_graceful_shutdown=1,
        )
        ready(f"http://{ADDRESS}:{port}/")
        uvicorn.Server(config).run([listener])
