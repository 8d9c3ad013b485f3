"""Runs to look at, made up: every kind of piece that a page can show."""

import json
import math
import re
from pathlib import Path
from typing import Any

HOSTILE = "<script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">\u202e\x1b[31m"


def metrics_row(step: int, shift: float = 0.0) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    return {
        "step": step,
        "test/direct_accuracy": 0.4 + 0.01 * step + shift,
        "test/direct_accuracy_stderr": 0.02,
        "reward/mean": math.cos(step),
        "optim/loss": math.sin(step),
        "judge/tie_rate": 0.5 / (step + 1),
        "judge/ranking/tie_rate": 0.25,
        "judge/verdict/tie_rate": 0.125,
        "experts/iid/mean_weight": 1.0,
        "experts/feedback/mean_weight": 0.5,
        "time/step": 1.5,
    }


def turn(
    agent_id: int, round_index: int, segment: str, response: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    """One turn of a conversation."""
    prompt = f"Problem:\n> How many?\nYou are agent {agent_id}."
    said = {"agent_id": agent_id, "round_index": round_index, "segment": segment, "lane": 0, "prompt": prompt}
    return {**said, "text": f"{segment} of agent {agent_id}", "response": response, "status": "ok", **changes}


def turns() -> list[dict[str, Any]]:
    """Three agents propose, rank and criticise; each sees all proposals, and the last one revises."""
    solutions = ["first: 12", "second: 9", "third: 10"]
    shown = "Problem:\n> How many?\n" + "".join(f"Solution:\n> {text}\n" for text in solutions)
    rankings = [[(1, 2)], [(2, 0)], [(0, 1)]]
    made = [turn(agent, 0, "proposal", {"solution": text}) for agent, text in enumerate(solutions)]
    for agent, votes in enumerate(rankings):
        preferences = [{"winner": one, "loser": other} for one, other in votes]
        made.append(
            turn(agent, 1, "ranking", {"preferences": preferences, "dropped": {"own": 1}}, prompt=shown)
        )
        target = (agent + 1) % 3
        critique = {"target": target, "text": f"agent {target} is off by one", "start": 0, "stop": 20}
        said = {"critiques": [critique], "dropped": {}}
        made.append(turn(agent, 1, "critique", said, lane=1, prompt=shown))
    revised = {"solution": "third again: 10", "decision": "defend"}
    own = "Problem:\n> How many?\nYour solution:\n> third: 10\nCritique of it:\n> agent 2 is off by one\n"
    return [*made, turn(2, 2, "revision", revised, prompt=own)]


def transcript(step: int, group: int, **changes: Any) -> dict[str, Any]:
    """One line of transcripts.jsonl."""
    outcomes = {(0, 1): "A", (1, 0): "A", (1, 2): "A", (2, 1): "B", (2, 0): "A", (0, 2): "B"}
    record: dict[str, Any] = {
        "question": f"How many pens are in box {step}-{group}?",
        "answer": "10",
        "judge_answer": None,
        "protocol": "critique_self_play",
        "system_prompt": "You solve problems together.",
        "judge": {"system_prompt": "You compare two solutions.", "prefill": "{"},
        "num_agents": 3,
        "max_rounds": 3,
        "turns": turns(),
        "failures": [],
        "comparisons": [
            {"agent_id": None, "first": a, "second": b, "outcome": outcome, "score": -0.5, "text": ""}
            | {"prompt": f"Problem:\n> pens\nSolution A:\n> of agent {a}"}
            for (a, b), outcome in outcomes.items()
        ],
        "rules": {"fit": "joint"},
        "scores": {
            "initial": {"0": 0.25, "1": 0.25, "2": 0.75},
            "final": {"0": 0.5, "1": 0.125, "2": 0.875},
            "initial_error": {"0": 0.1, "1": 0.1, "2": 0.1},
            "final_error": {"0": 0.05, "1": 0.05, "2": 0.05},
        },
        "streams": {
            str(a): {"r_sol": 0.5 * a, "r_meta": None, "r_diag": 0.125, "total": 0.5 * a + 0.125}
            for a in range(3)
        },
        "rewards": {"0": -0.5, "1": 0.25, "2": 1.0 + step},
        "correct": {"0": False, "1": group % 2 == 0, "2": True},
        "correct_initial": {"0": False, "1": False, "2": True},
    }
    row: dict[str, Any] = {
        "step": step,
        "group": group,
        "void": False,
        "void_reason": None,
        "tags": ["arithmetic"],
    }
    row |= {"strategy": "feedback" if group % 3 == 2 else None, "failures": [], "record": record}
    for key, value in changes.items():
        (record if key in record else row)[key] = value
    return row


def tokens(step: int, group: int, **changes: Any) -> dict[str, Any]:
    """One line of tokens.jsonl: agent 0's proposal with a stream, its critique in another, and a swapped sample."""

    def turn_of(seat: int, place: int, **values: Any) -> dict[str, Any]:
        given = {"seat": seat, "turn": place, "ids": [11, 12, 13], "pieces": ["first", ": ", "12\n"]}
        given |= {
            "sampling": [-0.5, -0.25, -1.0],
            "training": [-0.5, -0.5, None],
            "anchor": [-0.5, -0.25, -1.0],
        }
        given |= {"weights": [1.0, 1.0, None], "mask": [1, 1, 0], "advantages": [0.5, 0.5, 0.0]}
        given |= {"spans": [{"start": 0, "stop": 2, "stream": "r_sol", "reward": 0.75}]}
        return given | {"sampled_in": None, "trained_in": None} | values

    swapped = {"sampled_in": "Problem and a hint", "trained_in": "Problem alone"}
    other = [{"start": 1, "stop": 3, "stream": "r_diag", "reward": -1.0}]
    made = [
        turn_of(0, 0),
        turn_of(1, 0, spans=other, advantages=[0.0, -0.25, -0.25], mask=[0, 1, 1], **swapped),
    ]
    return {"step": step, "group": group, "strategy": "feedback", "turns": made} | changes


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append lines as training does."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def answers_of(page: str) -> dict[str, Any]:
    """What a report holds for its page to ask."""
    (text,) = re.findall('<script type="application/json" id="answers">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)
