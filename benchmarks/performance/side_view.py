"""How soon ``viva view`` shows a run of many conversations, see ``view_paint.py``.

Settings: ``conversations``, and ``model``, whose folder holds the run, too: it goes when the measuring is over.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from channel import serve

sys.path.append(str(Path(__file__).parent.parent))


def make(settings: Mapping[str, Any]) -> Callable[[int], dict[str, float]]:
    from playwright.sync_api import sync_playwright
    from view_paint import make_run, measure

    folder = Path(settings["model"]) / "run"
    folder.mkdir()
    make_run(folder, settings["conversations"])

    def step(number: int) -> dict[str, float]:
        with sync_playwright() as playwright:
            found, memory, _ = measure(folder, playwright)
        return {title: seconds for title, (seconds, _) in found.items()} | {"server memory, MB": memory}

    return step


if __name__ == "__main__":
    serve(make, ("playwright", "starlette", "uvicorn"))
