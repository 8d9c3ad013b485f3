"""The benchmark of the alarms: planted voters do what they say, levels hold what they state, tables are those of a
ledger computed by hand."""

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import alarms
import pytest
from _alarm_figures import (
    KEPT,
    accuracy_at,
    collapse_step,
    collapse_table,
    first_alarms,
    first_gap,
    gap_level,
    gumbel,
    independent_level,
    levels_of,
    levels_text,
    rows_of,
    tables,
)
from _intervals import poisson, wilson
from _planted_votes import KINDS, Planted, PlantedDataset, changed_vote, plant
from review_agents import HONEST, Population, builder_of, but, everyone, quality
from tinker_cookbook.rl.types import RLDataset

from viva.judging.ballots import Preference, Tie, Vote, pair_of
from viva.judging.ranking import RankingReply
from viva.judging.records import ConversationRecord
from viva.run.alarms import ALARMS, MEASURED, Level, read_levels
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.rollouts import run_group

LEDGER = Path(__file__).parents[1] / "benchmarks" / "alarms.jsonl"


def wordy(best: int) -> str:
    """Filler: the better a solution, the shorter."""
    return "x" * (40 - 9 * best)


AGENTS = but(
    HONEST,
    proposal=lambda p: f"quality {p.agent_id} by {p.agent_id} {wordy(p.agent_id)}",
    revision=lambda p: f"Revise: quality {p.agent_id + 5} by {p.agent_id} {wordy(p.agent_id)[1:]}",
)
"""Honest; agent 3 is the best, every revision is better, and shorter, than what it revises."""


async def played(kind: str, *, strength: float = 1.0, seed: int = 0) -> ConversationRecord:
    planted = Planted(kind=kind, strength=strength, seed=seed)
    builder = plant(builder_of(seed=seed), planted)
    outcome = await run_group(builder, Population(agents=everyone(AGENTS)), max_retries=0)
    assert outcome.void_reason is None
    return ConversationRecord.model_validate(builder.record())


def votes_of(record: ConversationRecord) -> dict[tuple[str, int], tuple[Vote, ...]]:
    return {
        (turn.segment, turn.agent_id): turn.response.preferences
        for turn in record.turns
        if isinstance(turn.response, RankingReply)
    }


def turned(record: ConversationRecord) -> dict[int, list[bool]]:
    """By voter, whether each preference goes to the worse agent; agents are as good as their number."""
    found: dict[int, list[bool]] = {agent: [] for agent in range(4)}
    for (_, voter), votes in votes_of(record).items():
        for vote in votes:
            assert isinstance(vote, Preference)
            found[voter].append(vote.winner < vote.loser)
    return found


async def test_honest_voters_and_their_judge_stay_as_they_are() -> None:
    record = await played("honest")
    assert not any(any(each) for each in turned(record).values())
    assert [each.outcome for each in record.comparisons] == ["B", "A"] * 4


@pytest.mark.parametrize("kind", ["inverted", "length"])
async def test_all_votes_and_comparisons_are_turned_where_the_worse_is_longer(kind: str) -> None:
    record = await played(kind)
    assert all(all(each) for each in turned(record).values())
    assert [each.outcome for each in record.comparisons] == ["A", "B"] * 4
    assert all((each.score or 0) * (1 if each.outcome == "A" else -1) < 0 for each in record.comparisons)
    for each in record.comparisons:
        assert each.probabilities is not None
        assert max(each.probabilities) == each.probabilities[0 if each.outcome == "A" else 1]


async def test_colluders_prefer_each_other_and_are_honest_otherwise_as_are_all_others() -> None:
    record = await played("colluding")
    for (_, voter), votes in votes_of(record).items():
        for vote in votes:
            assert isinstance(vote, Preference)
            partner = {0: 1, 1: 0}.get(voter)
            expected = partner if partner in (vote.winner, vote.loser) else max(vote.winner, vote.loser)
            assert vote.winner == expected
    assert [each.outcome for each in record.comparisons] == ["B", "A"] * 4


async def test_random_voters_toss_coins_which_the_seed_fixes() -> None:
    all_random = [turned(await played("all_random", seed=seed)) for seed in range(12)]
    half_random = [turned(await played("half_random", seed=seed)) for seed in range(12)]
    for voter in range(4):
        tossed = [each for run in all_random for each in run[voter]]
        assert 0.3 < statistics.fmean(tossed) < 0.7
        half = statistics.fmean(each for run in half_random for each in run[voter])
        assert (0.3 < half < 0.7) if voter in (0, 1) else half == 0.0
    assert turned(await played("all_random", seed=3)) == all_random[3]


async def test_drifting_voters_go_by_length_as_often_as_their_strength_says() -> None:
    shares = {}
    for strength in (0.0, 0.3, 1.0):
        runs = [turned(await played("drifting", strength=strength, seed=seed)) for seed in range(10)]
        shares[strength] = statistics.fmean(x for run in runs for each in run.values() for x in each)
    assert (shares[0.0], shares[1.0]) == (0.0, 1.0)
    assert 0.15 < shares[0.3] < 0.45


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_written_which_pairs_were_voted_on_and_the_truth_stay(kind: str) -> None:
    honest, record = await played("honest"), await played(kind)
    assert [turn.text for turn in record.turns] == [turn.text for turn in honest.turns]
    before, after = votes_of(honest), votes_of(record)
    for key, votes in before.items():
        assert [pair_of(vote) for vote in after[key]] == [pair_of(vote) for vote in votes]
    assert record.correct == honest.correct


@pytest.mark.parametrize("kind", KINDS)
def test_a_tie_stays_a_tie(kind: str) -> None:
    assert changed_vote(Tie(0, 1), 2, {0: 1, 1: 5}, Planted(kind=kind), "") == Tie(0, 1)


def test_an_unknown_kind_of_voters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"voters must be one of honest, .*; got 'invertd'"):
        Planted(kind="invertd")


class Batches(RLDataset):
    def __len__(self) -> int:
        return 10

    def get_batch(self, index: int) -> list[MultiAgentConversationEnvGroupBuilder]:
        return [builder_of(seed=index)]


def test_votes_are_honest_before_the_onset_and_drift_evenly_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[int, Planted] = {}
    monkeypatch.setattr(
        "_planted_votes.plant", lambda builder, planted: seen.setdefault(planted.seed, planted)
    )
    dataset = PlantedDataset(honest=Batches(), kind="drifting", onset=6)
    for index in range(10):
        dataset.get_batch(index)
    assert [each.strength for each in seen.values()] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert list(seen) == [6, 7, 8, 9]


def test_the_scripted_agents_are_as_good_as_their_numbers() -> None:
    assert [quality(f"quality {agent} by {agent} {wordy(agent)}") for agent in range(4)] == [0, 1, 2, 3]


def line(kind: str, seed: int, ties: list[float], **more: Any) -> dict[str, Any]:
    count = len(ties)
    steps: dict[str, list[float | None]] = {name: [None] * count for name in KEPT}
    steps |= {"sign/ties": list(ties), "rollout/groups": [4.0] * count, "rollout/void": [0.0] * count}
    steps |= {"reward_truth_gap": more.get("gap", [0.1] * count)}
    return {
        "kind": kind,
        "seed": seed,
        "steps": steps,
        "accuracy": more.get("accuracy", [(0, 0.5), (count, 0.6)]),
        "greedy": [(0, 0.9), (6, 0.9 if kind == "honest" else 0.8)],
    }


def honest_line(rng: random.Random, seed: int, num_steps: int = 20) -> dict[str, Any]:
    """A run whose own means differ a little, with noise that lasts, as that of training does."""

    def drawn() -> list[float]:
        mean, value, values = rng.gauss(0.5, 0.02), 0.0, []
        for _ in range(num_steps):
            value = 0.2 * value + rng.gauss(0.0, 0.1)
            values.append(mean + value)
        return values

    found = line("honest", seed, drawn())
    found["steps"] |= {alarm.metric: drawn() for alarm in ALARMS.values()}
    return found


@pytest.mark.parametrize("own_start", [False, True])
def test_levels_from_honest_runs_have_the_stated_rate_of_false_alarms_on_others(own_start: bool) -> None:
    rng, shares = random.Random(0), []
    for _ in range(10):
        runs = [honest_line(rng, seed) for seed in range(10)]
        levels = levels_of(runs, own_start=own_start, target=0.1)
        assert levels.keys() == ALARMS.keys()
        fresh = [first_alarms(rows_of(honest_line(rng, 1)), levels) for _ in range(40)]
        shares.append(statistics.fmean(bool(first) for first in fresh))
    assert 0.03 < statistics.fmean(shares) < 0.18, "ten runs set levels that a tenth of the others reach"


def test_a_level_for_independent_figures_is_that_of_the_tables() -> None:
    """A level of 4 has 336 steps between false alarms of one side, one of 5 has 938 (Hawkins and Olwell, 1998)."""
    assert independent_level(336, 1.0) == pytest.approx(4.0, abs=0.02)
    assert independent_level(938, 1.0) == pytest.approx(5.0, abs=0.02)


def test_only_honest_runs_set_levels_and_never_that_of_the_seed_left_out() -> None:
    rng = random.Random(1)
    runs = [honest_line(rng, seed) for seed in range(6)]
    wild = line("honest", 7, [0.0, 9.0] * 10, gap=[0.9] * 20)
    tampered = line("inverted", 2, [5.0, -9.0] * 10, gap=[0.9] * 20)
    assert levels_of([*runs, wild, tampered], own_start=False, without=7) == levels_of(runs, own_start=False)
    assert levels_of([*runs, wild, tampered], own_start=False) != levels_of(runs, own_start=False)
    assert gap_level([*runs, wild, tampered], without=7) == gap_level(runs) != gap_level([*runs, wild])
    with pytest.raises(ValueError, match="3 or more honest runs; there are 2"):
        levels_of(runs[:3], own_start=False, without=2)


def test_a_gumbel_quantile_is_exceeded_as_often_as_stated() -> None:
    rng = random.Random(0)
    drawn = [-math.log(rng.expovariate(1.0)) for _ in range(20_000)]
    limit = gumbel(drawn, 0.1)
    assert statistics.fmean(value > limit for value in drawn) == pytest.approx(0.1, abs=0.01)


def test_levels_are_a_file_that_runs_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    levels = levels_of([honest_line(rng, 2 * seed) for seed in range(4)], own_start=False)
    never = [line("honest", seed, [0.5] * 9) for seed in range(3)]
    assert levels_of(never, own_start=False) == {}, "a sign that never changes has no unit"
    path = tmp_path / "levels.json"
    path.write_text(levels_text(levels))
    found = read_levels(path)
    assert found.keys() == ALARMS.keys()
    assert found["ties"].level == pytest.approx(levels["ties"].level, abs=1e-4)


def test_every_run_is_watched_with_levels_of_the_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {
        seed: {"ties": Level(reference=0.5, unit=0.2, level=2.0 + 98 * (seed == 2))} for seed in (1, 2, 3)
    }
    monkeypatch.setattr("_alarm_figures.levels_of", lambda lines, *, own_start, without: levels[without])
    monkeypatch.setattr("_alarm_figures.gap_level", lambda lines, *, without: 1.0)
    text = tables([line("inverted", seed, [0.5, 0.9, 0.9, 0.9]) for seed in (1, 3, 2)], onset=1)
    assert "| inverted | 3 | 0 | 67 (21 to 94) | 1 (1 to 1) | - | - |" in text, "the level for seed 2 is high"


def test_the_first_alarm_is_that_of_the_sum() -> None:
    levels = {"ties": Level(reference=0.5, unit=0.2, level=2.0)}
    # four conversations: z = 2 a step, so the sum is 1.5, 3.0: above 2 in the second changed step
    assert first_alarms(rows_of(line("length", 0, [0.5, 0.5, 0.7, 0.7, 0.7])), levels) == {"ties": 3}
    assert first_alarms(rows_of(line("length", 0, [0.5] * 5)), levels) == {}


def test_the_gap_fires_when_its_mean_over_five_steps_is_above_the_level() -> None:
    gaps = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    rows = rows_of(line("inverted", 0, [0.5] * 8, gap=gaps))
    assert first_gap(rows, 0.35) == {"reward_truth_gap": 6}
    assert first_gap(rows, 0.95) == {}


def test_accuracy_between_evaluations_is_on_a_straight_line() -> None:
    known = {"accuracy": [(0, 0.5), (5, 0.6), (10, 0.4)]}
    assert [accuracy_at(known, step) for step in (0, 2, 5, 10)] == pytest.approx([0.5, 0.54, 0.6, 0.4])
    with pytest.raises(ValueError, match="known from step 0 to 10; asked was 11"):
        accuracy_at(known, 11)


def test_a_run_has_collapsed_below_half_of_its_best_accuracy() -> None:
    assert collapse_step([(0, 0.9), (10, 0.5), (20, 0.44), (30, 0.1)]) == 20
    assert collapse_step([(0, 0.5), (10, 0.9), (20, 0.46)]) is None


def test_a_collapse_is_told_beside_the_step_at_which_alarms_would_have_ended_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = Level(reference=0.5, unit=0.2, level=2.0)
    monkeypatch.setattr(
        "_alarm_figures.levels_of",
        lambda lines, *, own_start, without: {} if own_start else {"ties": level},
    )
    fallen = line("-", 0, [0.5, 0.5, 0.5, 0.7, 0.7, 0.7], accuracy=[(0, 0.8), (3, 0.9), (6, 0.3)])
    lasting = line("-", 1, [0.5, 0.5], accuracy=[(0, 0.8), (2, 0.7)])
    rows = collapse_table([fallen | {"reward": "r_sol"}, lasting | {"reward": "serl"}], []).splitlines()
    # sums of 1.5 and 3 after the steps with 0.7, at a level of 2
    assert rows[2] == "| `r_sol` | step 6 | 80.0, 90.0, 30.0 | none |  | step 5, `ties` | 50.0 |"
    assert rows[3] == "| `serl` | no, in 2 steps | 80.0, 80.0, 70.0 | none |  | none |  |"


def test_intervals_are_those_of_the_textbook() -> None:
    assert wilson(3, 10) == pytest.approx((0.1078, 0.6032), abs=1e-4)
    assert poisson(0) == pytest.approx((0.0, 3.6889), abs=1e-4)
    assert poisson(5) == pytest.approx((1.6235, 11.6683), abs=1e-4)


def test_the_tables_of_a_ledger_made_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    level = {"ties": Level(reference=0.5, unit=0.2, level=2.0)}
    monkeypatch.setattr("_alarm_figures.levels_of", lambda lines, *, own_start, without: level)
    monkeypatch.setattr("_alarm_figures.gap_level", lambda lines, *, without: 0.3)
    quiet, loud = [0.5] * 6, [0.5, 0.5, 0.5, 0.7, 0.7, 0.7]
    ledger = [
        line("honest", 0, quiet, accuracy=[(0, 0.5), (6, 0.8)]),
        line("honest", 1, quiet, accuracy=[(0, 0.5), (6, 0.8)]),
        line("honest", 3, [0.9, 0.9, 0.5, 0.5, 0.5, 0.5], accuracy=[(0, 0.5), (6, 0.8)]),
        # fires in the second of the changed steps: 5 steps are trained, the accuracy is 0.75 against 0.5
        line("inverted", 0, loud, accuracy=[(0, 0.5), (6, 0.5)], gap=[0.1, 0.1, 0.9, 0.9, 0.9, 0.9]),
        line("inverted", 1, quiet, accuracy=[(0, 0.5), (6, 0.5)]),
    ]
    text = tables(ledger, onset=3)
    # one honest run fires in its first step, so one alarm in 6 + 6 + 1 steps
    assert "1 of 3 honest runs had a false alarm; per 100 steps: 7.7 (0.2 to 42.9)" in text
    # so does the gap: its first mean over five steps is 0.58
    row = "| inverted | 2 | 0 | 50 (9 to 91) | 2 (2 to 2) | +27.5 (+25.0, +30.0) | +30.0 (+30.0, +30.0) "
    row += "| +10.0 (+10.0, +10.0) |"
    assert text.count(row) == 3
    assert "| voters | runs | `ties` |" in text  # no column for what no run has
    # it fired in each of these runs, and was the first, as the only one
    assert text.count("| inverted | 2 | 1 / 1 |") == text.count("| honest | 3 | 1 / 1 |") == 2
    # of the three steps after the change: 0.7 in one run and 0.5 in the other
    assert "| inverted | 2 | 0.600 |" in text
    assert "| honest | 3 | 0.500 |" in text


def test_the_levels_of_the_package_are_those_of_the_ledger() -> None:
    """After new honest runs: `python benchmarks/alarms.py levels` prints what `MEASURED` has to be."""
    first, second = (
        levels_of([json.loads(text) for text in path.read_text().splitlines()], own_start=True)
        for path in (LEDGER, LEDGER.with_name("alarms_initial_judge.jsonl"))
    )
    found = first | {name: level for name, level in second.items() if name not in first}
    assert found.keys() == MEASURED.keys()
    for name, level in found.items():
        assert level.reference is MEASURED[name].reference is None
        assert (level.unit, level.level) == pytest.approx(
            (MEASURED[name].unit, MEASURED[name].level), rel=0.01
        )


@pytest.mark.parametrize("name", ["collapse.jsonl", "collapse_kl.jsonl"])
def test_the_page_has_the_collapses_of_the_ledger(name: str) -> None:
    runs, watched = (
        [json.loads(text) for text in path.read_text().splitlines()]
        for path in (LEDGER.with_name(name), LEDGER)
    )
    rows = collapse_table(runs, watched).splitlines()[2:]
    page = (LEDGER.parents[1] / "docs" / "alarms.md").read_text()
    assert [row for row in rows if row not in page] == []


def test_the_ledgers_have_every_run_that_the_page_is_made_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any, **__: Any) -> None:
        pytest.fail("a run is missing")

    monkeypatch.setattr(alarms, "train", train)
    for command, options in alarms.ALL:
        alarms.follow(command, dict(options))
    assert "| `serl_votes` | step 150 |" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match="a run is missing"):
        alarms.follow("collapse", {"seed": "1", "folder": str(tmp_path)})
