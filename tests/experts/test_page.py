"""docs/estimators.md says what the code does, and its default follows from its own tables."""

import re
from pathlib import Path

import pytest

from viva.experts.estimation import Need
from viva.experts.estimators import DEFAULT_ESTIMATOR, ESTIMATORS

PAGE = (Path(__file__).parents[2] / "docs" / "estimators.md").read_text(encoding="utf-8")

NEEDS = {
    "nothing": set(),
    "scoring": {Need.OLD_LOGPROBS},
    "scoring, other contexts": {Need.OLD_LOGPROBS, Need.CONTEXT_LOGPROBS},
    "teacher's context": {Need.CONTEXT_LOGPROBS},
}
PER_SEQUENCE = ("seq_tis", "seq_is", "balance")


def measured(name: str) -> dict[str, list[list[float]]]:
    """Arm to its cells, each a list of figures."""
    text = re.search(rf"<!-- begin {re.escape(name)} -->\n(.*?)\n<!-- end", PAGE, re.S).group(1)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {row[0]: [[float(number) for number in cell.split("/")] for cell in row[1:]] for row in rows}


def test_the_table_of_estimators_is_the_registry():
    rows = {
        row[0]: row for row in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (yes|no) \| (.+) \|$", PAGE, re.M)
    }
    assert list(rows) == list(ESTIMATORS)
    for name, _, needs, unbiased, baselines in rows.values():
        kind = ESTIMATORS[name]
        assert kind.needs == NEEDS[needs]
        assert kind.is_unbiased == (unbiased == "yes")
        assert [f"`{baseline}`" for baseline in kind.baselines] == baselines.split(", ")


def test_the_default_follows_from_the_rule_and_the_tables():
    hard, medium = measured("hard mixture, batch cosine"), measured("medium mixture, batch cosine")
    exact = measured("hard mixture, mean cosine / length / artefact")
    medium_artefact = measured("medium mixture, artefact")

    def qualifies(arm: str) -> bool:
        found = re.fullmatch(r"`(\w+)`, (\w+)", arm)
        if not found or found[1] in PER_SEQUENCE or ESTIMATORS[found[1]].needs != {Need.OLD_LOGPROBS}:
            return False
        artefacts = [cell[2] for cell in exact[arm]] + [cell[0] for cell in medium_artefact[arm]]
        return max(artefacts) <= 0.05

    cosines = {
        arm: sum(cell[0] for cell in hard[arm] + medium[arm]) / 8 for arm in sorted(hard) if qualifies(arm)
    }
    tied = [arm for arm, cosine in cosines.items() if cosine >= max(cosines.values()) - 0.01]
    chosen = min(tied, key=lambda arm: sum(cell[1] for cell in exact[arm]))
    assert chosen == f"`{DEFAULT_ESTIMATOR}`, {ESTIMATORS[DEFAULT_ESTIMATOR].baselines[0]}"


@pytest.mark.parametrize("problem", ["hard", "medium"])
def test_balance_is_near_the_best_arm_in_every_column(problem):
    cosines = measured(f"{problem} mixture, batch cosine")
    best = [max(row[column][0] for row in cosines.values()) for column in range(4)]
    for value, top in zip(cosines["`balance`, weighted"], best, strict=True):
        assert value[0] >= top - 0.03 - 1e-9


def test_the_clip_on_the_whole_ratio_puts_style_where_the_ratios_alone_put_none():
    exact = measured("hard mixture, mean cosine / length / artefact")
    clipped = [cell[2] for cell in exact["PPO clip on the whole ratio, stratum"]]
    plain = [cell[2] for cell in exact["`importance_sampling`, stratum"]]
    assert max(plain) < 0.01
    assert 0.05 < min(clipped) <= max(clipped) <= 0.2


def test_what_the_page_calls_unbiased_has_the_true_gradient_in_its_tables():
    exact = measured("hard mixture, mean cosine / length / artefact")
    for arm in ("`balance`, weighted", "`balance`, prompt_union", "`seq_is`, weighted"):
        assert exact[arm] == [[1.0, 1.0, 0.0]] * 4


def test_the_page_is_short_and_the_files_it_names_are_there():
    assert PAGE.count("\n") < 300
    for name in re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", PAGE):
        assert (Path(__file__).parents[2] / name).is_file(), name
