"""Tokens in the report: shaded by what they earned, with their numbers; hidden parts are named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from viva.view.credit import credit_html
from viva.view.page import write_report
from viva.view.run_files import read_run, read_tokens
from viva.view.token_turns import token_payload

MakeRun = Callable[..., Path]
MakeLine = Callable[..., dict[str, Any]]


def tokens_row(**changes: Any) -> dict[str, Any]:
    turn = {
        "seat": 0,
        "turn": 0,
        "ids": [5, 6, 7],
        "pieces": ["a ", "<b>", "\n"],
        "sampling": [-0.5, -0.25, -1.0],
    }
    turn |= {"training": [-0.5, -0.5, None], "anchor": None, "weights": None, "mask": [1, 1, 0]}
    turn |= {"advantages": [0.5, -0.25, 0.0], "sampled_in": None, "trained_in": None}
    turn |= {"spans": [{"start": 0, "stop": 1, "stream": "r_sol", "reward": 0.75}]}
    return {"step": 3, "group": 1, "strategy": "iid", "turns": [turn | changes]}


def test_every_token_has_its_shade_and_its_numbers() -> None:
    html = credit_html(token_payload(tokens_row(), None), "streams")
    assert '<span class="ap5 t1" title="id 5, advantage 0.5, sampling logprob -0.5' in html
    assert "ratio 0.7788, weight 1, mask 1" in html
    assert '<span class="an3" title="id 6' in html
    assert '<span class="a0 masked" title="id 7' in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_swapped_contexts_stand_side_by_side() -> None:
    html = credit_html(
        token_payload(tokens_row(sampled_in="with a hint", trained_in="bare"), None), "streams"
    )
    assert (
        html.index("Sampled in") < html.index("with a hint") < html.index("Trained in") < html.index("bare")
    )


@pytest.mark.parametrize("name", ["pieces", "sampling", "mask", "advantages"])
def test_a_turn_without_one_value_per_token_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="one value per token"):
        token_payload(tokens_row(**{name: ["a"] if name == "pieces" else [1]}), None)


def test_the_report_shows_kept_tokens_and_what_was_hidden(
    make_run: MakeRun, critique_transcript: MakeLine
) -> None:
    folder = make_run(
        transcripts=[critique_transcript(step, group) for step in range(5) for group in range(3)]
    )
    (folder / "tokens.jsonl").write_text(json.dumps(tokens_row()) + '\n{"step": 4, "gro')
    page = write_report(folder).read_text(encoding="utf-8")
    assert "The last conversation whose tokens were kept" in page
    assert page.count('<div class="credit">') == 1
    assert "agent 0, round 1: proposal" in page
    assert re.search(
        r'<li><s><a href="#run-0-\d+-\d+-turn-\d+">ranking by agent 1 \(round 2\)</a></s></li>', page
    )
    run = read_run(folder)
    assert run.torn == ("tokens.jsonl",)
    assert (read_tokens(run, 3, 1), read_tokens(run, 0, 0)) == (tokens_row(), None)
