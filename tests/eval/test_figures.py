"""Figures from answers: by hand, against the definitions, and with denominators that nothing changes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.eval.estimates import summarise
from viva.eval.figures import conversation_figures, direct_figures, evaluation_text, figures_of
from viva.eval.records import (
    WRONG,
    AgentAnswers,
    Answer,
    Asked,
    Evaluation,
    Figure,
    PlayedProblem,
    read_evaluation,
    write_evaluation,
)
from viva.judging.comparison import rank_correlation


def answer(vote, *, right=False, num_tokens=5):
    return Answer(
        right=right, vote=vote, finished=vote is not None, num_tokens=num_tokens, text=f"It is {vote}."
    )


RIGHT, OTHER = answer("72", right=True), answer("70")


def agent(first, final, score):
    return AgentAnswers(first=first, final=final, score=score)


def talk(*agents, num_tokens=100, direct=(), void=None):
    return PlayedProblem(
        question="q",
        answer="72",
        agents=agents,
        num_tokens=num_tokens,
        num_judge_tokens=6,
        void_reason=void,
        direct=direct,
    )


def value(terms):
    above, below = (sum(column) for column in zip(*terms, strict=True))
    return above / below if below else None


def asked(*answers):
    return Asked(question="q", answer="72", answers=answers)


def test_direct_figures_by_hand():
    named = replace(WRONG, text="Is it 72, or 70", num_tokens=5)
    figures = direct_figures(
        [asked(RIGHT, RIGHT, OTHER, named), asked(OTHER, OTHER, OTHER, OTHER)], [asked(named), asked(OTHER)]
    )
    assert {name: value(terms) for name, terms in figures.items()} == {
        "direct/greedy": 0.0,
        "direct/greedy_lenient": 0.5,
        "direct/avg@4": 2 / 8,
        "direct/avg@4_lenient": 3 / 8,
        "direct/pass@2": pytest.approx((5 / 6 + 0) / 2),
        "direct/maj@2": pytest.approx(((1 + 2 * 0.5 + 2 * 1) / 6 + 0) / 2),
        "direct/pass@4": 0.5,
        "direct/maj@4": 0.5,
        "direct/finish_rate": 7 / 8,
        "direct/reply_tokens": 5.0,
    }


@given(
    st.lists(
        st.builds(
            Answer,
            right=st.booleans(),
            vote=st.none(),
            finished=st.booleans(),
            num_tokens=st.just(3),
            text=st.text("71 2.B"),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["72", "7", "B", "work #### 72"]),
)
def test_what_is_right_strictly_is_right_leniently(answers, known):
    given = Asked(question="q", answer=known, answers=tuple(answers))
    figures = direct_figures([given], [replace(given, answers=given.answers[:1])])
    for strict in ("greedy", f"avg@{len(answers)}"):
        assert value(figures[f"direct/{strict}_lenient"]) >= value(figures[f"direct/{strict}"])


def test_one_answer_needs_no_k():
    assert list(direct_figures([asked(RIGHT)])) == [
        "direct/avg@1",
        "direct/avg@1_lenient",
        "direct/finish_rate",
        "direct/reply_tokens",
    ]


def test_a_conversation_by_hand():
    figures = conversation_figures(
        [
            talk(agent(OTHER, RIGHT, 0.9), agent(RIGHT, RIGHT, 0.5), agent(RIGHT, OTHER, 0.1)),
            talk(agent(OTHER, OTHER, 0.4), agent(OTHER, RIGHT, 0.4), agent(OTHER, OTHER, 0.3)),
        ]
    )
    found = {name: value(terms) for name, terms in figures.items()}
    assert found["correct/first"] == 2 / 6
    assert found["correct/final"] == 3 / 6
    assert found["correct/best"] == (1.0 + 0.5) / 2
    assert found["pass@3/final"] == 1.0
    assert found["maj@3/first"] == 0.5
    assert found["maj@3/final"] == 0.5
    assert found["flip/right_to_wrong"] == 1 / 2
    assert found["flip/wrong_to_right"] == 2 / 4
    first = rank_correlation({0: 0.9, 1: 0.5, 2: 0.1}, {0: True, 1: True, 2: False})
    second = rank_correlation({0: 0.4, 1: 0.4, 2: 0.3}, {0: False, 1: True, 2: False})
    assert found["rank_correlation"] == pytest.approx((first + second) / 2)
    assert found["reward_truth_gap"] == pytest.approx((0.0 + 0.25) / 2)
    assert (found["tokens"], found["judge_tokens"], found["void_rate"]) == (100, 6, 0)


def test_a_void_conversation_is_wrong_and_says_nothing_of_flips():
    nobody = [agent(WRONG, WRONG, None)] * 2
    figures = conversation_figures(
        [talk(*nobody, void="out of memory"), talk(agent(RIGHT, RIGHT, 1), agent(OTHER, RIGHT, 0))]
    )
    found = {name: value(terms) for name, terms in figures.items()}
    assert (found["correct/final"], found["correct/best"], found["pass@2/final"]) == (0.5, 0.5, 0.5)
    assert (found["void_rate"], found["flip/wrong_to_right"], found["flip/right_to_wrong"]) == (0.5, 1.0, 0.0)
    assert found["rank_correlation"] is None


def test_an_agent_that_failed_is_wrong_in_a_conversation_that_counts():
    figures = conversation_figures([talk(agent(RIGHT, RIGHT, 0.5), agent(RIGHT, WRONG, None))])
    assert value(figures["correct/final"]) == 0.5
    assert value(figures["correct/best"]) == 1.0
    assert figures["flip/right_to_wrong"] == [(0, 1)]


def test_equal_tokens_set_majorities_side_by_side():
    figures = conversation_figures(
        [
            talk(agent(OTHER, OTHER, 0.9), agent(OTHER, RIGHT, 0.1), direct=(RIGHT, RIGHT, OTHER)),
            talk(agent(OTHER, RIGHT, 0.9), agent(OTHER, RIGHT, 0.1), direct=(OTHER,)),
        ]
    )
    found = {
        name.removeprefix("equal_tokens/"): value(terms)
        for name, terms in figures.items()
        if name.startswith("equal_tokens/")
    }
    assert found == {
        "direct_samples": 2.0,
        "direct_tokens": 10.0,
        "direct_avg": pytest.approx(1 / 3),
        "direct_maj": 0.5,
        "direct_pass": 0.5,
        "best_less_direct_maj": pytest.approx((0 - 1 + 1 - 0) / 2),
        "maj_less_direct_maj": pytest.approx((0.5 - 1 + 1 - 0) / 2),
    }


ANSWERS = st.builds(
    lambda vote, right, num_tokens: answer(vote, right=right and vote is not None, num_tokens=num_tokens),
    st.sampled_from(["72", "70", None]),
    st.booleans(),
    st.integers(0, 9),
)
AGENTS = st.builds(agent, ANSWERS, ANSWERS, st.none() | st.floats(0, 1))
TALKS = st.lists(
    st.builds(talk, AGENTS, AGENTS, AGENTS, direct=st.tuples(ANSWERS, ANSWERS)), min_size=1, max_size=5
)


@given(TALKS)
def test_shares_stay_in_range_and_denominators_are_all_there_should_be(talks):
    figures = conversation_figures(talks)
    for name, terms in figures.items():
        assert len(terms) == len(talks)
        share = value(terms)
        if share is not None and not name.endswith("tokens"):
            low = -1.0 if name == "rank_correlation" or "_less_" in name else 0.0
            high = 2.0 if name == "equal_tokens/direct_samples" else 1.0
            assert low - 1e-12 <= share <= high + 1e-12, name
    for name in ("correct/first", "correct/final", "finish_rate"):
        assert all(below == 3 for _, below in figures[name])
    for name in ("correct/best", "maj@3/final", "pass@2/first", "void_rate", "tokens"):
        assert all(below == 1 for _, below in figures[name])
    assert value(figures["pass@3/final"]) >= value(figures["correct/final"]) - 1e-12


def evaluation(talks, answers):
    return Evaluation(
        target={"name": "runs/x", "checkpoint": "000017"},
        options={"seed": 0, "critique": {"preset": "robust"}},
        prompts_digest="ab12",
        asked=tuple(asked(each, RIGHT) for each in answers),
        played={"critique": tuple(talks)},
        metrics={"direct": {"test/direct_accuracy": 0.5}},
        figures={},
    )


@given(
    TALKS,
    st.lists(ANSWERS, min_size=1, max_size=4),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_an_evaluation_is_read_back_as_it_was_written(tmp_path_factory, talks, answers, text):
    path = tmp_path_factory.mktemp("stored") / "x.json"
    found = evaluation(talks, [replace(each, text=text) for each in answers])
    found = replace(found, figures=summarise(figures_of(found), resamples=100, seed=0))
    write_evaluation(path, found)
    assert read_evaluation(path) == found
    before = path.read_bytes()
    write_evaluation(path, read_evaluation(path))
    assert path.read_bytes() == before


def test_half_a_surrogate_pair_in_a_reply_is_no_obstacle(tmp_path):
    path = tmp_path / "x.json"
    write_evaluation(path, evaluation([], [replace(OTHER, text="a\ud800b")]))
    assert read_evaluation(path).asked[0].answers[0].text == "a?b"


def test_a_file_that_is_no_evaluation_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for content, message in [
        ("{", "cannot be read"),
        ("[]", "is not an evaluation"),
        ('{"a": 1}', "is not an evaluation"),
        ('{"format": "viva evaluation 1"}', "is damaged: target: Field required"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_evaluation(path)


def test_the_table_names_what_is_void_and_what_has_no_interval():
    found = evaluation([talk(agent(RIGHT, RIGHT, 1), agent(OTHER, RIGHT, 0)), talk(void="broken")], [OTHER])
    shown = {
        "direct/avg@2": Figure(value=0.5, low=0.25, high=0.75, num_problems=1),
        "critique/rank_correlation": Figure(value=-0.5, low=None, high=None, num_problems=2),
        "critique/tokens": Figure(value=100, low=90.04, high=110, num_problems=2),
        "critique/flip/right_to_wrong": Figure(value=None, low=None, high=None, num_problems=0),
    }
    text = evaluation_text(replace(found, figures=shown))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert (
        lines[0] == "runs/x, checkpoint 000017, 1 problem asked directly 2 times, 2 in critique of 2 agents"
    )
    assert "direct/avg@2 50.0 % 25.0 % to 75.0 % 1" in lines
    assert "critique/rank_correlation -0.50 - 2" in lines
    assert "critique/tokens 100.0 90.0 to 110.0 2" in lines
    assert "critique/flip/right_to_wrong - - 0" in lines
    assert "note: 1 of 2 critique void and counted as wrong: broken" in lines
