"""Rubrics: what a file may hold, the weighted mean by hand, and both kinds of judges of a criterion."""

import pytest
from chat_server import chat_server, completion, in_turn
from hypothesis import given
from hypothesis import strategies as st

from viva.eval.estimates import compare
from viva.eval.records import WRONG, Asked
from viva.eval.rubric import CriterionScore, rubric_figures, score_answers
from viva.judging.comparison import Judge, JudgeError
from viva.judging.endpoint import ChatEndpoint, EndpointOptions
from viva.judging.endpoint_judge import EndpointJudge
from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.judging.records import Criterion
from viva.testing import ScriptedSamplingClient, tiny_renderer

CRITERIA = (Criterion(text="is polite", weight=3.0), Criterion(text="is short"))


def scores(*values):
    return [CriterionScore(value=value) for value in values]


def test_the_score_is_the_weighted_mean_of_what_can_be_read():
    found = rubric_figures([[scores(1.0, 0.0), scores(0.5, None)], [scores(None, None)]], CRITERIA)
    assert found["score"] == [(0.75 + 0.5, 2.0), (0.0, 0.0)]
    assert found["criterion_1"] == [(1.5, 2.0), (0.0, 0.0)]
    assert found["criterion_2"] == [(0.0, 1.0), (0.0, 0.0)]
    assert found["invalid_rate"] == [(1.0, 4.0), (2.0, 2.0)]


VALUES = st.one_of(st.none(), st.floats(0, 1))
ANSWERS = st.lists(st.tuples(VALUES, VALUES), min_size=3, max_size=3)


@given(one=ANSWERS, other=ANSWERS)
def test_swapping_the_policies_negates_the_difference(one, other):
    first, second = (rubric_figures([[scores(*each)] for each in own], CRITERIA) for own in (one, other))
    forward = compare(first, second, resamples=20, seed=0)
    backward = compare(second, first, resamples=20, seed=0)
    for name, each in forward.items():
        there = backward[name]
        assert (each.value, each.against) == (there.against, there.value)
        if each.difference is not None:
            assert each.difference == pytest.approx(-there.difference)


async def test_a_policy_is_read_by_the_probabilities_of_yes_and_no():
    renderer = tiny_renderer()
    chances = {"is polite": {"y": 0.6, "n": 0.2, "x": 0.2}, "is short": {"y": 0.01, "n": 0.02, "x": 0.97}}

    def next_token(prompt):
        assert prompt.endswith('{"fulfilled": "')
        assert "> hello" in prompt
        return next(each for text, each in chances.items() if f"> {text}\n" in prompt)

    client = ScriptedSamplingClient(renderer=renderer, next_token=next_token)
    judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=client), renderer)
    assert await judge.score("q", "hello", "is polite", 0) == pytest.approx(0.75)
    assert await judge.score("q", "hello", "is short", 0) is None  # anything but the labels


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"fulfilled": "yes"}', 1.0),
        ('<think>{"fulfilled": "yes"}</think>{"fulfilled": "No"}', 0.0),
        ("no", 0.0),
        ("yes and no", None),
        ('{"fulfilled": "perhaps"}', None),
        ('{"fulfilled": "yes"} {"fulfilled": "no"}', None),
    ],
)
async def test_an_endpoint_writes_yes_or_no(text, value):
    with chat_server(in_turn(completion(text))) as server:
        async with ChatEndpoint(EndpointOptions(url=server.url, model="m")) as endpoint:
            judge = EndpointJudge(endpoint, JudgeOptions(mode="verdict", max_tokens=50))
            assert await judge.score("q", "hello", "is polite", 0) == value
    assert "> is polite" in server.requests[0]["messages"][1]["content"]


async def test_every_criterion_of_every_answer_is_asked_by_itself_and_a_failure_is_no_score():
    class Scripted(Judge):
        def __init__(self):
            self.asked = []

        async def compare(self, question, solutions, first, second, seed):
            raise NotImplementedError

        def described(self):
            return {}

        async def score(self, question, answer, criterion, seed):
            self.asked.append((question, answer, criterion))
            if answer == "crash":
                raise JudgeError("no reply")
            return float(criterion in answer)

    answers = [["is polite", "x"], ["crash", "is short, is polite"]]
    asked = [
        Asked(question=question, answer=None, answers=tuple(_answer(text) for text in own))
        for question, own in zip("pq", answers, strict=True)
    ]
    judge = Scripted()
    found = await score_answers(judge, CRITERIA, asked, seed=0)
    assert [[[each.value for each in own] for own in prompt] for prompt in found] == [
        [[1.0, 0.0], [0.0, 0.0]],
        [[None, None], [1.0, 1.0]],
    ]
    assert {each.failure for each in found[1][0]} == {"no reply"}
    assert len(judge.asked) == 8


def _answer(text):
    return type(WRONG)(right=False, vote=None, finished=True, num_tokens=1, text=text)
