import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from view_runs import metrics_row, tokens, transcript, write_lines

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run's folder of some steps with four conversations each, tokens of the first of every step."""

    def make(
        name: str = "run-a",
        *,
        steps: int = 6,
        shift: float = 0.0,
        transcripts: list[dict[str, Any]] | None = None,
        token_rows: list[dict[str, Any]] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if transcripts is None:
            transcripts = [transcript(step, group) for step in range(steps) for group in range(4)]
        if token_rows is None:
            token_rows = [tokens(step, 0) for step in range(steps)]
        (folder / "config.json").write_text(json.dumps({"model_name": "tiny", "seed": 0 if not shift else 1}))
        write_lines(folder / "metrics.jsonl", [metrics_row(step, shift) for step in range(steps)])
        write_lines(folder / "transcripts.jsonl", transcripts)
        write_lines(folder / "tokens.jsonl", token_rows)
        return folder

    return make
