"""docs/view.md says what the page does."""

import re
from pathlib import Path

from viva.run.files import LOG_FILES

ROOT = Path(__file__).resolve().parents[2]
PAGE = " ".join((ROOT / "docs" / "view.md").read_text(encoding="utf-8").split())
STATIC = ROOT / "src" / "viva" / "view" / "static"


def test_every_key_of_the_help_is_on_the_page() -> None:
    script = (STATIC / "app.js").read_text(encoding="utf-8")
    keys = script[script.index("const KEYS") : script.index("];", script.index("const KEYS"))]
    for row in re.findall(r'^  \["([^"]+)"', keys, re.MULTILINE):
        for key in row.split():
            assert f"`{key}`" in PAGE, key


def test_every_file_that_a_run_appends_to_is_on_the_page_or_is_for_other_commands() -> None:
    assert {name for name in LOG_FILES if f"`{name}`" not in PAGE} == {"samples.jsonl"}
