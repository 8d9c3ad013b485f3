"""Rewards for stored conversations by a judge that is asked anew."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reviews import NUM_CONVERSATIONS, RENDERER, next_token, script

from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.judging.records import ConversationRecord
from viva.rewards import find_reward
from viva.rewards.base import Models
from viva.testing import ScriptedSamplingClient
from viva.view.rescore import RescoreOptions, named_rewards, rescore, rescore_with
from viva.view.rescoring import Rescoring

MakeRun = Callable[..., Path]


def by_stream(result: Rescoring) -> dict[str, Any]:
    return {change.stream: change for change in result.streams}


def judge_that(script: Callable[[str, int], str] = script) -> tuple[Models, ScriptedSamplingClient]:
    """A judge that prefers by the words alone, and answers by a script."""
    client = ScriptedSamplingClient(renderer=RENDERER, script=script, next_token=next_token)
    return Models(judge=PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER)), client


def asked(folder: Path, models: Models, **options: Any) -> Rescoring:
    chosen = RescoreOptions(**options)
    return asyncio.run(rescore_with(folder, chosen, named_rewards(chosen), models))


def test_the_judge_that_paid_pays_the_same_when_it_is_asked_anew(make_review_run: MakeRun) -> None:
    robust, paper = make_review_run("robust"), make_review_run("paper")
    models, client = judge_that()
    for folder in (robust, paper):  # the same was said in both
        result = asked(folder, models, preset="robust")
        paid = rescore(robust, RescoreOptions()).rewards["total"]
        assert [new for _, new, _ in result.rewards["total"]] == [old for old, _, _ in paid]
    assert client.prompts
    before = len(client.prompts)
    asked(paper, models, reward="r_sol")  # by the rules of that run, which fit separately
    assert len(client.prompts) == before


def test_a_judge_of_its_own_opinion_changes_what_the_old_one_said(make_review_run: MakeRun) -> None:
    folder = make_review_run("robust")
    client = ScriptedSamplingClient(renderer=RENDERER, next_token=lambda prompt: {"A": 0.5, "B": 0.5})
    even = Models(judge=PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER))
    changed = by_stream(asked(folder, even, reward="r_sol"))["total"]
    assert changed.means[1] != by_stream(rescore(folder, RescoreOptions(reward="r_sol")))["total"].means[1]


def test_all_rewards_with_a_judge_are_what_each_is_alone_and_nothing_is_asked_twice(
    make_review_run: MakeRun,
) -> None:
    folder = make_review_run("robust")
    models, client = judge_that(lambda prompt, call: "1")
    result = asked(folder, models, reward="all")
    assert set(result.unpaid) >= {"log_probability", "peer_prediction"}
    assert {"tournament", "serl", "judge_answer"}.isdisjoint(result.unpaid)
    compared: dict[str, int] = {}
    for name in ("tournament", "serl", "judge_answer", "comas"):
        fresh, alone = judge_that(lambda prompt, call: "1")
        assert result.rewards[name] == asked(folder, fresh, reward=name).rewards["total"]
        compared[name] = sum(prompt.endswith(VERDICT_PREFIX) for prompt in alone.prompts)
    number = sum(prompt.endswith(VERDICT_PREFIX) for prompt in client.prompts)
    assert compared["tournament"] <= number <= compared["tournament"] + compared["comas"]
    assert number < sum(compared.values())
    order = [record["question"] for record in records_of(folder)]
    assert order == [f"What is 1 * {number}?" for number in range(NUM_CONVERSATIONS)]
    paid = [old for old, _, _ in result.rewards["tournament"]]
    assert paid == [{int(a): r for a, r in record["rewards"].items()} for record in records_of(folder)]


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["record"] for line in (folder / "transcripts.jsonl").read_text().splitlines()]


def test_the_first_conversation_that_a_judge_fails_on_is_named_and_none_is_paid(
    make_review_run: MakeRun,
) -> None:
    folder = make_review_run("robust")

    def fails(prompt: str) -> dict[str, float]:
        if any(f"1 * {number}?" in prompt for number in (2, 4)):
            raise ValueError("the prompt is too long")
        return {"A": 0.5, "B": 0.4}

    client = ScriptedSamplingClient(renderer=RENDERER, next_token=fails)
    models = Models(judge=PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER))
    with pytest.raises(ValueError, match=r"transcripts\.jsonl:3: the prompt is too long"):
        asked(folder, models, reward="tournament")
    result = asked(folder, models, reward="all")
    assert NUM_CONVERSATIONS - 2 <= len(result.rewards["tournament"]) < NUM_CONVERSATIONS
    assert result.unpaid["tournament"] == "the prompt is too long"


def test_a_plain_sample_is_judged_behind_the_system_prompt_of_the_run_and_a_conversation_is_not() -> None:
    turns = [
        {"agent_id": agent, "round_index": 0, "prompt": "", "text": text, "response": {"solution": text}}
        | {"status": "ok"}
        for agent, text in enumerate(["1", "2"])
    ]
    for protocol, is_shown in (("problem", True), ("round_robin", False)):
        record = ConversationRecord.model_validate(
            {"question": "How many?", "protocol": protocol, "num_agents": 2, "turns": turns}
        )
        models, client = judge_that(lambda prompt, call: "2")
        models = models._replace(system_prompt="Be short.")
        pay = asyncio.run(find_reward("judge_answer").stored_pay(record, 0, models))
        assert pay == {0: 0.0, 1: 1.0}
        (prompt,) = client.prompts
        assert ("Be short." in prompt) == is_shown
