import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from reviews import NUM_CONVERSATIONS, play
from view_runs import metrics_row, tokens, transcript, write_lines

from viva.rewards.review import review_rules

MakeRun = Callable[..., Path]
MakeLine = Callable[..., dict[str, Any]]


@pytest.fixture
def make_review_run(tmp_path: Path) -> MakeRun:
    """Writes the transcripts of a few conversations, played as by a run with a preset."""

    def make(preset: str, *, agents_compare: bool = False, extra: list[dict[str, Any]] | None = None) -> Path:
        lines = [
            {"step": number // 2, "group": number % 2, "void": False, "record": record}
            for number in range(NUM_CONVERSATIONS)
            for record in [play(f"What is 1 * {number}?", number, preset, agents_compare=agents_compare)]
        ]
        folder = tmp_path / f"{preset}-{agents_compare}"
        folder.mkdir()
        text = "".join(json.dumps(line) + "\n" for line in [*lines, *(extra or [])])
        (folder / "transcripts.jsonl").write_text(text)
        return folder

    return make


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


NUM_STEPS = 30


def noisy_row(step: int, noise: random.Random) -> dict[str, Any]:
    """One line of metrics.jsonl: a slow rise with noise; held-out accuracy every fifth step."""
    rise = 1 - math.exp(-step / 12)
    rewards = {f"agent_{a}/reward": (a - 1) * 0.1 * rise + noise.gauss(0, 0.03) for a in range(3)}
    row: dict[str, Any] = {
        "step": step,
        **rewards,
        **{f"agent_{a}/win_rate": 0.5 + rewards[f"agent_{a}/reward"] / 2 for a in range(3)},
        "reward/mean": noise.gauss(0, 0.01),
        "reward/std": 0.4 + 0.05 * rise,
        "reward/max": 1.0,
        "reward/min": -1.0,
        "judge/preference_A_rate": 0.48 - 0.1 * rise,
        "judge/preference_B_rate": 0.40 + 0.1 * rise,
        "judge/tie_rate": 0.12,
        "judge/position_bias": 0.3 - 0.2 * rise + noise.gauss(0, 0.02),
        "judge/accuracy": 0.72 + 0.1 * rise + noise.gauss(0, 0.02),
        "correct/first": 0.41 + 0.15 * rise + noise.gauss(0, 0.02),
        "correct/final": 0.46 + 0.18 * rise + noise.gauss(0, 0.02),
        "parse/ok": 0.9 + 0.08 * rise,
        "parse/repaired": 0.06 - 0.05 * rise,
        "parse/unstructured": 0.04 - 0.03 * rise,
        "optim/lr": 3e-4,
        "optim/kl_sample_train_v1": abs(noise.gauss(0, 1e-6)),
        "time/total": 8.2 + noise.gauss(0, 0.3),
    }
    if step % 5 == 0:
        row["test/direct_accuracy"] = 0.41 + 0.17 * rise + noise.gauss(0, 0.01)
        row["test/direct_accuracy_stderr"] = 0.022
    return row


def turn(agent_id: int, round_index: int, solution: str, **changes: Any) -> dict[str, Any]:
    """One turn of a recorded conversation."""
    return {
        "agent_id": agent_id,
        "round_index": round_index,
        "prompt": f"Problem:\n> How many?\nYou are agent {agent_id}.",
        "text": json.dumps({"solution": solution}),
        "response": {
            "reflection": f"Agent {(agent_id + 1) % 3} added before it multiplied.",
            "evaluation": "The others forgot the two pens that were lost on the way home.",
            "solution": solution,
        },
        "status": "ok",
        **changes,
    }


def tournament(step: int, group: int, **changes: Any) -> dict[str, Any]:
    """One line of transcripts.jsonl: three agents, two rounds, all pairs in both orders."""
    record = {
        "question": "Mia has 3 boxes with 4 pens each and loses 2 pens. How many pens does she have?",
        "answer": "10",
        "num_agents": 3,
        "max_rounds": 2,
        "turns": [
            turn(a, r, f"3 * 4 = 12\n12 - 2 = {10 + a - r * a}\n\\boxed{{{10 + a - r * a}}}")
            for r in range(2)
            for a in range(3)
        ],
        "failures": [],
        "comparisons": [
            {
                "first": first,
                "second": second,
                "outcome": "A" if first != 2 else "B",
                "score": -0.5 if first != 2 else 0.3,
                "text": "",
                "probabilities": [0.7, 0.2, 0.1] if first != 2 else [0.3, 0.6, 0.1],
                "off_set_mass": 0.02,
            }
            for first in range(3)
            for second in range(3)
            if first != second
        ],
        "rewards": {"0": 0.55, "1": -0.15, "2": -0.4},
        "correct": {"0": True, "1": group % 2 == 0, "2": step > 10},
    }
    row = {
        "step": step,
        "group": group,
        "void": False,
        "tags": ["arithmetic"],
        "rewards": [0.55, -0.15, -0.4],
        "record": record,
    }
    for key, value in changes.items():
        (record if key in record else row)[key] = value
    return row


def reply(
    agent_id: int, round_index: int, segment: str, response: dict[str, Any], lane: int = 0
) -> dict[str, Any]:
    """One turn of a conversation of critique self-play."""
    return {
        "agent_id": agent_id,
        "round_index": round_index,
        "segment": segment,
        "lane": lane,
        "prompt": f"Problem:\n> How many?\nYou are agent {agent_id}.",
        "text": f"{segment} of {agent_id}",
        "response": response,
        "status": "ok",
    }


def critique_turns() -> list[dict[str, Any]]:
    """Three agents, four rounds: 0 is mended, 1 defends a wrong solution, 2 is right all the time and says little."""
    win, tie = (lambda a, b: {"winner": a, "loser": b}), (lambda a, b: {"first": a, "second": b})
    before = [[win(2, 1)], [tie(0, 2)], []]
    after = [[win(2, 1)], [win(2, 0)], [win(0, 1)]]
    critiques = [
        [{"target": 1, "text": "The sum of agent 1 is off by one.", "start": 0, "stop": 40}],
        [{"target": 0, "text": "Two pens were lost.", "start": 3, "stop": 33}],
        [],
    ]
    rounds = [
        [("proposal", [{"solution": text} for text in ("12", "9", "10")])],
        [
            ("ranking", [{"preferences": votes, "dropped": {}} for votes in before]),
            (
                "critique",
                [{"critiques": said, "dropped": {"own": 1} if not said else {}} for said in critiques],
            ),
        ],
        [
            (
                "revision",
                [
                    {"solution": text, "decision": decision}
                    for text, decision in (("10", "revise"), ("9", "defend"), ("10", "unstated"))
                ],
            )
        ],
        [("verdict", [{"preferences": votes, "dropped": {}} for votes in after])],
    ]
    return [
        reply(agent, round_index, segment, replies[agent], lane)
        for round_index, segments in enumerate(rounds)
        for agent in range(3)
        for lane, (segment, replies) in enumerate(segments)
    ]


def critique_transcript(step: int, group: int, **changes: Any) -> dict[str, Any]:
    """One line of transcripts.jsonl: critique self-play by three agents."""
    record = {
        "question": "Mia has 3 boxes with 4 pens each and loses 2 pens. How many pens does she have?",
        "answer": "10",
        "protocol": "critique_self_play",
        "num_agents": 3,
        "max_rounds": 4,
        "turns": critique_turns(),
        "failures": [],
        "comparisons": [
            {
                "agent_id": agent,
                "first": first,
                "second": 1 - first,
                "outcome": outcome,
                "score": score,
                "text": "",
                "probabilities": None,
                "off_set_mass": 0.01,
            }
            for agent, first, outcome, score in (
                (0, 0, "B", 0.75),
                (0, 1, "A", -0.5),
                (1, 0, "A", -0.125),
                (1, 1, "A", -0.25),
            )
        ],
        "rules": asdict(review_rules("robust")),
        "scores": {
            "initial": {"0": 0.3125, "1": 0.25, "2": 0.75},
            "final": {"0": 0.828125, "1": 0.1875, "2": 0.78125},
            "initial_error": {"0": 0.21, "1": 0.22, "2": 0.23},
            "final_error": {"0": 0.18, "1": 0.17, "2": 0.19},
        },
        "streams": {
            "0": {"r_sol": 0.57, "r_meta": 1.0, "r_diag": 0.0, "total": 1.57},
            "1": {"r_sol": 0.22, "r_meta": 0.5, "r_diag": 0.515625, "total": 1.75125},
            "2": {"r_sol": 0.765, "r_meta": None, "r_diag": 0.0, "total": 0.765},
        },
        "rewards": {"0": 1.57, "1": 1.75125, "2": 0.765},
        "correct": {"0": True, "1": False, "2": True},
        "correct_initial": {"0": False, "1": False, "2": True},
    }
    row = {"step": step, "group": group, "void": False, "tags": ["arithmetic"], "record": record}
    for key, value in changes.items():
        (record if key in record else row)[key] = value
    return row


@pytest.fixture(name="turn")
def turn_fixture() -> MakeLine:
    """Makes one turn; see `turn`."""
    return turn


@pytest.fixture(name="transcript")
def transcript_fixture() -> MakeLine:
    """Makes one line of transcripts.jsonl; see `tournament`."""
    return tournament


@pytest.fixture(name="critique_transcript")
def critique_transcript_fixture() -> MakeLine:
    """Makes one line of transcripts.jsonl; see `critique_transcript`."""
    return critique_transcript


@pytest.fixture
def make_finished_run(tmp_path: Path) -> MakeRun:
    """Writes the folder of a run of 30 steps as training leaves it. A piece can be replaced, or be ``None``."""

    def make(
        *, metrics: Any = ..., transcripts: Any = ..., config: Any = ..., name: str = "arithmetic-3-agents"
    ) -> Path:
        noise = random.Random(7)
        if metrics is ...:
            metrics = [noisy_row(step, noise) for step in range(NUM_STEPS + 1)]
        if transcripts is ...:
            transcripts = [tournament(step, group) for step in range(NUM_STEPS) for group in range(2)]
            transcripts[11] = tournament(
                5,
                1,
                turns=[turn(0, 0, "12"), turn(2, 0, "It is ten.", status="unstructured", text="It is ten.")],
                failures=[{"agent_id": 1, "round_index": 0, "reason": "TimeoutError: no reply within 60 s"}],
                void=True,
                rewards={},
                correct=None,
                comparisons=[],
            )
        if config is ...:
            config = {"model_name": "tiny", "num_agents": 3, "max_rounds": 2, "learning_rate": None}
        folder = tmp_path / name
        folder.mkdir()
        for file, rows in (("metrics.jsonl", metrics), ("transcripts.jsonl", transcripts)):
            if rows is not None:
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (folder / file).write_text(text, encoding="utf-8")
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    return make
