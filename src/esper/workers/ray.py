"""Workers on a Ray cluster, which is started here or joined.

Every job is a Ray task. The shared value is sent once, through the object store. A task
that is late is cancelled by force, which kills its process.

A cluster executes any code that it receives, so it must require a token
(https://docs.ray.io/en/latest/ray-security/token-auth.html). A cluster that is started
here listens on the loopback interface only, with its own token and no dashboard.
"""

import hashlib
import logging
import os
import platform
import secrets
import signal
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Final

import esper
from esper import kernels
from esper.contracts.errors import EsperError, InvalidInputError, WorkersError
from esper.contracts.messages import one_line, quoted
from esper.workers.jobs import (
    DEADLINE,
    POLL_SECONDS,
    START_SECONDS,
    TRIES,
    JobFailed,
    Pool,
    do_job,
)

LOCAL: Final = "local"
"""The address that starts a cluster on this machine."""
LOOPBACK: Final = ("127.0.0.1", "::1")
"""Node addresses for which all servers of Ray listen on the loopback interface."""
STORE_BYTES: Final = 256 << 20
"""Size of the object store of a local cluster."""
LOCAL_ENVIRONMENT: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine is slow.
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_niceness": "0",
    # Ray's default on macOS and Windows: the address of a node is one of LOOPBACK.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment of a local cluster. Ray reads it when it is imported."""


class RayWorkers(Pool[Any]):
    """Workers of a Ray cluster; "local" starts one here. With count 0, one per core."""

    def __init__(
        self, count: int, address: str = LOCAL, deadline: float = DEADLINE
    ) -> None:
        self._ray = _connected(address, count)
        found = int(self._ray.cluster_resources().get("CPU", 0))
        super().__init__(count or found, deadline)
        self._do = self._ray.remote(num_cpus=1, max_retries=0)(do_checked_job)
        self._mine, self._done = versions(), 0

    def _share(self, shared: bytes) -> object:
        try:
            return self._ray.put(shared)
        except self._ray.exceptions.RayError as error:
            raise self._error(error) from error

    def _submit(
        self, function: Callable[..., Any], shared: object, job: bytes
    ) -> tuple[Any, float]:
        # Ray starts a process for each of the first jobs and after a failure.
        more = START_SECONDS if self._done < self.count else 0.0
        return self._do.remote(self._mine, function, shared, job), more

    def _ended(self, handles: Collection[Any]) -> Sequence[Any]:
        try:
            ended: list[Any] = self._ray.wait([*handles], timeout=POLL_SECONDS)[0]
        except self._ray.exceptions.RayError as error:
            raise self._error(error) from error
        return ended

    def _result(self, handle: Any) -> bytes:  # noqa: ANN401
        errors = self._ray.exceptions
        try:
            result: bytes = self._ray.get(handle)
        except errors.RayTaskError as error:
            if isinstance(error.cause, EsperError):
                raise error.cause from None
            kind = type(error.cause).__name__
            raise JobFailed(f"{kind}: {error.cause}") from error
        except errors.RayError as error:
            self._done = 0
            first = str(error).partition("\n")[0]
            raise JobFailed(f"{type(error).__name__}: {first}") from error
        self._done += 1
        return result

    def _abandon(self, handle: Any) -> None:  # noqa: ANN401
        self._done = 0
        self._ray.cancel(handle, force=True)

    def close(self) -> None:
        """End a local cluster; leave any other."""
        self._ray.shutdown()

    def _error(self, error: Exception) -> WorkersError:
        first = str(error).partition("\n")[0]
        return WorkersError(one_line(f"Ray: {type(error).__name__}: {first}"))


def _connected(address: str, count: int) -> Any:  # noqa: ANN401
    """The module `ray`, connected to a cluster."""
    # Ray prints messages about dead workers to the standard output.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    if address == LOCAL:
        for name, value in LOCAL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    _require_token()
    try:
        ray = import_module("ray")
    except ImportError:
        raise InvalidInputError("Ray is not installed: pip install '.[ray]'.") from None
    if address == LOCAL and (found := ray.util.get_node_ip_address()) not in LOOPBACK:
        raise InvalidInputError(
            f"Ray would use the address {quoted(found)}, which other machines can "
            "reach. Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before Ray is imported."
        )
    own = {
        "num_cpus": count or None,
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }
    last, in_main = None, current_thread() is main_thread()
    terminated = signal.getsignal(signal.SIGTERM)  # Ray sets a handler of its own
    for _ in range(TRIES if address == LOCAL else 1):  # a start may time out
        try:
            ray.init(
                address=address,
                namespace="esper",
                logging_level=logging.CRITICAL,
                log_to_driver=False,
                **(own if address == LOCAL else {}),
            )
            if in_main:
                signal.signal(signal.SIGTERM, terminated)
            return ray
        except Exception as error:  # Ray raises many classes
            last = error
            ray.shutdown()
    first = str(last).partition("\n")[0]
    text = f"Ray at {quoted(address)} cannot be reached: {first}"
    raise WorkersError(one_line(text)) from last


def _require_token() -> None:
    """Refuse if this process, driver or node, requires no token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise InvalidInputError(
            f"{platform.node()}: without a token, anyone who reaches the cluster can "
            "run code. Set RAY_AUTH_MODE=token on every node and where Esper starts."
        )


@cache
def versions() -> dict[str, str]:
    """Versions of Esper's sources and of all that they use."""
    sources = hashlib.sha256()
    package = Path(esper.__file__).parent
    for file in sorted(package.rglob("*.py")):
        sources.update(f"{file.relative_to(package)}\n".encode())
        sources.update(file.read_bytes())
    about = f"{esper.__version__}, sources {sources.hexdigest()[:12]}"
    return {"esper": about, **kernels.versions()}


def do_checked_job(
    expected: dict[str, str], function: Callable[..., Any], shared: bytes, job: bytes
) -> bytes:
    """Run a job, if this node gives the same result as the driver would."""
    _require_token()
    for name, version in versions().items():
        if expected[name] != version:
            raise InvalidInputError(
                f"node {platform.node()} has {name} {quoted(version)}, this machine "
                f"has {quoted(expected[name])}; install the same on both."
            )
    return do_job(function, shared, job)
