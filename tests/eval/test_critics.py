"""Critics beside the judge: verdicts that are read, and accuracies on the same pairs, by hand."""

import asyncio
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from review_agents import RENDERER, but, honest, judge_of, larger_wins, play

from viva.eval.records import Figure
from viva.eval.screening import Criticised, Verdict, criticised, have_pairs_judged, records_of, verdict_of
from viva.eval.screening_advice import screening_advice
from viva.eval.screening_figures import conversation_screening, critic_figures
from viva.judging.ballots import Preference, Tie
from viva.judging.comparison import VERDICT_PREFIX, Comparison, Outcome
from viva.judging.judge import VERDICT_SCORES, JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.testing import ScriptedSamplingClient
from viva.view.rescoring import within_correlation


@pytest.mark.parametrize(
    ("text", "says_right"),
    [
        ("3 + 4 = 7. 7 is right.", True),
        ("3 + 4 = 7. 9 is wrong.", False),
        ("So the answer is **correct**", True),
        ("The second step looks incorrect!", False),
        ("It is right to add first, then", None),
        ("It is not right.", None),
        ("Tell me what is wrong.", None),
        ("Is it right?", None),
        ("right", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_where_a_critique_ends_in_one(text, says_right):
    assert verdict_of(text) is says_right


@given(st.text(), st.booleans(), st.sampled_from(["", ".", "!", ".**", " \n"]))
def test_what_stands_before_a_verdict_changes_nothing_and_nothing_raises(before, says_right, end):
    assert verdict_of(before) in (True, False, None)
    assert verdict_of(f"{before}\n7 is {'right' if says_right else 'wrong'}{end}") is says_right


def talk(verdicts=(), votes=(), judged=()):
    """Solutions 0 and 2 are right, 1 is wrong; verdicts as (critic, target, what it says)."""
    return Criticised(
        question="q",
        solutions={0: "a", 1: "b", 2: "c"},
        correct={0: True, 1: False, 2: True},
        verdicts=tuple(Verdict(critic=c, target=t, says_right=said) for c, t, said in verdicts),
        ballots={voter: [vote] for voter, vote in enumerate(votes)},
        judged=tuple(judged),
    )


def compared(first, second, outcome):
    return Comparison(first=first, second=second, outcome=outcome, score=VERDICT_SCORES[outcome])


def value(terms):
    above, below = (sum(column) for column in zip(*terms, strict=True))
    return above / below if below else None


def test_accuracies_on_the_same_pairs_by_hand():
    first = talk(
        # agent 2 tells 0 and 1 apart, agent 0 holds 1 and 2 both right, agent 1 ends in no verdict on 2
        verdicts=[(2, 0, True), (2, 1, False), (0, 1, True), (0, 2, True), (1, 0, False), (1, 2, None)],
        votes=[Preference(0, 1), Tie(1, 2), Preference(2, 0)],
        judged=[compared(0, 1, Outcome.A), compared(1, 0, Outcome.A), compared(2, 1, Outcome.A)],
    )
    second = talk(verdicts=[(2, 0, False), (2, 1, True)], judged=[compared(0, 1, Outcome.TIE)])
    figures = {name: value(terms) for name, terms in critic_figures([first, second]).items()}
    assert figures == {
        "critics/readable": 7 / 8,
        "critics/true": 3 / 7,
        "critics/pair_accuracy": ((1 + 0.5) / 2 + 0) / 2,
        "ballots/pair_accuracy": (1 + 0.5) / 2,
        "judge/pair_accuracy": ((0.5 + 1) / 2 + 0.5) / 2,  # of 0 and 1 the verdict turns with the order
        "critics_less_judge": ((0.75 - 0.75) + (0 - 0.5)) / 2,
        "ballots_less_judge": 0.75 - 0.75,
    }


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([True, False, None]))))
def test_opposite_verdicts_mirror_the_accuracy(rows):
    said = {(critic, target): each for critic, target, each in rows if critic != target}
    both = [
        talk(verdicts=[(*place, None if each is None else each is not flip) for place, each in said.items()])
        for flip in (False, True)
    ]
    for name in ("critics/pair_accuracy", "critics/true"):
        one, other = (value(critic_figures([each])[name]) for each in both)
        assert (one is None) == (other is None)
        assert one is None or one + other == pytest.approx(1.0)


def says(place):
    """Calls everything of quality 9 right, and agent 1 never says so."""
    marks = {letter: "right" if "quality 9" in text else "wrong" for letter, text in place.letters.items()}
    end = "so think again." if place.agent_id == 1 else ""
    return "\n".join(f"Critique of {letter}: {end or f'it is {marks[letter]}.'}" for letter in place.others)


async def test_a_conversation_is_read_and_its_pairs_are_judged_in_both_orders():
    agents = dict.fromkeys(range(3), but(honest({0: 9, 1: 1, 2: 9}), critique=says))
    outcome, _, _ = await play(agents)
    (found,) = criticised(records_of([outcome, replace(outcome, group=None)]))
    assert found.correct == {0: True, 1: False, 2: True}
    assert found.solutions[1] == "quality 1 by 1"
    assert {(each.critic, each.target): each.says_right for each in found.verdicts} == {
        **{(0, 1): False, (0, 2): True, (1, 0): None, (1, 2): None, (2, 0): True, (2, 1): False}
    }
    (judged,) = await have_pairs_judged([found], judge_of(), 0, most=9)
    assert [(each.first, each.second) for each in judged.judged] == [(0, 1), (1, 0), (1, 2), (2, 1)]
    figures = {name: value(terms) for name, terms in critic_figures([judged]).items()}
    assert figures["critics/readable"] == 4 / 6
    assert all(figures[f"{name}/pair_accuracy"] == 1.0 for name in ("critics", "ballots", "judge"))
    (few,) = await have_pairs_judged([found], judge_of(), 0, most=1)
    assert len(few.judged) == 2
    assert (await have_pairs_judged([found], judge_of(), 0, most=0)) == (found,)


async def test_every_reward_that_conversations_suffice_for_is_correlated_with_the_truth():
    qualities = {0: 9, 1: 1, 2: 9, 3: 1}
    outcome, _, _ = await play(dict.fromkeys(range(4), honest(qualities)))
    records = records_of([outcome, replace(outcome, group=None)])
    (record,) = records
    assert record.correct == {0: True, 1: False, 2: True, 3: False}

    async def found(own, *, is_known=True):
        return await conversation_screening(
            {}, (), {"critique": own}, is_known=is_known, resamples=200, seed=0
        )

    figures = await found(records)
    names = {name.removeprefix("critique/correlation/") for name in figures}
    assert {"majority", "r_sol", "r_diag", "peer_review", "maca", "shuffled"} <= names
    assert names.isdisjoint({"answers", "log_probability"})  # the truth itself; transcripts have no logprobs
    assert figures["critique/correlation/majority"].value is None  # two agents each: all earn the same
    paid = record.streams
    r_sol = statistics.correlation(
        [paid[agent]["r_sol"] for agent in range(4)], [float(record.correct[agent]) for agent in range(4)]
    )
    assert figures["critique/correlation/r_sol"].value == pytest.approx(r_sol)
    assert r_sol > 0.9
    pairs = [(paid[agent]["r_sol"], float(record.correct[agent])) for agent in range(4)]
    assert within_correlation([pairs])[0] == pytest.approx(r_sol)  # as `viva rescore reward=all` tells it
    # votes the other way round, or a reward that pays the wrong ones, are told
    worse = record.model_copy(
        update={"correct": {agent: not right for agent, right in record.correct.items()}}
    )
    assert (await found([worse]))["critique/correlation/r_sol"].value == pytest.approx(-r_sol)
    # a conversation that differs in nothing that a reward pays counts against it, as one that all solve does
    alike = record.model_copy(update={"correct": dict.fromkeys(range(4), True)})
    assert 0 < (await found([record, alike]))["critique/correlation/r_sol"].value < r_sol
    assert await found(records, is_known=False) == {}


async def test_a_judge_that_answers_first_answers_once_for_all_pairs_of_a_conversation():
    client = ScriptedSamplingClient(
        renderer=RENDERER,
        script=lambda prompt, call: "A" if prompt.endswith(VERDICT_PREFIX) else "it is a",
        next_token=larger_wins,
    )
    judge = PolicySelfComparisonJudge(
        PolicyRef(sampling_client=client), RENDERER, JudgeOptions(answers_first=True)
    )
    both = await have_pairs_judged([talk(), talk()], judge, 0, most=9)
    assert [len(each.judged) for each in both] == [4, 4]
    assert all("Your own answer:\n> it is a\n" in each.prompt for one in both for each in one.judged)
    assert sum(not prompt.endswith(VERDICT_PREFIX) for prompt in client.prompts) == 2


@pytest.mark.parametrize("answers_first", [False, True])
async def test_a_judge_that_fails_about_a_conversation_is_counted_and_says_nothing(answers_first):
    def too_long(prompt, call=0):
        raise ValueError("The prompt is too long")

    client = ScriptedSamplingClient(renderer=RENDERER, script=too_long, next_token=too_long)
    judge = PolicySelfComparisonJudge(
        PolicyRef(sampling_client=client), RENDERER, JudgeOptions(answers_first=answers_first)
    )
    (found,) = await have_pairs_judged([talk()], judge, 0, most=9)
    assert {(each.first, each.second): each.failure for each in found.judged} == dict.fromkeys(
        ((0, 1), (1, 0), (2, 1), (1, 2)), "The prompt is too long"
    )
    assert value(critic_figures([found])["judge/pair_accuracy"]) is None


def advice(talks):
    figures = asyncio.run(conversation_screening({}, talks, {}, is_known=True, resamples=200, seed=0))
    rest = dict.fromkeys(
        ("replies/finished", "replies/answer_found", "accuracy/greedy", "solved/mixed"),
        Figure(value=1.0, low=None, high=None, num_problems=9),
    )
    told = screening_advice(rest | figures, rewards=[], talks={}, has_answers=True)
    return next(each for each in told if each.about == "critics")


def test_the_advice_says_who_classifies_better_or_that_nobody_can_tell():
    good, bad = [(2, 0, True), (2, 1, False)], [(2, 0, False), (2, 1, True)]
    right, wrong = [compared(0, 1, Outcome.A)], [compared(0, 1, Outcome.B)]
    better = advice([talk(good, judged=wrong)] * 11 + [talk(good, judged=right)])
    assert better.verdict == "note"
    assert better.reason.endswith("better than the judge")
    assert advice([talk(bad, judged=right)] * 11 + [talk(good, judged=right)]).reason.endswith(
        "worse than the judge"
    )
    mixed = [talk(good, judged=wrong), talk(bad, judged=right)] * 10
    assert advice(mixed).reason.endswith("no difference from the judge is shown")
    assert "too few to say" in advice([talk(good, judged=wrong)] * 3).reason
    assert "no judge was asked" in advice([talk(good)] * 20).reason
    silent = advice([talk([(2, 0, None), (2, 1, None)], judged=right)] * 20)
    assert "cannot be told: 0 % of the critiques end in a verdict" in silent.reason
    assert (
        "no critique of a solution whose rightness is known" in advice([talk([], judged=right)] * 20).reason
    )
