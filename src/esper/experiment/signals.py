"""Signals that ask a run to end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def listening() -> Iterator[list[int]]:
    """Signals that ask for an end, as they come; the second one is not waited for."""
    heard: list[int] = []
    if current_thread() is not main_thread():  # only there can signals be heard
        yield heard
        return

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    wanted = [kind for kind in kinds if before[kind] is not signal.SIG_IGN]  # nohup
    for kind in wanted:
        signal.signal(kind, hear)
    try:
        yield heard
    finally:
        for kind in wanted:
            signal.signal(kind, before[kind])
