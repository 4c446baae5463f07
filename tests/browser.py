"""A real browser for tests: the system's own Chromium, without a window.

with open_browser() as browser:
    visit = browse(browser, page, width=390)
    assert not visit.errors
"""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Visit:
    """A page that was opened, and what it did meanwhile."""

    page: object
    requests: list[str] = field(default_factory=list)
    """Addresses that it asked for, its own first."""
    errors: list[str] = field(default_factory=list)
    """What the console said, exceptions and dialogs."""


@contextmanager
def open_browser():
    """Chromium; skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        try:
            yield browser
        finally:
            browser.close()


def browse(browser, file, *, width=1280, dark=False):
    """Open a file in a window of its own; close `visit.page.context` when done."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
    )
    page = context.new_page()
    visit = Visit(page)

    def refuse(dialog):
        visit.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("request", lambda request: visit.requests.append(request.url))
    page.on("console", lambda message: visit.errors.append(message.text))
    page.on("pageerror", lambda error: visit.errors.append(str(error)))
    page.on("dialog", refuse)
    page.goto(file.as_uri(), wait_until="load")
    return visit
