"""A real Chromium on a page that ``viva view`` serves, for tests; and what the page must never do."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IN_CI = bool(os.environ.get("CI"))

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

VIEWPORT = {"width": 1280, "height": 900}

TIMEOUT_MS = 60_000
"""Long, because tests may share a busy machine; nothing waits longer than it has to."""


GO = """place => {
    document.getElementById("main").dataset.ready = "";
    if (location.hash === place) dispatchEvent(new Event("hashchange")); else location.hash = place;
}"""


class Drawn:
    """A page of ours; `show` goes to an address on it and waits until it is drawn."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def show(self, place: str) -> Page:
        self.page.evaluate(GO, f"#/{place}")
        drawn = "wanted => document.getElementById('main').dataset.ready === wanted"
        self.page.wait_for_function(drawn, arg=place.partition("?")[0])
        return self.page

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]


@contextmanager
def served(*runs: Path, port: int = 0, state: Path | None = None) -> Iterator[str]:
    """The address of a server of its own process, which keeps its token in a folder of its own, or in this one."""
    command = [sys.executable, "-m", "viva.cli", "view", *map(str, runs), "--port", str(port)]
    with TemporaryDirectory() as own:
        environment = os.environ | {"XDG_STATE_HOME": str(state or own)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().strip()
            finally:
                process.terminate()


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page that keeps what went wrong in it as ``page.mistakes`` and foreign requests as ``page.strangers``."""
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, headless=True, args=ARGUMENTS, viewport=VIEWPORT
        )
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.mistakes = []
        page.strangers = []
        page.on("pageerror", lambda error: page.mistakes.append(str(error)))
        page.on(
            "console", lambda message: page.mistakes.append(message.text) if message.type == "error" else None
        )
        page.on("dialog", lambda dialog: (page.mistakes.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on(
            "request", lambda request: page.strangers.append(request.url) if is_foreign(request.url) else None
        )
        yield page
        context.close()


def is_foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "about:", "data:"))
