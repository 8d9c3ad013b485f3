"""Which charts a report shows, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from viva.view.answers import chart_places, curve_layout, group_titles, thin

KEYS = st.sets(
    st.from_regex(
        r"(test/|test/conversation/|judge/|time/)?(agent_\d{1,2}/)?[a-z\u00b2\u0664]{1,5}(_stderr)?",
        fullmatch=True,
    )
)


def drawn(keys: list[str]) -> dict[str, dict[str, list[str]]]:
    """Names of curves by section and chart."""
    return {
        section: {chart: [name for _, name in members] for chart, members in charts.items()}
        for section, charts in chart_places(keys).items()
    }


@given(KEYS)
def test_every_metric_is_drawn_once_or_is_the_band_of_another(keys: set[str]) -> None:
    found = [
        key for charts in chart_places(keys).values() for members in charts.values() for key, _ in members
    ]
    bands = {key for key in keys if key.endswith("_stderr") and key.removesuffix("_stderr") in keys}
    assert sorted(found) == sorted(keys - bands)


def test_sections_come_by_groups_and_the_important_ones_are_open() -> None:
    keys = ["time/total", "optim/lr", "agent_0/reward", "parse/ok", "judge/tie_rate", "reward/mean"]
    keys += ["test/conversation/reward/mean", "test/direct_accuracy", "episode_length", "correct/final"]
    keys += ["zeal/x", "ardour/x"]
    shown = [
        (section["title"], section["open"]) for group in curve_layout(keys) for section in group["sections"]
    ]
    learning = [("test", True), ("correct", True), ("run", False), ("test/conversation", False)]
    rewards = [("reward", True), ("agents", True), ("judge", True), ("parse", True)]
    rest = [("time", False), ("ardour", False), ("zeal", False)]
    assert shown == [*learning, ("optim", False), *rewards, *rest]


def test_one_metric_of_all_agents_is_one_chart_in_the_order_of_the_agents() -> None:
    keys = [f"agent_{agent}/{metric}" for agent in range(12) for metric in ("reward", "win_rate")]
    names = [f"agent {agent}" for agent in range(12)]
    assert drawn(keys) == {"agents": {"reward": names, "win_rate": names}}


def test_rates_of_one_whole_share_a_chart() -> None:
    keys = ["judge/preference_A_rate", "judge/preference_B_rate", "judge/tie_rate", "judge/flip_rate"]
    assert drawn(keys) == {"judge": {"flip_rate": ["flip_rate"], "verdicts": ["A", "B", "tie"]}}


def test_the_metrics_of_test_conversations_stand_together() -> None:
    keys = ["reward/mean", "reward/max", "agent_0/reward", "agent_1/reward", "judge/tie_rate", "num_turns"]
    assert drawn([f"test/conversation/{key}" for key in keys])["test/conversation"] == {
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
    found = drawn(keys)
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
    assert list(found) == sorted(found)


@given(KEYS)
def test_every_section_is_in_one_group(keys: set[str]) -> None:
    titles = list(chart_places(keys))
    grouped = [title for _, members in group_titles(titles) for title in members]
    assert sorted(grouped) == sorted(titles)


@given(st.lists(st.floats(-1e6, 1e6), max_size=400), st.integers(8, 100))
def test_a_thinned_curve_keeps_its_ends_and_spikes(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = thin(points, most)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(points)
    assert len(kept) <= max(most, 4) + 4
    if values:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert {min(values), max(values)} <= {value for _, value in kept}
