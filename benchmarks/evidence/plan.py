"""The plan of the bench: the contrasts that were named, and all beds, arms and seeds, a stage after the other."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from evidence.arms import ARMS, LARGEST_RATE, NAMED, SMALLEST_RATE
from evidence.beds import LARGE, LEVELS, REAL, WARM

RARE_ARMS = (
    *("answers", "group_32", "hint", "hint_iid"),
    *("few", "few_group_32", "few_hint", "few_hint_iid"),
)
"""Arms of the beds of rare successes."""
LONG_ARMS = tuple(name for name, arm in ARMS.items() if arm.prolongs is not None)
"""Rewards that are followed for ten budgets."""
RATE_ARMS = (f"majority_rate_{SMALLEST_RATE:g}", f"r_sol_rate_{LARGEST_RATE:g}")
"""Voting and r_sol at learning rates beyond `LEARNING_RATES`."""

CONTRASTS = (
    ("r_sol", "majority"),
    ("critique", "majority"),
    ("preference", "majority"),
    ("swap", "majority"),
    ("swap_majority", "majority"),
    ("preference", "preference_alone"),
    ("league", "preference"),
    ("preference", "judged"),
    ("judged", "majority"),
    ("judged", "judged_rare"),
    ("judged_initial", "judged"),
    ("judged_better", "judged"),
    ("preference_better", "judged_better"),
    ("preference_better", "preference"),
    ("preference_initial", "preference"),
    ("preference_initial", "majority"),
    ("preference_answers_first", "preference"),
    ("preference_answers_first", "majority"),
    ("rubric", "majority"),
    ("rubric", "log_probability"),
    ("rubric_answers_first", "rubric"),
    ("rubric_answers_first", "majority"),
    ("rubric_answers_first", "answer_current"),
    ("rubric_initial", "rubric_answers_first"),
    ("rubric_initial", "answer_initial"),
    ("rubric_initial", "majority"),
    ("r_sol_labels", "r_sol"),
    ("r_sol_labels", "majority"),
    ("r_sol_steps", "majority"),
    ("r_sol_steps", "r_sol"),
    ("r_sol", "serl"),
    ("r_sol", "comas"),
    ("r_sol", "serl_votes"),
    ("serl_votes", "majority"),
    ("r_sol", "maca"),
    ("r_sol", "log_probability"),
    ("r_sol", "peer_prediction"),
    ("peer_prediction_better", "peer_prediction"),
    ("r_sol", "r_meta"),
    ("r_sol", "r_diag"),
    ("r_sol", "critique"),
    ("r_sol", "judged"),
    ("r_sol", "no_exchange"),
    ("r_sol", "foreign_critiques"),
    ("r_sol", "shuffled_critiques"),
    ("r_sol_floor_0.1", "r_sol"),
    ("r_sol_floor_0.1", "majority"),
    ("critique", "critique_shuffled"),
    ("r_sol", "critique_shuffled"),
    ("apart", "critique"),
    ("apart", "r_sol"),
    ("majority", "shuffled"),
    ("answer_ema", "majority"),
    ("answer_initial", "majority"),
    ("answer_ema", "answer_current"),
    ("answer_initial", "answer_current"),
)
WARM_CONTRASTS = (
    *CONTRASTS,
    ("worked_frozen", "worked"),
    ("worked_frozen_steps", "worked_steps"),
    ("worked_frozen_steps", "peers_frozen_steps"),
    ("worked_frozen_steps", "majority"),
    ("peers_frozen_steps", "majority"),
    ("peers_frozen_steps", "peers_steps"),
    ("peers_steps", "majority"),
    ("majority_few", "majority"),
    ("peers_steps", "majority_few"),
    ("peers_steps", "proposals_steps"),
    ("proposals_steps", "majority_few"),
)
"""After a warm-up; the small policies cannot criticise as these arms ask."""
RARE_CONTRASTS = (
    *(("hint", other) for other in ("answers", "group_32", "hint_iid")),
    *(("few_hint", other) for other in ("few", "few_group_32", "few_hint_iid")),
)
"""First less second, at temperature 0 (the primary figure) and at temperature 1; Holm over a bed's, by temperature."""


class Part(NamedTuple):
    """Cells: every arm on every bed with every seed."""

    beds: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    is_other: bool = False
    """At the learning rate that was not chosen."""


class Place(NamedTuple):
    """A cell's place in the plan."""

    bed: str
    arm: str
    seed: int
    is_other: bool


MAIN_BEDS = ("critics-70", "trap-70", "steps")
_PLAIN = ("answers", "majority", "shuffled", "log_probability", "peer_prediction")
_TALKS = ("r_sol", "critique", "preference")
MAIN_ARMS = (
    *_PLAIN,
    *_TALKS,
    "r_sol_floor_0.1",
    "no_exchange",
    "apart",
    "preference_alone",
    "judged",
    "judged_rare",
    "serl",
    "comas",
    "maca",
)
_OTHER_DIALS = ("critics-50", "critics-60", "critics-80")
_RARE = tuple(f"rare-{level}" for level in LEVELS)
_CONTROLS = ("swap", "serl_votes", "foreign_critiques", "shuffled_critiques", "r_meta", "r_diag")
_TALKED_AFTER = range(10, 13)
"""Seeds after whose training test conversations are held, too."""
PLAN: Sequence[Sequence[Part]] = (
    (
        Part(MAIN_BEDS, MAIN_ARMS, range(10)),
        Part(("critics-70",), _CONTROLS, range(10)),
        Part(_OTHER_DIALS, ("majority", "judged", "r_sol"), range(10)),
        Part(_RARE, RARE_ARMS, range(10)),
        Part(REAL, (*_PLAIN, *_TALKS, "hint", "feedback"), range(5)),
    ),
    (
        Part(("critics-70",), LONG_ARMS, range(3)),
        Part(("critics-70",), ("long_r_sol", "long_current"), range(3), is_other=True),
        Part(("critics-70",), RATE_ARMS, range(5)),
        Part(("critics-70",), (*_TALKS, "no_exchange"), _TALKED_AFTER),
        Part(("trap-70", "steps"), _TALKS, _TALKED_AFTER),
        Part(MAIN_BEDS, ("majority", "r_sol"), range(5), is_other=True),
        Part(("critics-70",), ("majority",), range(6), is_other=True),
        Part(("trap-70",), ("r_sol",), range(10), is_other=True),
        Part(
            ("critics-70",),
            ("comas", "critique", "judged", "no_exchange", "preference", "serl_votes"),
            range(3),
            is_other=True,
        ),
    ),
    (
        Part(MAIN_BEDS, ("r_sol_floor_1",), range(5)),
        Part(MAIN_BEDS, ("judged_initial", "judged_better"), range(5)),
        Part(MAIN_BEDS, ("answer_ema", "answer_initial", "r_sol_labels"), range(3)),
        Part(_OTHER_DIALS, ("judged_rare",), range(3)),
        Part(("critics-70",), ("league", "swap_majority"), range(3)),
        Part(("trap-70",), ("swap", "preference_initial"), range(3)),
        Part(("critics-70", "trap-70"), ("preference_better",), range(5)),
        Part(("critics-70", "trap-70"), ("peer_prediction_better",), range(5)),
        Part(("critics-70", "steps"), ("r_sol_floor_2",), range(1)),
        Part(MAIN_BEDS, (*_TALKS, "answers", "judged", "majority", "shuffled"), (NAMED,)),
        Part(("trap-70",), ("maca", "peer_prediction", "preference_alone", "serl"), (NAMED,)),
    ),
    (
        Part(("sums",), ("rubric_answers_first", "rubric_initial"), range(5)),
        Part(("sums",), ("answer_current", "answer_ema", "answer_initial"), range(5)),
        Part(("sums",), ("rubric", "answer_every"), range(3)),
        Part(("sums",), ("answers_hot", "preference_answers_first"), range(2)),
        Part(REAL, ("answers_rate_0.0005", "answers_rate_0.001"), range(3)),
        Part(REAL, ("answers_tempered",), range(2)),
        Part(REAL, ("answers_rate_0.0001", "answers_rank_8", "answers_rank_128"), range(1)),
        Part(("words",), ("answer_current", "answer_ema", "answer_initial"), range(1)),
    ),
    (
        Part(WARM, ("majority", "r_sol"), range(5)),
        Part(WARM, ("answers",), range(2)),
        Part(WARM, ("critique", "critique_shuffled", "paper", "r_sol_steps"), range(1)),
        Part(("sums-warm",), ("paper",), range(2)),
        Part(("words-warm",), ("critique_shuffled",), range(2)),
        Part(("words-warm",), ("peers_steps", "peers_frozen_steps"), range(5)),
        Part(
            ("words-warm",),
            ("worked_frozen", "worked_frozen_steps", "worked_steps", "majority_few"),
            range(3),
        ),
        Part(("words-warm",), ("proposals_steps",), range(2)),
        Part(("words-warm",), ("worked", "r_sol_floor_0.1"), range(1)),
        Part((LARGE,), ("answers", "majority", "rubric_answers_first"), range(1)),
        Part((LARGE,), ("rubric_initial",), range(2)),
    ),
)
"""The whole bench: the main contrasts; longer runs, other rates and test conversations; arms that say less; then those
of the models that others trained, as they are and after a warm-up."""


def wanted(plan: Sequence[Sequence[Part]]) -> Iterator[Place]:
    """All cells of a plan once, stage by stage and there seed by seed."""
    found: dict[Place, None] = {}
    for stage in plan:
        for seed in sorted({seed for part in stage for seed in part.seeds}):
            found |= {
                Place(bed, arm, seed, part.is_other): None
                for part in stage
                if seed in part.seeds
                for bed in part.beds
                for arm in part.arms
            }
    yield from found
