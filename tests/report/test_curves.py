"""Which charts a report shows, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from viva.view.chart_places import chart_places, group_titles, sections

POINTS = ((0, 0.0), (1, 1.0))

KEYS = st.sets(
    st.from_regex(
        r"(test/|test/conversation/|judge/|time/)?(agent_\d{1,2}/)?[a-z\u00b2\u0664]{1,5}(_stderr)?",
        fullmatch=True,
    )
)


@given(KEYS)
def test_every_metric_is_drawn_once_or_is_the_band_of_another(keys: set[str]) -> None:
    charts = [chart for section in sections({"a": dict.fromkeys(keys, POINTS)}) for chart in section.charts]
    drawn = [key for chart in charts for key in chart.keys]
    bands = {key for key in keys if key.endswith("_stderr") and key.removesuffix("_stderr") in keys}
    assert sorted(drawn) == sorted(keys - bands)
    banded = {key for chart in charts for key, s in zip(chart.keys, chart.series, strict=True) if s.band}
    assert banded == {key.removesuffix("_stderr") for key in bands}


def test_important_sections_come_first_and_open_and_time_comes_last() -> None:
    keys = ["time/total", "optim/lr", "agent_0/reward", "parse/ok", "judge/tie_rate", "reward/mean"]
    keys += ["test/conversation/reward/mean", "test/direct_accuracy", "episode_length", "correct/final"]
    found = [(section.title, section.is_open) for section in sections({"a": dict.fromkeys(keys, POINTS)})]
    first = [(title, True) for title in ("test", "correct", "reward", "judge", "parse", "agents")]
    rest = [(title, False) for title in ("optim", "run", "test/conversation", "time")]
    assert found == first + rest


def test_one_metric_of_all_agents_is_one_chart_in_the_order_of_the_agents() -> None:
    keys = [f"agent_{agent}/{metric}" for agent in range(12) for metric in ("reward", "win_rate")]
    (section,) = sections({"a": dict.fromkeys(keys, POINTS)})
    assert [chart.title for chart in section.charts] == ["reward", "win_rate"]
    assert [series.name for series in section.charts[0].series] == [f"agent {agent}" for agent in range(12)]


def test_rates_of_one_whole_share_a_chart() -> None:
    keys = ["judge/preference_A_rate", "judge/preference_B_rate", "judge/tie_rate", "judge/flip_rate"]
    (section,) = sections({"a": dict.fromkeys(keys, POINTS)})
    names = {chart.title: [series.name for series in chart.series] for chart in section.charts}
    assert names == {"flip_rate": ["flip_rate"], "verdicts": ["A", "B", "tie"]}


def test_the_metrics_of_test_conversations_stand_together() -> None:
    keys = ["reward/mean", "reward/max", "agent_0/reward", "agent_1/reward", "judge/tie_rate", "num_turns"]
    (section,) = sections({"a": {f"test/conversation/{key}": POINTS for key in keys}})
    assert {chart.title: [series.name for series in chart.series] for chart in section.charts} == {
        "agents/reward": ["agent 0", "agent 1"],
        "judge/verdicts": ["tie"],
        "reward/highest, mean and lowest": ["max", "mean"],
        "run/num_turns": ["num_turns"],
    }


def test_the_figures_of_a_review_share_charts_where_they_say_more_together() -> None:
    keys = [
        "rank_correlation",
        "reward_truth_gap",
        "flip/right_to_wrong",
        "flip/wrong_to_right",
        "episode_length",
    ]
    keys += [f"credit/r_sol/{figure}" for figure in ("max", "mean", "min", "std")] + ["credit/r_meta/std"]
    keys += [f"judge/{stage}/tie_rate" for stage in ("ranking", "verdict", "revision")]
    keys += ["parse/critique/ok", "parse/critique/repaired", "critiques/given", "critiques/received"]
    found = {
        section.title: {chart.title: [series.name for series in chart.series] for chart in section.charts}
        for section in sections({"a": dict.fromkeys(keys, POINTS)})
    }
    assert found == {
        "truth": {
            "what revising does": ["right to wrong", "wrong to right"],
            "rank_correlation": ["rank_correlation"],
            "reward_truth_gap": ["reward_truth_gap"],
        },
        "credit": {"spread": ["r_meta", "r_sol"], "r_sol: highest, mean and lowest": ["max", "mean", "min"]},
        "judge": {"tie_rate of the rankings": ["ranking", "verdict"], "revised against initial": ["tie"]},
        "parse": {"critique": ["ok", "repaired"]},
        "critiques": {"critiques of an agent": ["given", "received"]},
        "run": {"episode_length": ["episode_length"]},
    }
    assert list(found) == ["truth", "credit", "judge", "parse", "critiques", "run"]


def test_two_runs_share_charts_in_equal_colours_and_the_second_is_dashed() -> None:
    first = {"judge/tie_rate": POINTS, "judge/invalid_rate": POINTS}
    (section,) = sections({"a": first, "b": {"judge/tie_rate": POINTS, "judge/flip_rate": POINTS}})
    found = {
        chart.title: [(series.name, series.colour, series.is_dashed) for series in chart.series]
        for chart in section.charts
    }
    assert found == {
        "flip_rate": [("b: flip_rate", 0, True)],
        "verdicts": [("a: invalid", 0, False), ("a: tie", 1, False), ("b: tie", 1, True)],
    }


@given(KEYS)
def test_every_section_is_in_one_group(keys: set[str]) -> None:
    titles = list(chart_places(keys))
    grouped = [title for _, members in group_titles(titles) for title in members]
    assert sorted(grouped) == sorted(titles)
