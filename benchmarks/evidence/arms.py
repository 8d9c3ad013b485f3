"""Arms of the bench.

An arm is a recipe with a reward. All arms of a bed have the same number of total tokens: all that the policy samples,
and all that it reads as policy, judge and scorer, prompts in full. Learning rates are chosen for every arm and bed from
`LEARNING_RATES`, on problems to train on and a seed that is thrown away.

The arms were fixed before their main runs, but not all at once: seeds 0 to 2 of ``r_sol`` and ``majority`` had been run
on ``trap-70`` when smaller batches were tried there with seed 50, of ``r_sol`` (no better) and of ``preference`` (8
conversations a step instead of 16), which stayed so. ``preference_alone`` and ``judged`` came with that, as controls of
``preference``; the contrast of ``judged`` with ``majority`` was named after their first two seeds had been seen.
``r_sol_labels``, ``swap_majority``, ``preference_initial``, ``judged_initial`` and ``judged_better`` were named when
``judged`` had ten seeds, ``preference`` five and ``r_sol`` three: the mechanism that had helped, given to a
conversation, a conversation's votes as labels of the bare question, and judges that do not change. The runs of ten
budgets (`LONG_ARMS`) and the beds ``critics-D`` came with them. The contrasts of ``r_sol`` with ``critique`` and with
``judged`` were named when they had two and ten seeds on ``critics-70``; ``long_majority`` and ``long_r_sol`` when all
judges of plain samples had been seen to collapse in the others of ten budgets. What is ``judged_rare`` now was
``judged`` until then: samples of a run that had collapsed showed that it paid answers for being rare. All of its kind
were run anew with ties worth half a win, and the contrast of the two was named.
The contrasts of ``apart`` were named when it had three seeds on ``critics-70``, that of ``league`` before it was run.
On the beds of a model that others trained every arm has the one learning rate of ``make demo``; none was tuned there.
``answers_rate_...`` and ``answers_rank_...`` came when all others had four seeds. After a warm-up (``...-warm``)
``r_sol``, ``critique``, ``majority``, ``answers`` and ``paper`` were run first; ``critique_shuffled``, and its contrast
with ``r_sol``, came when two seeds of ``r_sol`` had ended above voting. ``r_sol_steps``, and its contrasts, came when
``r_sol`` had three and four seeds: it makes a third of voting's steps, which alone may keep more of what was known.
``r_sol_floor_...`` and ``worked`` came when that had been seen to be so, and why: votes that know nothing;
``worked_frozen`` when ``worked`` had lost, ``..._steps`` and ``peers_frozen_steps`` when it had ended above voting.
``peers_steps`` and ``worked_steps``, the controls of these two, and ``answer_...``, voters that lag in an arm that
differs from voting in nothing else but them, came then; the contrasts of ``answer_...`` when three seeds of ``sums``
had been seen. ``majority_few`` and its contrasts came when ``peers_steps``, which makes groups as small, had ended
above voting; ``proposals_steps`` and its contrasts when two seeds of both had been seen.
``r_meta`` and ``r_diag``, and the contrasts of ``r_sol`` with them and ``comas``, ``maca``, ``log_probability`` and
``peer_prediction``, were named before any of these had been run on a small bed; on the beds of a model that others
trained the last two had five seeds by then. ``preference_answers_first`` and its contrasts were named before it had
been run, when ``preference`` had all its seeds, and a judge that answers first had been seen to tell right from wrong
answers to ``steps-large`` better than one that only compares. ``rubric`` and ``rubric_answers_first``, and their
contrasts, were named before they had been run, when such a judge of single answers had been tried on pairs of ``sums``
and ``steps-large``. ``rubric_initial`` and its contrasts came when ``rubric_answers_first`` had been run once on
``steps-large``, where it took most of what the policy knew. ``foreign_critiques``, ``shuffled_critiques`` and the
contrasts of ``r_sol_floor_0.1``, the default of today, were named before any of these had been run on a small bed;
so were ``serl_votes`` and its contrasts. ``long_r_sol_kl_0.01`` came when ``long_r_sol`` had its three seeds, and
``long_current_kl_0.01`` when 0.01 was chosen for these; other weights of it when three seeds of that had been seen.
``majority_rate_...`` and ``r_sol_rate_...`` came last: on ``critics-70`` voting had been given the smaller rate of two
and r_sol the larger, and these go a step beyond. They are in no named contrast. ``few...`` came when the arms of the
beds of rare successes had three seeds, in all of which the first step already held a right answer; their contrasts were
named before they had been run. ``preference_better`` and ``peer_prediction_better``, and their contrasts, were named
before they had been run, when ``judged_better`` had its five seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evidence.rewards import BETTER_JUDGE
from evidence.worked import ALONE, NUM_AGENTS, PEERS, WORKED
from viva.conversation.protocol import Protocol
from viva.rewards.review import STREAMS

HINT = "Do every step, one after the other."
"""The instruction under which the policy of rare successes is right more often."""
TOTAL_TOKENS = 600_000
"""For every arm."""
RARE_TOKENS = 40_000
"""For every arm on the beds of rare successes."""
REAL_TOKENS = 80_000
"""For every arm on the beds of a model that others trained."""
LEARNING_RATES = (7e-4, 2e-3)
SMALLEST_RATE, LARGEST_RATE = 2.5e-4, 5e-3
"""Beyond both: of ``majority_rate_...`` and of ``r_sol_rate_...``."""
REAL_RATES = (2e-4,)
"""That of ``make demo``, for every arm: none was tuned."""
SWEPT_RATES = (1e-4, 5e-4, 1e-3)
"""Learning rates of the arms ``answers_rate_...``, beside `REAL_RATES`; the last is the rule of the recipes."""
SWEPT_RANKS = (8, 128)
"""LoRA ranks of the arms ``answers_rank_...``, beside the 32 of all others."""
THROWN_AWAY = 100
"""Seed of the runs that choose the learning rate."""
NAMED = 99
"""Seed of cells that give the column of replies that name the answer, and no other figure."""
TIMES_LONGER = 10
KL_PENALTIES = (0.01, 0.03, 0.1)
"""Weights of the penalty in ``long_current_kl_...``; ``long_r_sol_kl_0.01`` has the first."""

LABELS = {
    "current": ("the policy as it is", {}),
    "ema": ("the moving average of its weights (0.9)", {}),
    "every": ("the policy of every 5th step", {"judge_every": 5}),
    "initial": ("the policy at the start", {}),
}
"""By judge, whose answers the arms ``answer_...`` have as labels, and further options."""
COMMON: Mapping[str, object] = {
    "lora_rank": 16,
    "max_tokens": 80,
    "eval_every": 0,
    "save_every": 0,
    "tokens_every": 0,
    "num_test_conversations": 0,
    "behavior_if_exists": "delete",
    "trackers": [],
}
_SAMPLES = {
    "strategies": ["iid"],
    "estimator": "importance_sampling",
    "group_size": 8,
    "batch_size": 96,
    "samples_every": 0,
}
_FEW = 32
"""Samples a step where the step of the first reward is asked for: one group of ``few_group_32``."""
PREFERENCE = {"num_agents": 3, "max_rounds": 2, "batch_size": 24}
CRITIQUE = {"num_agents": 4, "batch_size": 32}
_WORKED = {"num_agents": NUM_AGENTS, "batch_size": 24}
_FROZEN = _WORKED | {"policies": {"solver": "trained", "critic": "initial"}}
_NO_FLOOR = {"solution_floor": 0.0}
"""Without the floor that r_sol got later, as all cells up to ``r_sol_steps`` were run, those of ``swap``, too."""
_R_SOL = {"reward": "r_sol", **_NO_FLOOR}
_REWARDS = Path(__file__).parent / "rewards.py"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A recipe with its options."""

    recipe: str | Protocol
    options: Mapping[str, object]
    text: str
    steps_of: str | None = None
    """Another arm, of whose steps this one has as many, instead of as many tokens."""
    learning_rate: float | None = None
    """Its own, which takes the place of its bed's."""
    rate_of: str | None = None
    """Another arm, whose learning rate this one has."""
    prolongs: str | None = None
    """Another arm, whose learning rate this one has, and `TIMES_LONGER` as many steps. Its curve is kept."""
    in_fours: bool = False
    """Whether a step of plain samples is 24 in groups of 4 on a model that others trained, instead of 64 in eights."""


def _samples(
    text: str,
    *,
    prolongs: str | None = None,
    steps_of: str | None = None,
    learning_rate: float | None = None,
    in_fours: bool = False,
    **options: object,
) -> Arm:
    is_graded = options.get("reward", "answers") in ("answers", "shuffled")
    is_graded &= options.get("conversation_reward", "verifier") == "verifier"
    return Arm(
        recipe="math_efficiency",
        options=_SAMPLES | ({"length_weight": 0.0} if is_graded else {}) | options,
        text=text,
        prolongs=prolongs,
        steps_of=steps_of,
        learning_rate=learning_rate,
        in_fours=in_fours,
    )


def _few(arm: str, *, steps_of: str | None = None, **options: object) -> Arm:
    return _samples(f"{arm}, {_FEW} samples a step", steps_of=steps_of, **({"batch_size": _FEW} | options))


def _swapped(text: str, reward: str) -> Arm:
    talk = CRITIQUE | {"strategies": ["conversation"], "conversation": "critique"}
    return _samples(text, **talk, conversation_reward=reward, estimator="shaped")


def _critique(
    text: str,
    *,
    prolongs: str | None = None,
    steps_of: str | None = None,
    rate_of: str | None = None,
    learning_rate: float | None = None,
    **options: object,
) -> Arm:
    return Arm(
        recipe="critique_self_play",
        options=CRITIQUE | options,
        text=text,
        prolongs=prolongs,
        steps_of=steps_of,
        rate_of=rate_of,
        learning_rate=learning_rate,
    )


def _preference(text: str, **options: object) -> Arm:
    return Arm(recipe="conversation_preference_rl", options=PREFERENCE | options, text=text)


def _judged(text: str, judge: str, *, prolongs: str | None = None, **options: object) -> Arm:
    return _samples(text, prolongs=prolongs, in_fours=True, reward=f"{_REWARDS}:{judge}", **options)


ARMS: Mapping[str, Arm] = {
    "answers": _samples("true answers, plain samples: the ceiling", reward="answers"),
    "answers_hot": _samples(
        "true answers, sampled at temperature 1, as the trainer weighs them",
        reward="answers",
        temperature=1.0,
    ),
    "answers_tempered": _samples(
        "true answers, the trainer's logits divided by the temperature of the samples, as TRL does",
        reward="answers",
        loss_fn_config={"temperature": 0.8},
    ),
    **{
        f"answers_rate_{rate:g}": _samples(
            f"true answers, learning rate {rate:g}", reward="answers", learning_rate=rate
        )
        for rate in SWEPT_RATES
    },
    **{
        f"answers_rank_{rank}": _samples(f"true answers, LoRA rank {rank}", reward="answers", lora_rank=rank)
        for rank in SWEPT_RANKS
    },
    "majority": _samples("majority vote of plain samples (TTRL)", reward="majority"),
    f"majority_rate_{SMALLEST_RATE:g}": _samples(
        f"majority vote of plain samples, learning rate {SMALLEST_RATE:g}",
        reward="majority",
        learning_rate=SMALLEST_RATE,
    ),
    "majority_few": _samples(
        "majority vote of 24 samples a step in groups of 4 (a model that others trained), as many steps as voting",
        reward="majority",
        steps_of="majority",
        in_fours=True,
    ),
    "shuffled": _samples("true answers, shuffled in their group: the floor", reward="shuffled"),
    "r_sol": _critique("critique self-play, r_sol alone", **_R_SOL),
    f"r_sol_rate_{LARGEST_RATE:g}": _critique(
        f"critique self-play, r_sol alone, learning rate {LARGEST_RATE:g}",
        learning_rate=LARGEST_RATE,
        **_R_SOL,
    ),
    "r_meta": _critique("critique self-play, r_meta alone", reward="r_meta"),
    "r_diag": _critique("critique self-play, r_diag alone", reward="r_diag"),
    "critique": _critique(
        "critique self-play, all three streams (`robust`)", reward_weights=STREAMS, **_NO_FLOOR
    ),
    "apart": _critique(
        "the same, solver and critic trained apart, an adapter each",
        reward_weights=STREAMS,
        policies="per_role",
        **_NO_FLOOR,
    ),
    "r_sol_steps": _critique(
        "critique self-play, r_sol alone, as many steps as voting: several times the tokens",
        steps_of="majority",
        **_R_SOL,
    ),
    **{
        f"r_sol_floor_{floor:g}": _critique(
            f"r_sol alone, silent where no two scores of a conversation differ by {floor:g} standard errors",
            reward="r_sol",
            solution_floor=floor,
            rate_of="r_sol",
        )
        for floor in (0.1, 1.0, 2.0)
    },
    "worked": Arm(
        recipe=WORKED,
        options=_WORKED,
        text="propose and criticise; paid by the answers that the others' critiques work out",
    ),
    "worked_frozen": Arm(
        recipe=WORKED,
        options=_FROZEN,
        text="`worked`, but critics stay as they were at the start",
    ),
    **{
        f"{name}_steps": Arm(
            recipe=recipe, options=options, text=f"{text}, as many steps as voting", steps_of="majority"
        )
        for name, recipe, options, text in (
            ("worked", WORKED, _WORKED, "`worked`"),
            ("worked_frozen", WORKED, _FROZEN, "`worked_frozen`"),
            (
                "peers_frozen",
                PEERS,
                _FROZEN,
                "no critiques: paid by the start's answers to the bare problem",
            ),
            (
                "peers",
                PEERS,
                _WORKED,
                "no critiques: paid by answers to the bare problem by the policy as it is",
            ),
            ("proposals", ALONE, _WORKED, "no second round: proposals paid by one another"),
        )
    },
    **{
        f"answer_{judge}": _samples(
            f"the answer at temperature 0 of {whose}",
            reward="judge_answer",
            judge=judge,
            judge_max_tokens=80,
            **options,
        )
        for judge, (whose, options) in LABELS.items()
    },
    **{
        f"rubric{suffix}": _samples(
            f"the probability that the policy gives to a sample being right, read by itself{behind} (P(True))",
            reward="rubric",
            judge_max_tokens=80,
            judge_answers_first=bool(suffix),
        )
        for suffix, behind in (("", ""), ("_answers_first", " behind an answer of its own"))
    },
    "rubric_initial": _samples(
        "the same behind an own answer, by the policy as it was at the start",
        reward="rubric",
        judge="initial",
        judge_max_tokens=80,
        judge_answers_first=True,
    ),
    "serl": _samples(
        "plain samples, compared by the policy as judge (SERL): no conversation", reward="serl", in_fours=True
    ),
    "preference": _preference("conversation preference RL"),
    "preference_alone": _preference(
        "the same without the conversation: nobody sees others' turns", control="no_exchange"
    ),
    "league": _preference(
        "conversation preference RL of one agent with two of its past selves (`league:5`)",
        policies={"agent_0": "trained", "others": "league:5"},
    ),
    "judged": _judged(
        "plain samples, compared by the policy as judge: SERL without its control of length", "CURRENT"
    ),
    "judged_rare": _judged("the same, a tie earns nothing, so that rare answers are paid for it", "RARE"),
    "judged_initial": _judged("the same, the judge is the policy at the start", "INITIAL"),
    "judged_better": _judged("the same, the judge is a better model", "BETTER"),
    "preference_answers_first": _preference(
        "conversation preference RL, the judge answers the problem before it compares",
        judge_answers_first=True,
    ),
    "preference_initial": _preference(
        "conversation preference RL, the judge is the policy at the start", judge="initial"
    ),
    "preference_better": _preference(
        "conversation preference RL, the judge is a better model", judge=BETTER_JUDGE
    ),
    "r_sol_labels": _critique(
        "critique self-play, r_sol alone, votes by label probability",
        **_R_SOL,
        ballots="labels",
    ),
    "swap": _swapped(
        "final solutions of critique self-play, paid by its own scores, trained into the bare question", "own"
    ),
    "swap_majority": _swapped("the same, paid by the majority of the final solutions", "majority"),
    "no_exchange": _critique(
        "critique self-play, r_sol alone, nobody reads critiques",
        **_R_SOL,
        control="no_exchange",
    ),
    **{
        control: _critique(
            f"critique self-play, r_sol alone, agents read critiques {whose}",
            rate_of="r_sol",
            **_R_SOL,
            control=control,
        )
        for control, whose in (
            ("foreign_critiques", "of another problem"),
            ("shuffled_critiques", "that were written for somebody else"),
        )
    },
    "critique_shuffled": _critique(
        "critique self-play, its rewards shuffled",
        reward="shuffled_peer_review",
        reward_weights=STREAMS,
        **_NO_FLOOR,
    ),
    "paper": _critique("critique self-play, the paper's formulas", preset="paper"),
    "log_probability": _samples("the policy's own log-probability", reward="log_probability"),
    "peer_prediction": _samples(
        "peer prediction, scored by the policy at the start", reward="peer_prediction", in_fours=True
    ),
    "peer_prediction_better": _samples(
        "peer prediction, scored by a better model",
        reward="peer_prediction",
        scorer_model=BETTER_JUDGE,
        in_fours=True,
    ),
    "comas": _critique("CoMAS: solver against critic", reward="comas"),
    "serl_votes": _critique("SERL: solutions and the agents' votes on them", reward="serl_votes"),
    "maca": _critique("MACA: the majority's traces against the others", reward="maca"),
    "group_32": _samples("true answers, groups of 32 plain samples", reward="answers", group_size=32),
    "hint": _samples(
        "true answers, 8 plain samples and 8 behind a hint that is swapped away",
        strategies=["iid", "prompt_augmentation"],
        hint=HINT,
        estimator="shaped",
    ),
    "hint_iid": Arm(
        recipe="math_efficiency",
        options=_SAMPLES | {"batch_size": 48, "length_weight": 0.0},
        text="the plain samples of `hint` alone: as many steps, half the samples",
        steps_of="hint",
    ),
    "few": _few("`answers`", reward="answers"),
    "few_group_32": _few("`group_32`", reward="answers", group_size=32),
    "few_hint": _few("`hint`", strategies=["iid", "prompt_augmentation"], hint=HINT, estimator="shaped"),
    "few_hint_iid": _few("`hint_iid`", steps_of="few_hint", batch_size=_FEW // 2),
    "feedback": _samples(
        "true answers, second attempts after being told right or wrong, trained into the bare question",
        strategies=["feedback"],
        estimator="shaped",
    ),
    "long_current": _judged("judged: the policy as it is", "CURRENT", prolongs="judged"),
    "long_initial": _judged("judged: the policy at the start", "INITIAL", prolongs="judged"),
    "long_every": _judged("judged: the policy of every 10th step", "EVERY", prolongs="judged"),
    "long_ema": _judged("judged: the policy's moving average (0.9)", "EMA", prolongs="judged"),
    "long_better": _judged("judged: a better model", "BETTER", prolongs="judged"),
    "long_rare": _judged("judged: the policy as it is, a tie earns nothing", "RARE", prolongs="judged_rare"),
    "long_majority": _samples("majority vote of plain samples", prolongs="majority", reward="majority"),
    "long_r_sol": _critique("critique self-play, r_sol alone", prolongs="r_sol", **_R_SOL),
    "long_r_sol_kl_0.01": _critique(
        "critique self-play, r_sol alone, KL penalty 0.01", prolongs="r_sol", kl_penalty_coef=0.01, **_R_SOL
    ),
    **{
        f"long_current_kl_{weight:g}": _judged(
            f"judged: the policy as it is, KL penalty {weight:g}",
            "CURRENT",
            prolongs="judged",
            kl_penalty_coef=weight,
        )
        for weight in KL_PENALTIES
    },
}
