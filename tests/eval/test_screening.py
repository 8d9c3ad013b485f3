"""Screening on a scripted engine: what is asked, counted, judged, and advised."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.eval.direct import DirectSampler
from viva.eval.records import WRONG, Answer, Figure, is_named
from viva.eval.screening import Screened, Screener, Try, is_readable, pair_of
from viva.eval.screening_advice import screening_advice
from viva.eval.screening_figures import correlation, screening_figures
from viva.judging.answers import CHECKS
from viva.judging.comparison import VERDICT_PREFIX
from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.judging.rubric import CRITERION_PREFIX
from viva.rewards import find_reward
from viva.testing import ScriptedSamplingClient, tiny_renderer
from viva.training.data import PromptItem
from viva.training.sampling import Sampling

MATH = CHECKS["math"]
RENDERER = tiny_renderer()
REWARDS = {name: find_reward(name) for name in ("majority", "judge_answer", "log_probability", "shuffled")}


def attempt(text, *, right=False, logprob=-2.0, finished=True):
    vote = MATH.vote(text) if finished else None
    answer = Answer(right=right, vote=vote, finished=finished, num_tokens=2, text=text)
    return Try(answer=answer, logprob=logprob, has_answer=vote is not None, is_lenient=right)


def problem(numbers, known, *, greedy=None, logprobs=None):
    """A problem whose tries answer these numbers."""
    logprobs = logprobs or [-2.0] * len(numbers)
    return Screened(
        question="?",
        answer=None if known is None else str(known),
        greedy=attempt(str(greedy or numbers[0]), right=(greedy or numbers[0]) == known),
        tries_N=tuple(
            attempt(str(number), right=number == known, logprob=logprob)
            for number, logprob in zip(numbers, logprobs, strict=True)
        ),
    )


def figures(problems):
    return screening_figures(problems, REWARDS, resamples=200, seed=0)


def advice(problems):
    found = figures(problems)
    known = problems[0].answer is not None
    return {
        each.about: each
        for each in screening_advice(found, rewards=list(REWARDS), talks={}, has_answers=known)
    }


def test_figures_by_hand():
    found = figures([problem([1, 1, 1, 2], 1), problem([3, 3, 4, 5], 4), problem([6, 6, 6, 6], 7)])
    assert {name: found[name].value for name in list(found) if name.startswith(("accuracy", "solved"))} == {
        "accuracy/greedy": pytest.approx(1 / 3),
        "accuracy/sampled": pytest.approx(4 / 12),
        "accuracy/greedy_lenient": pytest.approx(1 / 3),
        "accuracy/sampled_lenient": pytest.approx(4 / 12),
        "accuracy/maj@2": pytest.approx((3 / 4 + 1 / 4 + 0) / 3),
        "accuracy/maj@4": pytest.approx(1 / 3),
        "accuracy/pass@4": pytest.approx(2 / 3),
        "solved/in_20_to_80_percent": pytest.approx(2 / 3),
        "solved/mixed": pytest.approx(2 / 3),
        "solved/never": pytest.approx(1 / 3),
        "solved/always": 0.0,
    }
    assert found["answers/agreement"].value == pytest.approx((0.75 + 0.5 + 1) / 3)
    assert found["answers/entropy_bits"].value == pytest.approx((0.8112781 + 1.5 + 0) / 3)


def test_a_majority_that_is_right_works_and_one_that_is_wrong_collapses():
    good = advice([problem([1, 1, 1, 1, 1, 2, 3, 4], 1), problem([1, 1, 1, 1, 2, 2, 3, 4], 1)] * 20)
    bad = advice([problem([2, 2, 2, 2, 1, 1, 1, 3], 1), problem([2, 2, 2, 1, 1, 3, 4, 5], 1)] * 20)
    assert (good["majority"].verdict, bad["majority"].verdict) == ("works", "fails")
    assert "the most frequent answer is right on 100 % " in good["majority"].reason
    few = advice([problem([1, 1, 1, 1, 1, 2, 3, 4], 1)] * 4)
    assert few["majority"].verdict == "unclear"
    wrong = advice([problem([2, 2, 2, 2, 1, 1, 1, 3], 1)] * 4)
    assert {wrong[name].verdict for name in ("majority", "log_probability")} == {"unclear"}
    assert "these problems say too little about majority" in wrong["summary"].reason
    silent = advice([problem([2, 3], 1)] * 4)
    assert silent["log_probability"].verdict == "unclear"
    assert silent["log_probability"].reason == "0 problems with right and wrong tries"
    assert "right on 0 % of the problems only" in bad["majority"].reason
    assert good["answers"].verdict == bad["answers"].verdict == "works"


def test_voting_is_unclear_where_the_interval_of_the_majority_holds_one_half():
    right, never = problem([1, 1, 1, 1, 1, 2, 3, 4], 1), problem([2, 2, 3, 4, 5, 6, 7, 8], 1)
    below, above = advice([right] * 11 + [never] * 14), advice([right] * 14 + [never] * 11)
    assert below["majority"].verdict == above["majority"].verdict == "unclear"
    assert "the most frequent answer is right on 56 % (" in above["majority"].reason
    assert advice([right] * 22 + [never] * 3)["majority"].verdict == "works"


def test_voting_fails_by_all_problems_that_were_asked():
    never, mixed = problem([2, 2, 3, 4, 5, 6, 7, 8], 1), problem([2, 2, 2, 1, 1, 3, 4, 5], 1)
    few_mixed = advice([never] * 36 + [mixed] * 4)
    assert (few_mixed["majority"].verdict, few_mixed["log_probability"].verdict) == ("fails", "unclear")


def test_where_nothing_is_in_reach_no_reward_works():
    hard = advice([problem([2, 3, 4, 5, 6, 7, 8, 9], 1)] * 10)
    assert hard["answers"].verdict == "fails"
    assert "take easier problems" in hard["answers"].reason
    assert "no reward can work" in hard["summary"].reason
    once = advice([problem([2, 3, 4, 5, 6, 7, 8, 1], 1)] + [problem([2, 3, 4, 5, 6, 7, 8, 9], 1)] * 40)
    assert (once["answers"].verdict, once["log_probability"].verdict) == ("fails", "unclear")
    assert "no reward can work" in once["summary"].reason
    easy = advice([problem([1] * 8, 1)] * 10)
    assert "take harder problems" in easy["answers"].reason


def test_a_right_try_now_and_then_is_enough_for_known_answers():
    rare, never = problem([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1), problem([2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 1)
    told = advice([rare] * 2 + [never] * 10)
    assert told["answers"].verdict == "works"
    assert "(0 % are solved in 20 to 80 % of tries)" in told["answers"].reason


def test_a_greedy_answer_far_above_samples_asks_for_a_lower_temperature():
    assert "lower the temperature" in advice([problem([2, 3, 4, 1], 1, greedy=1)] * 10)["temperature"].reason


def test_the_log_probability_is_held_against_the_truth():
    right_is_likely = problem([1, 1, 2, 2], 1, logprobs=[-1.0, -1.2, -3.0, -3.5])
    right_is_unlikely = problem([1, 1, 2, 2], 1, logprobs=[-3.0, -3.5, -1.0, -1.2])
    good, bad = figures([right_is_likely] * 5), figures([right_is_unlikely] * 5)
    assert good["correlation/log_probability"].value > 0.9
    assert bad["correlation/log_probability"].value < -0.9
    assert (good["likelihood/accuracy"].value, bad["likelihood/accuracy"].value) == (1.0, 0.0)


def test_the_models_own_greedy_answer_is_held_against_the_truth():
    good = advice([problem([1, 2, 2, 3], 1, greedy=1)] * 20)
    bad = advice([problem([1, 2, 2, 3], 1, greedy=2)] * 20)
    assert (good["judge_answer"].verdict, bad["judge_answer"].verdict) == ("works", "fails")
    assert "its labels are the greedy answers, right on 100 %" in good["judge_answer"].reason
    assert "+1.00" in good["judge_answer"].reason
    cut = problem([1, 2, 2, 3], 1)
    cut = replace(cut, greedy=attempt("1", right=True, finished=False))
    assert advice([cut] * 20)["judge_answer"].reason.startswith("it tells no answers apart")


def figure(value, low=None, high=None, count=20):
    return Figure(value=value, low=low, high=high, num_problems=count)


@pytest.mark.parametrize(
    ("void", "gap", "verdict"),
    [
        (0.0, figure(0.2, 0.1, 0.3), "works"),
        (0.0, figure(0.6, 0.52, 0.7), "fails"),
        (0.0, figure(0.5, 0.4, 0.6), "unclear"),
        (0.0, figure(None), "unclear"),
        (0.0, figure(0.0, count=2), "unclear"),
        (0.9, figure(0.2, 0.1, 0.3), "fails"),
    ],
)
def test_a_conversation_is_judged_by_whom_it_pays(void, gap, verdict):
    found = figures([problem([1, 1, 2, 2], 1)] * 5)
    found |= {"critique/void_rate": figure(void), "critique/reward_truth_gap": gap}

    def verdicts():
        told = screening_advice(
            found, rewards=["majority"], talks={"critique": "peer_review"}, has_answers=True
        )
        return [each.verdict for each in told if each.about == "peer_review, in critique"]

    assert verdicts() == ["fails"]  # no final answer is finished
    found["critique/finish_rate"] = figure(0.9)
    assert verdicts() == [verdict]


def test_shuffled_rewards_know_nothing():
    value = figures([problem([1, 1, 2, 2], 1)] * 500)["correlation/shuffled"].value
    assert abs(value) < 4 * (1 / 3 / 500) ** 0.5  # of groups of 4, r has the variance 1/3


def test_the_correlation_counts_groups_without_a_difference_against_it():
    mixed, alike = ([True, False], [1.0, 0.0]), ([True, True], [1.0, 0.0])
    assert correlation([mixed], resamples=100, seed=0).value == 1.0
    assert correlation([mixed, alike], resamples=100, seed=0).value == pytest.approx(0.5**0.5)
    assert correlation([alike], resamples=100, seed=0) == Figure(
        value=None, low=None, high=None, num_problems=0
    )


def test_without_answers_only_what_needs_none_is_told():
    found = figures([problem([1, 1, 2, 3], None)] * 5)
    assert not [
        name for name in found if name.startswith(("accuracy", "solved", "correlation", "likelihood"))
    ]
    told = advice([problem([1, 1, 2, 3], None)] * 5)
    assert told["majority"].verdict == "unclear"
    assert "only known answers tell" in told["majority"].reason
    assert advice([problem([1, 1, 1, 1], None)] * 5)["majority"].verdict == "fails"


def test_pairs_are_of_a_right_and_a_wrong_answer():
    assert pair_of(problem([2, 1, 3], 1)) == (1, 0)
    assert pair_of(problem([2, 3, 3], 1)) is None
    assert pair_of(problem([2, 2, 3], None)) == (0, 2)
    assert pair_of(problem([2, 2, 2], None)) is None


@pytest.mark.parametrize(
    ("text", "answer", "is_there"),
    [
        ("I think 42, no, 43", "42", True),
        ("142 or 420", "42", False),
        ("42.5", "42", False),
        ("It is 42.", "42", True),
        ("-42", "42", False),
        ("It is Blue indeed", "blue", True),
        ("bluebird", "blue", False),
        ("so 72", "48 + 24 = 72 #### 72", True),
        ("anything", None, False),
        ("a farmer", "A", False),
        ("the choice is A", "A", True),
    ],
)
def test_a_known_answer_is_found_in_any_place_but_not_within_another(text, answer, is_there):
    assert is_named(text, answer) is is_there


@given(st.text(), st.text())
def test_looking_for_an_answer_never_raises(text, answer):
    assert is_named(text, answer) in (True, False)
    assert is_readable(text, MATH) in (True, False)


def test_an_answer_stands_out_if_it_is_marked_a_number_or_short():
    assert is_readable("The answer is blue.", MATH)
    assert is_readable("so it must be 7", MATH)
    assert is_readable("blue", MATH)
    assert not is_readable("I would like to think about this for a while first", MATH)
    assert not is_readable("", MATH)
    assert not is_readable("I do not know", CHECKS["choice"])


def test_a_model_is_asked_greedily_and_as_in_training_and_judges_in_both_orders():
    def script(prompt, call):
        if prompt.endswith(VERDICT_PREFIX):
            return "A"
        right = int(re.search(r"What is (\d+) \+ 1", prompt)[1]) + 1
        return f"The answer is {right if call % 2 else 999}."

    client = ScriptedSamplingClient(
        renderer=RENDERER,
        script=script,
        next_token=lambda prompt: {"A": 0.75, "B": 0.25} if prompt.endswith(VERDICT_PREFIX) else {},
    )
    direct = DirectSampler(renderer=RENDERER, sampling=Sampling(seed=0, max_tokens=60, temperature=0.7))
    screener = Screener(
        direct=direct,
        num_samples=6,
        judge=PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER),
        num_pairs=2,
    )
    items = [PromptItem(question=f"What is {n} + 1?", answer=str(n + 1)) for n in range(4)]

    async def screen():
        return await screener.have_judged(await screener.ask(client, items), seed=0)

    problems = asyncio.run(screen())
    assert [len(each.tries_N) for each in problems] == [6] * 4
    assert sum(each.judged is not None for each in problems) == 2
    found = figures(problems)
    # the judge always prefers what it sees first
    assert found["judge/position_bias"].value == 1.0
    assert found["judge/accuracy"].value == found["judge/pair_accuracy"].value == 0.5
    assert found["judge/first_shown_nats"].value == pytest.approx(1.0986, abs=1e-3)
    told = advice(problems)
    assert told["tournament"].verdict == "unclear"
    assert told["tournament"].reason.endswith("these are 2 pairs only")
    json.dumps([each.reason for each in told.values()])


class Narrow(PolicySelfComparisonJudge):
    """A judge into whose context one question does not fit."""

    async def compare(self, question, solutions, first, second, seed):
        self._refuse(question)
        return await super().compare(question, solutions, first, second, seed)

    async def score(self, question, solution, criterion, seed):
        self._refuse(question)
        return await super().score(question, solution, criterion, seed)

    def _refuse(self, question):
        if question == "What is 1?":
            raise ValueError("The prompt has 9 tokens too many")


def test_a_problem_that_is_too_long_for_the_judge_or_for_the_policy_is_counted_and_the_others_go_on():
    labels = {VERDICT_PREFIX: {"A": 0.6, "B": 0.4}, CRITERION_PREFIX: {"y": 0.6, "n": 0.4}}

    def script(prompt, call):
        return "A" if prompt.endswith(VERDICT_PREFIX) else f"The answer is {call % 2}."

    client = ScriptedSamplingClient(
        renderer=RENDERER,
        script=script,
        next_token=lambda prompt: next((labels[end] for end in labels if prompt.endswith(end)), {}),
    )
    screener = Screener(
        direct=DirectSampler(renderer=RENDERER, sampling=Sampling(seed=0, max_tokens=60, temperature=0.7)),
        num_samples=4,
        judge=Narrow(PolicyRef(sampling_client=client), RENDERER),
        num_pairs=9,
    )
    items = [PromptItem(question=f"What is {n}?", answer=str(n % 2)) for n in range(3)]
    rubric = find_reward("rubric")

    not_given = Try(answer=WRONG, logprob=0.0, has_answer=False, is_lenient=False)

    async def screen():
        asked = list(await screener.ask(client, items))
        asked[2] = replace(asked[2], tries_N=tuple(not_given for _ in asked[2].tries_N))
        return await screener.have_scored(await screener.have_judged(asked, seed=0), rubric, seed=0)

    problems = asyncio.run(screen())
    assert [each.judged is not None for each in problems] == [True, True, False]
    assert [each.failure for each in problems[1].judged.both] == ["The prompt has 9 tokens too many"] * 2
    assert [each.failure is None for each in problems] == [True, False, True]
    assert [list(each.rubric) for each in problems] == [[0, 1, 2, 3], [0, 1, 2, 3], []]
    found = screening_figures(problems, {"rubric": rubric}, resamples=200, seed=0)
    assert found["judge/invalid"].value == found["rubric/invalid_rate"].value == 0.5
    assert found["judge/pair_accuracy"].num_problems == found["rubric/accuracy"].num_problems == 1


def test_scores_that_favour_the_right_one_are_seen_behind_verdicts_that_turn_with_the_order():
    """The judge knows the answer only if it has given it, and prefers what is shown first by more than that."""

    def labels(prompt):
        if not prompt.endswith(VERDICT_PREFIX):
            return {}
        own = re.search(r"Your own answer:\n> The answer is (\d+)", prompt)
        first = re.search(r"Solution A:\n> The answer is (\d+)", prompt)[1]
        p_a = 0.7 if own is None else 0.75 if own[1] == first else 0.65
        return {"A": p_a, "B": 1 - p_a}

    def script(prompt, call):
        right = int(re.search(r"What is (\d+) \+ 1", prompt)[1]) + 1
        is_own = call >= 12 * 7  # asked after all tries
        return (
            "A"
            if prompt.endswith(VERDICT_PREFIX)
            else f"The answer is {right if is_own or call % 2 else 999}."
        )

    def screened(answers_first):
        client = ScriptedSamplingClient(renderer=RENDERER, script=script, next_token=labels)
        judge = PolicySelfComparisonJudge(
            PolicyRef(sampling_client=client), RENDERER, JudgeOptions(answers_first=answers_first)
        )
        direct = DirectSampler(renderer=RENDERER, sampling=Sampling(seed=0, max_tokens=60, temperature=0.7))
        screener = Screener(direct=direct, num_samples=6, judge=judge, num_pairs=12)
        items = [PromptItem(question=f"What is {n} + 1?", answer=str(n + 1)) for n in range(12)]

        async def screen():
            return await screener.have_judged(await screener.ask(client, items), seed=0)

        return asyncio.run(screen())

    plain, first = (screened(answers_first) for answers_first in (False, True))
    assert figures(plain)["judge/pair_accuracy"].value == 0.5
    assert advice(plain)["tournament"].verdict == "fails"
    found = figures(first)
    assert found["judge/position_bias"].value == 1.0
    assert (found["judge/accuracy"].value, found["judge/pair_accuracy"].value) == (0.5, 1.0)
    assert advice(first)["tournament"].verdict == "works"


def test_single_answers_are_scored_behind_the_judges_own_and_unreadable_scores_are_left_out():
    """The judge finds its own answer likely; about the first problem it cannot be read."""
    rewards = {"rubric": find_reward("rubric"), "shuffled_rubric": find_reward("shuffled_rubric")}

    def labels(prompt):
        if not prompt.endswith(CRITERION_PREFIX):
            return {}
        own = re.search(r"Your own answer:\n> The answer is (\d+)", prompt)[1]
        shown = re.search(r"\nAnswer:\n> The answer is (\d+)", prompt)[1]
        yes = 0.6 if own == shown else 0.5
        return {"x": 1.0} if "What is 0 + 1" in prompt else {"y": yes, "n": 1 - yes}

    def script(prompt, call):
        right = int(re.search(r"What is (\d+) \+ 1", prompt)[1]) + 1
        return f"The answer is {right if call >= 12 * 7 or call % 2 else 999}."

    client = ScriptedSamplingClient(renderer=RENDERER, script=script, next_token=labels)
    judge = PolicySelfComparisonJudge(
        PolicyRef(sampling_client=client), RENDERER, JudgeOptions(answers_first=True)
    )
    direct = DirectSampler(renderer=RENDERER, sampling=Sampling(seed=0, max_tokens=60, temperature=0.7))
    screener = Screener(direct=direct, num_samples=6, judge=judge, num_pairs=0)
    items = [PromptItem(question=f"What is {n} + 1?", answer=str(n + 1)) for n in range(12)]

    async def screen():
        return await screener.have_scored(await screener.ask(client, items), rewards["rubric"], seed=0)

    problems = asyncio.run(screen())
    found = screening_figures(problems, rewards, resamples=200, seed=0)
    assert found["rubric/accuracy"].value == 1.0
    assert found["correlation/rubric"].value == pytest.approx(1.0)
    assert found["rubric/accuracy"].num_problems == 11
    assert found["rubric/invalid_rate"].value == pytest.approx(1 / 12)
    assert abs(found["correlation/shuffled_rubric"].value) < 0.9
    told = {
        each.about: each
        for each in screening_advice(found, rewards=list(rewards), talks={}, has_answers=True)
    }
    assert told["rubric"].verdict == "works"
