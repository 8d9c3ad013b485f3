"""Everything on the page can be done by keyboard alone: a record of it stands in docs/view_keyboard.md."""

from pathlib import Path

import pytest
from browser import CHROMIUM, IN_CI, chromium, served
from keyboard_walk import make_runs, record_of

RECORD = Path(__file__).parents[2] / "docs" / "view_keyboard.md"


@pytest.mark.skipif(
    CHROMIUM is None and not IN_CI, reason="no chromium on the PATH (apt-get install chromium)"
)
def test_a_walk_by_keyboard_alone_sees_what_the_record_says(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    with served(*runs) as address, chromium(tmp_path / "profile") as page:
        record = record_of(page, address)
        assert page.mistakes == []
        assert page.strangers == []
    assert record == RECORD.read_text(encoding="utf-8"), (
        "python tests/helpers/keyboard_walk.py > docs/view_keyboard.md"
    )
