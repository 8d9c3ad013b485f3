"""Asking and playing on a scripted engine: what is counted, what is wrong, and what equal tokens mean."""

import asyncio
import re

import pytest
from conversation_groups import round_robin_group

from viva.eval.conversations import ConversationKind, play_all
from viva.eval.direct import DirectEvaluator, DirectSampler, ask_all, match_tokens
from viva.eval.figures import ladder_figures
from viva.eval.records import WRONG
from viva.judging.answers import CHECKS, AnswerCheck
from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.testing import (
    ScriptedReply,
    ScriptedSamplingClient,
    crashing,
    honest,
    malformed,
    tiny_renderer,
    turn_of,
)
from viva.training.data import PromptItem
from viva.training.sampling import Sampling

RENDERER = tiny_renderer()
ITEMS = [PromptItem(question=f"What is {n} + 1?", answer=str(n + 1)) for n in range(3)]
RIGHT, WRONG_TEXT = "The answer is {}.", "The answer is 999."


def truth(prompt):
    return str(int(re.search(r"What is (\d+) \+ 1", prompt)[1]) + 1)


def client(turns=None, direct=RIGHT):
    """Agents say what `turns` gives for (agent, round), asked directly they say `direct`; the judge knows the truth."""

    def script(prompt, call):
        right = truth(prompt)
        if "This is round" in prompt:
            reply = turns[turn_of(prompt)]
            return (
                reply()
                if callable(reply)
                else reply
                if isinstance(reply, ScriptedReply)
                else honest(reply.format(right))
            )
        return "A" if prompt.endswith(VERDICT_PREFIX) else direct.format(right)

    def judge(prompt):
        if not prompt.endswith(VERDICT_PREFIX):
            return {}
        shown = dict(re.findall(r"^Solution ([AB]):\n>(.*)$", prompt, re.M))
        good = [f"answer is {truth(prompt)}." in shown[letter] for letter in "AB"]
        return {"T": 1.0} if good[0] == good[1] else {"A": 1.0} if good[0] else {"B": 1.0}

    return ScriptedSamplingClient(renderer=RENDERER, script=script, next_token=judge)


def conversations(sampler, *, max_rounds=2, on_failure="void", **options):
    options = {"num_agents": 2, "sampling": Sampling(max_tokens=400)} | options

    def factory(grader):
        return lambda item, seed: round_robin_group(
            question=item.question,
            answer=item.answer,
            num_agents=options["num_agents"],
            max_rounds=max_rounds,
            renderer=RENDERER,
            judge=PolicySelfComparisonJudge(PolicyRef(sampling_client=sampler), RENDERER),
            seed=seed,
            grader=grader,
            on_failure=on_failure,
        )

    return ConversationKind(factory=factory, **options)


def direct(**options):
    return DirectSampler(renderer=RENDERER, sampling=Sampling(max_tokens=40, **options))


STORY = {(0, 0): RIGHT, (0, 1): WRONG_TEXT, (1, 0): WRONG_TEXT, (1, 1): RIGHT}


async def test_first_and_final_answers_scores_and_tokens_are_those_of_the_conversation():
    sampler = client(STORY)
    played, outcomes, metrics = await play_all(sampler, conversations(sampler), ITEMS, CHECKS["math"])
    for each, item, outcome in zip(played, ITEMS, outcomes, strict=True):
        assert (each.question, each.answer, each.void_reason) == (item.question, item.answer, None)
        assert [(agent.first.right, agent.final.right) for agent in each.agents] == [
            (True, False),
            (False, True),
        ]
        assert [agent.score for agent in each.agents] == [-1.0, 1.0]
        assert [agent.final.vote for agent in each.agents] == ["999", item.answer]
        assert each.num_judge_tokens == 2  # one token for each order of the pair
        replies = [turn.ac.tokens for traj in outcome.group.trajectories_G for turn in traj.transitions]
        assert each.num_tokens == sum(map(len, replies)) + 2
        assert sum(a.first.num_tokens + a.final.num_tokens for a in each.agents) == each.num_tokens - 2
    assert metrics["test/conversation/correct/first"] == metrics["test/conversation/correct/final"] == 0.5


@pytest.mark.parametrize(
    "reply",
    [
        ScriptedReply(text=honest("The answer is 1.").text, ended=False),
        ScriptedReply(text="The answer is 1."),
    ],
)
async def test_a_final_answer_that_is_cut_off_or_not_in_the_asked_form_is_wrong(reply):
    sampler = client(STORY | {(1, 1): reply})
    played, _, metrics = await play_all(sampler, conversations(sampler), ITEMS[:1], CHECKS["math"])
    assert played[0].agents[1].final.right is False
    assert played[0].agents[1].final.vote is None
    assert metrics["test/conversation/correct/final"] == 0.5  # the loop's metric says what was said


async def test_a_reply_that_is_cut_within_its_form_is_wrong():
    sampler = client(STORY | {(1, 1): malformed("The answer is 1.")})
    played, _, _ = await play_all(sampler, conversations(sampler), ITEMS[:1], CHECKS["math"])
    assert not played[0].agents[1].final.right


async def test_answers_in_other_spellings_vote_together():
    forms = iter(["\\boxed{x/2}", "\\boxed{x}", "\\boxed{0.5x}"])
    sampler = client(direct="{}")
    sampler.script = lambda prompt, call: next(forms)
    item = PromptItem(question="What is half of x?", answer="x/2")
    (asked,) = await ask_all(sampler, direct(), [item], 3)
    assert sorted(each.vote for each in asked.answers) == ["x", "x/2", "x/2"]
    assert ladder_figures([asked])["maj@3"] == [(1.0, 1.0)]
    said = {
        (0, 0): "\\boxed{{2y}}",
        (0, 1): "\\boxed{{y+y}}",
        (1, 0): "\\boxed{{y}}",
        (1, 1): "\\boxed{{2y}}",
    }
    sampler = client(said)
    played, _, _ = await play_all(sampler, conversations(sampler), ITEMS[:1], CHECKS["math"])
    assert [each.final.vote for each in played[0].agents] == ["2y", "2y"]


async def test_a_void_conversation_is_wrong_for_everybody_and_its_tokens_count():
    sampler = client(STORY | {(1, 1): crashing})
    played, _, metrics = await play_all(sampler, conversations(sampler), ITEMS[:1], CHECKS["math"])
    (each,) = played
    assert "out of memory" in each.void_reason
    assert [(agent.first, agent.final, agent.score) for agent in each.agents] == [(WRONG, WRONG, None)] * 2
    assert each.num_tokens > 0
    assert metrics["test/conversation/rollout/void"] == 1


async def test_agents_go_on_without_one_that_failed_and_it_is_wrong():
    turns = {(0, 0): RIGHT, (1, 0): crashing, (2, 0): WRONG_TEXT}
    sampler = client(turns)
    talks = conversations(sampler, num_agents=3, max_rounds=1, on_failure="continue")
    played, _, _ = await play_all(sampler, talks, ITEMS[:1], CHECKS["math"])
    assert [agent.final.right for agent in played[0].agents] == [True, False, False]
    assert [agent.score for agent in played[0].agents] == [1.0, None, -1.0]


@pytest.mark.parametrize("num_problems", [1, 3])
async def test_what_a_users_grader_raises_ends_the_evaluation_at_once(num_problems):
    calls = []

    def broken(text, answer):
        calls.append(text)
        raise ZeroDivisionError("no such thing")

    check = AnswerCheck(name="broken", is_right=broken, vote=lambda text: None)
    sampler = client(STORY)
    with pytest.raises(ZeroDivisionError, match="no such thing"):
        await play_all(
            sampler,
            conversations(sampler, sampling=Sampling(max_tokens=400, max_retries=5)),
            ITEMS[:num_problems],
            check,
        )
    assert len(calls) <= num_problems
    assert len(sampler.prompts) <= 6 * num_problems  # four turns and two verdicts: nothing was played again


async def test_an_evaluation_that_is_interrupted_is_no_mistake_of_the_grader():
    sampler = client(STORY)
    playing = asyncio.create_task(play_all(sampler, conversations(sampler), ITEMS, CHECKS["math"]))
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_direct_answers_keep_the_seeds_of_the_training_loop():
    sampler = client()
    metrics = await DirectEvaluator(items=ITEMS, direct=direct())(sampler, 7)
    asked = await ask_all(sampler, direct(), ITEMS, 3)
    seeds = sampler.seeds
    assert metrics["test/direct_accuracy"] == 1.0
    assert [seeds[3 + 3 * place] for place in range(3)] == seeds[:3]
    assert len(set(seeds[3:])) == 9
    assert [len(each.answers) for each in asked] == [3, 3, 3]


async def test_as_many_direct_answers_as_fit_into_the_tokens_of_the_conversation():
    sampler = client(STORY)
    played, _, _ = await play_all(sampler, conversations(sampler), ITEMS, CHECKS["math"])
    asked = await ask_all(sampler, direct(), ITEMS, 2)
    calls = len(sampler.prompts)
    matched = await match_tokens(sampler, direct(), played, asked)
    for each, before, first in zip(matched, played, asked, strict=True):
        length = first.answers[0].num_tokens
        assert len(each.direct) == before.num_tokens // length
        assert each.direct[:2] == first.answers
        assert each.agents == before.agents
    drawn = sum(len(each.direct) - 2 for each in matched)
    assert drawn <= len(sampler.prompts) - calls <= drawn + 2 * len(ITEMS)
    assert await match_tokens(client(STORY), direct(), played) == matched


async def test_a_conversation_without_tokens_is_compared_with_one_direct_answer():
    sampler = client(dict.fromkeys(STORY, crashing))
    played, _, _ = await play_all(sampler, conversations(sampler), ITEMS[:1], CHECKS["math"])
    assert played[0].num_tokens == 0
    (matched,) = await match_tokens(sampler, direct(), played)
    assert [answer.right for answer in matched.direct] == [True]


async def test_a_question_that_does_not_fit_costs_nothing_and_ends_the_search():
    sampler = client(STORY)
    played, _, _ = await play_all(sampler, conversations(sampler), ITEMS[:1], CHECKS["math"])
    (matched,) = await match_tokens(sampler, direct(context_window=5), played)
    assert matched.direct == (WRONG,)
