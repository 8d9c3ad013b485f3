"""Other rewards for stored conversations: exactly those that a run by the other rules would have paid."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reviews import NUM_CONVERSATIONS, play

import viva.cli
from viva.judging.records import ConversationRecord
from viva.rewards import find_reward
from viva.rewards.review import ReviewRules, stored_rules
from viva.view.files import iter_transcripts
from viva.view.rescore import RescoreOptions, rescore
from viva.view.rescoring import Rescoring, rescore_text, within_correlation

STREAMS = ("r_sol", "r_meta", "r_diag", "total")

MakeRun = Callable[..., Path]


def by_stream(result: Rescoring) -> dict[str, Any]:
    return {change.stream: change for change in result.streams}


@pytest.mark.parametrize(
    ("preset", "agents_compare"), [("paper", False), ("robust", False), ("robust", True)]
)
def test_the_runs_own_rules_give_the_rewards_that_were_paid(
    make_review_run: MakeRun, preset: str, agents_compare: bool
) -> None:
    result = rescore(make_review_run(preset, agents_compare=agents_compare), RescoreOptions())
    assert result.num_conversations == NUM_CONVERSATIONS
    assert tuple(by_stream(result)) == STREAMS
    for change in result.streams:
        assert change.means[0] == change.means[1]
        assert change.deviations[0] == change.deviations[1]
        assert change.truth[0] == change.truth[1]
        assert change.agreement is None or change.agreement == pytest.approx(1.0)
    assert all(old == new for old, new in result.gaps.values())


def test_another_preset_gives_what_a_run_by_it_would_have_paid(make_review_run: MakeRun) -> None:
    changed = rescore(make_review_run("robust"), RescoreOptions(preset="paper"))
    run_by_it = rescore(make_review_run("paper"), RescoreOptions())
    for stream in STREAMS:
        one, other = by_stream(changed)[stream], by_stream(run_by_it)[stream]
        assert (one.means[1], one.deviations[1], one.truth[1]) == (
            other.means[0], other.deviations[0], other.truth[0],
        )  # fmt: skip
        assert one.means[0] != one.means[1]
    assert {name: gaps[1] for name, gaps in changed.gaps.items()} == {
        name: gaps[0] for name, gaps in run_by_it.gaps.items()
    }
    assert changed.num_gaps > 0


def test_figures_of_the_old_rewards_are_those_of_the_transcripts(make_review_run: MakeRun) -> None:
    folder = make_review_run("robust")
    records = [json.loads(line)["record"] for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    totals = [total for record in records for total in record["rewards"].values()]
    pairs = [
        (
            record["rewards"][a] - sum(record["rewards"].values()) / 4,
            right - sum(record["correct"].values()) / 4,
        )
        for record in records
        for a, right in record["correct"].items()
    ]
    expected = (
        sum(x * y for x, y in pairs) / (sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs)) ** 0.5
    )
    total = by_stream(rescore(folder, RescoreOptions(noise_floor=0.0)))["total"]
    assert total.means[0] == pytest.approx(sum(totals) / len(totals))
    assert total.truth[0] == pytest.approx(expected)
    assert total.num_graded == (len(pairs), len(pairs))


def test_weights_that_are_not_named_stay(make_review_run: MakeRun) -> None:
    result = by_stream(rescore(make_review_run("robust"), RescoreOptions(reward_weights={"r_diag": 2.0})))
    assert [result[stream].means[0] for stream in STREAMS[:3]] == [result[s].means[1] for s in STREAMS[:3]]
    num_agents = 4 * NUM_CONVERSATIONS
    more = 2 * result["r_diag"].means[0]
    assert result["total"].means[1] - result["total"].means[0] == pytest.approx(more, abs=1e-12 * num_agents)


def test_a_joint_fit_of_a_run_without_comparisons_is_refused_and_a_separate_one_is_not(
    make_review_run: MakeRun,
) -> None:
    folder = make_review_run("paper")
    with pytest.raises(
        ValueError, match=r"transcripts\.jsonl:\d+: fit=joint needs comparisons .* Add fit=separate"
    ):
        rescore(folder, RescoreOptions(preset="robust"))
    result = rescore(folder, RescoreOptions(preset="robust", fit="separate"))
    assert by_stream(result)["r_meta"].means[0] != by_stream(result)["r_meta"].means[1]


def test_void_and_other_conversations_and_a_torn_line_are_left_out(
    make_review_run: MakeRun, transcript: Callable[..., dict[str, Any]]
) -> None:
    void = {
        "step": 3,
        "group": 0,
        "void": True,
        "void_reason": "x",
        "record": play("0", 0, "paper", agents_compare=False),
    }
    folder = make_review_run("paper", extra=[void, transcript(3, 1), {"step": 3, "group": 2}])
    with (folder / "transcripts.jsonl").open("a") as file:
        file.write('{"step": 4, "gro')
    result = rescore(folder, RescoreOptions())
    assert (result.num_conversations, result.num_void, result.num_other) == (NUM_CONVERSATIONS, 1, 2)


def test_a_run_of_another_recipe_is_refused(make_finished_run: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="no conversation to score again: 0 were void, and 60 not critique"):
        rescore(make_finished_run(), RescoreOptions(preset="paper"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            RescoreOptions(reward_weights={"r_dag": 1.0}),
            "^weights must give a finite number for each of r_sol",
        ),
        (RescoreOptions(prior_precision=0.0), "^prior_precision must be a positive number; got 0.0"),
        (RescoreOptions(noise_floor=-1.0), "^noise_floor must be"),
    ],
)
def test_mistakes_in_options_are_told_before_anything_is_read(options: RescoreOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rescore("no such folder", options)


def test_rules_that_were_stored_before_there_was_a_floor_for_solutions_have_none() -> None:
    record = ConversationRecord(question="?", rules={"fit": "joint"})
    assert stored_rules(record) == ReviewRules(solution_floor=0.0)
    given = ConversationRecord(question="?", rules=asdict(ReviewRules()))
    assert stored_rules(given) == ReviewRules()


def test_stored_rules_that_cannot_be_read_are_named_with_their_place(make_review_run: MakeRun) -> None:
    folder = make_review_run("paper")
    path = folder / "transcripts.jsonl"
    path.write_text(path.read_text().replace('"fit": "separate"', '"fit": "both"', 1))
    with pytest.raises(ValueError, match=r"transcripts\.jsonl:1: the stored rules cannot be read"):
        rescore(folder, RescoreOptions())


def test_unanswered_questions_have_rewards_but_no_truth(make_review_run: MakeRun) -> None:
    folder = make_review_run("paper")
    path = folder / "transcripts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["record"] |= {"correct": None, "correct_initial": None}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = rescore(folder, RescoreOptions())
    assert all(change.truth == (None, None) for change in result.streams)
    assert result.num_gaps == 0
    assert "Reward-truth gap over" not in rescore_text(result)


def test_the_command_prints_old_and_new_side_by_side(
    make_review_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_review_run("robust")
    assert viva.cli.main(["rescore", str(folder), "preset=paper", "reward_weights={'r_diag': 1.0}"]) == 0
    out = capsys.readouterr().out
    total = by_stream(rescore(folder, RescoreOptions(preset="paper", reward_weights={"r_diag": 1.0})))[
        "total"
    ]
    (row,) = [line.split() for line in out.splitlines() if line.startswith("total ")]
    assert row[1:] == [
        *(f"{value:.3f}" for value in (*total.means, *total.deviations)),
        *(f"{value:+.3f}" for value in (total.agreement, *total.truth)),
    ]
    assert out.startswith(f"{NUM_CONVERSATIONS} conversations (0 void and 0 of another kind left out)\n")
    assert max(map(len, out.splitlines())) <= 120


def test_what_is_missing_is_a_dash(make_review_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    result = rescore(make_review_run("paper"), RescoreOptions())
    nothing = replace(result.streams[1], means=(None, 0.5), truth=(None, None))
    monkeypatch.setattr(Rescoring, "streams", (nothing,))
    text = rescore_text(result)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("r_meta ")]
    assert (row[1], row[2], row[-2:]) == ("-", "0.500", ["-", "-"])


def test_a_function_of_ones_own_pays_stored_conversations(
    make_review_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "own.py"
    code.write_text(
        "def pay(talk):\n    return {agent: float(talk.num_agents) for agent in talk.finished}\n"
        "def fails(talk):\n    return {}[talk.question]\n"
    )
    folder = make_review_run("robust")
    result = rescore(folder, RescoreOptions(reward=f"{code}:pay"))
    total = by_stream(result)["total"]
    assert (total.means[1], total.deviations[1]) == (4.0, 0.0)
    assert viva.cli.main(["rescore", str(folder), f"reward={code}:fails"]) == 2
    assert "KeyError" in (told := capsys.readouterr().err)
    assert "own.py line 4" in told
    assert "damaged" not in told


@pytest.mark.parametrize(
    ("option", "hint"), [("prest=paper", "Did you mean 'preset'?"), ("preset=papr", "one of paper, robust")]
)
def test_an_option_that_there_is_not_is_refused_with_what_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        viva.cli.main(["rescore", str(tmp_path), option])
    assert refused.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert viva.cli.main(["rescore", str(tmp_path), "preset=paper"]) == 2
    assert "has no transcripts.jsonl" in capsys.readouterr().err


VALUES = st.integers(-50, 50).map(lambda value: value / 8)
GROUPS = st.lists(st.lists(st.tuples(VALUES, VALUES), max_size=5), max_size=6)


@settings(deadline=None)
@given(GROUPS)
def test_the_correlation_is_that_of_values_less_the_mean_of_their_conversation(
    groups: list[list[tuple[float, float]]],
) -> None:
    correlation, count = within_correlation(groups)
    usable = [np.array(pairs) for pairs in groups if len(pairs) > 1]
    centred = np.concatenate([group - group.mean(0) for group in usable]) if usable else np.zeros((0, 2))
    assert count == len(centred)
    if len(centred) == 0 or (np.abs(centred) < 1e-9).all(axis=0).any():
        assert correlation is None
    else:
        expected = (centred[:, 0] @ centred[:, 1]) / np.sqrt(np.square(centred).sum(axis=0).prod())
        assert correlation == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(GROUPS, st.lists(VALUES, min_size=6, max_size=6))
def test_easier_problems_add_nothing_to_a_correlation(
    groups: list[list[tuple[float, float]]], ease: list[float]
) -> None:
    plain, _ = within_correlation(groups)
    shifted, _ = within_correlation(
        [(x + more, y + more) for x, y in pairs] for pairs, more in zip(groups, ease, strict=False)
    )
    assert (plain is None) == (shifted is None)
    assert plain is None or shifted == pytest.approx(plain, abs=1e-9)


def test_the_known_answers_go_along_with_the_truth_and_shuffled_ones_with_nothing(
    make_review_run: MakeRun,
) -> None:
    folder = make_review_run("robust")
    (answers,) = rescore(folder, RescoreOptions(reward="answers")).streams
    assert answers.stream == "total"
    assert answers.truth[1] == pytest.approx(1.0)
    (shuffled,) = rescore(folder, RescoreOptions(reward="shuffled")).streams
    assert shuffled.means[1] == answers.means[1]
    assert shuffled.truth[1] is not None
    assert shuffled.truth[1] < 0.9
    assert rescore(folder, RescoreOptions(reward="shuffled")).streams == (shuffled,)


def test_the_majority_is_scored_on_conversations_of_any_protocol(make_run: MakeRun) -> None:
    result = rescore(make_run(), RescoreOptions(reward="majority"))
    (change,) = result.streams
    assert change.means[1] is not None
    assert 0 < change.means[1] <= 1
    assert result.num_other == 0
    assert "reward" in rescore_text(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "log_probability"}, "kept the tokens of no conversation, .* sampling logprobs"),
        ({"reward": "shuffled_log_probability"}, "kept the tokens of no conversation"),
        ({"reward": "peer_prediction"}, "needs what a scorer says of the replies"),
        ({"reward": "judge_answer"}, "needs the judge's own answer, which is not known here"),
        ({"reward": "r_sol"}, "'r_sol' pays critique self-play; protocol .* does not ask for"),
        ({"reward": "comas"}, "'comas' pays critique self-play"),
        ({"reward": "serl_votes"}, "does not ask for .*verdict"),
        ({"reward": "majorty"}, "Did you mean 'majority'"),
        ({"reward": "majority", "fit": "joint"}, "fit are rules of critique self-play; leave them out"),
    ],
)
def test_a_reward_that_transcripts_do_not_suffice_for_is_refused(
    make_run: MakeRun, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rescore(make_run(), RescoreOptions(**options))


def test_the_streams_of_a_review_are_rewards_by_name(make_review_run: MakeRun) -> None:
    folder = make_review_run("robust")
    whole = by_stream(rescore(folder, RescoreOptions()))
    for name in ("r_sol", "r_diag"):
        (alone,) = rescore(folder, RescoreOptions(reward=name)).streams
        assert alone.means == (whole["total"].means[0], whole[name].means[1])
    (total,) = rescore(folder, RescoreOptions(reward="peer_review")).streams
    assert total.means[1] == pytest.approx(total.means[0])
    assert total.agreement == pytest.approx(1.0)


def test_a_tournament_is_computed_from_its_comparisons(make_run: MakeRun) -> None:
    folder = make_run()
    for _, transcript in iter_transcripts(folder, []):
        record = transcript.record
        assert record is not None
        scores: dict[int, list[float]] = {}
        for pair in record.comparisons:
            assert pair.score is not None
            scores.setdefault(pair.second, []).append(pair.score)
            scores.setdefault(pair.first, []).append(-pair.score)
        assert scores
        expected = {agent: sum(own) / len(own) for agent, own in scores.items()}
        paid = {name: asyncio.run(find_reward(name).stored_pay(record, 0)) for name in ("tournament", "serl")}
        assert paid["tournament"] == pytest.approx(expected)
        assert set(paid["serl"]) == set(expected)


def test_all_rewards_stand_side_by_side_and_the_others_are_named_with_a_reason(
    make_review_run: MakeRun,
) -> None:
    folder = make_review_run("robust")
    result = rescore(folder, RescoreOptions(reward="all"))
    rows = by_stream(result)
    assert set(result.unpaid) >= {"log_probability", "tournament", "serl", "peer_prediction", "judge_answer"}
    for name in ("answers", "majority", "maca", "peer_review", "r_sol", "r_diag", "comas", "shuffled"):
        (alone,) = rescore(folder, RescoreOptions(reward=name)).streams
        assert (rows[name].means, rows[name].truth, rows[name].agreement) == (
            alone.means,
            alone.truth,
            alone.agreement,
        )
    assert rows["answers"].truth[1] == pytest.approx(1.0)
    text = rescore_text(result)
    assert re.search(r"^\(paid\) +6 ", text, re.M)
    assert re.search(r"^comas +6 ", text, re.M)
    assert not re.search(r"^tournament ", text, re.M)
    assert "  tournament: the reward 'tournament' needs comparisons of final solutions" in text
    assert "viva rescore RUN judge=... asks a judge anew" in text
    assert "scorer_model=NAME, or scorer_policy=initial, asks a scorer anew" in text


def test_of_plain_paper_runs_what_needs_a_joint_fit_is_named(make_review_run: MakeRun) -> None:
    result = rescore(make_review_run("paper"), RescoreOptions(reward="all"))
    assert "fit=joint needs comparisons" in result.unpaid["comas"]
    assert by_stream(result)["r_sol"].num_conversations == NUM_CONVERSATIONS


def test_a_stored_score_that_could_not_be_read_is_no_number(make_review_run: MakeRun) -> None:
    folder = make_review_run("paper")
    lines = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        scores = {str(agent): [0.5 if number else None] for agent in range(4)}
        line["record"] |= {"criteria": [{"text": "It is short."}], "rubric": scores}
    (folder / "transcripts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"transcripts\.jsonl:1: the judge could not be read about solution"):
        rescore(folder, RescoreOptions(reward="rubric"))
    result = rescore(folder, RescoreOptions(reward="all"))
    assert "could not be read" in result.unpaid["rubric"]
    assert len(result.rewards["rubric"]) == NUM_CONVERSATIONS - 1
