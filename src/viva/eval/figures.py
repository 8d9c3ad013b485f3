"""From answers to figures: numerators and denominators by problem, so that every figure can be resampled.

Legend: ``n`` answers to one problem, ``N`` agents of a conversation.
"""

from collections.abc import Callable, Mapping, Sequence

from viva.conversation.messages import counted, text_table
from viva.eval.estimates import (
    NOTHING,
    Term,
    Terms,
    Vote,
    ladder,
    majority_at_k,
    pass_at_k,
    plurality,
    term_of,
)
from viva.eval.records import (
    AgentAnswers,
    Answer,
    Asked,
    Difference,
    Evaluation,
    Figure,
    PlayedProblem,
    cost_lines,
    is_lenient,
)
from viva.judging.comparison import rank_correlation, reward_truth_gap


def figures_of(evaluation: Evaluation) -> dict[str, Terms]:
    """All figures of an evaluation: ``direct/...``, then those of every kind of conversation under its name."""
    figures = direct_figures(evaluation.asked, evaluation.greedy)
    for kind, played in evaluation.played.items():
        figures |= {f"{kind}/{name}": terms for name, terms in conversation_figures(played).items()}
    return figures


def direct_figures(asked: Sequence[Asked], greedy: Sequence[Asked] = ()) -> dict[str, Terms]:
    """Direct answers: right at temperature 0, avg@n, maj@k and pass@k, how many were finished, and how long they were.

    The answer at temperature 0 and avg@n are told strictly and leniently. Figures that count right answers are of the
    problems with a known one, and left out where there is none.
    """
    if not asked:
        return {}
    n = len(asked[0].answers)
    figures: dict[str, Terms] = {}
    if greedy:
        figures |= {
            "greedy": [_share(each.answers) for each in greedy],
            "greedy_lenient": [_lenient(each) for each in greedy],
        }
    figures[f"avg@{n}"] = [_share(each.answers) for each in asked]
    figures[f"avg@{n}_lenient"] = [_lenient(each) for each in asked]
    figures |= ladder_figures(asked)
    is_known = [each.answer is not None for each in asked]
    figures = {
        name: [term if known else NOTHING for term, known in zip(terms, is_known, strict=True)]
        for name, terms in figures.items()
        if any(is_known)
    }
    figures["finish_rate"] = [(sum(answer.finished for answer in each.answers), n) for each in asked]
    figures["reply_tokens"] = [(sum(answer.num_tokens for answer in each.answers), n) for each in asked]
    return {f"direct/{name}": terms for name, terms in figures.items()}


def ladder_figures(asked: Sequence[Asked]) -> dict[str, Terms]:
    """maj@k and pass@k by problem, for k over the powers of two and all answers."""
    ks = ladder(len(asked[0].answers))
    majorities: dict[str, Terms] = {f"maj@{k}": [_majority(each.answers, k) for each in asked] for k in ks}
    return majorities | {f"pass@{k}": [_pass(each.answers, k) for each in asked] for k in ks}


def conversation_figures(played: Sequence[PlayedProblem]) -> dict[str, Terms]:
    """Figures of conversations.

    ``correct/first`` and ``correct/final`` are avg@N; ``correct/best`` is the answer with the highest score (the CoNL
    paper's Pass@1), ties sharing. Flips and correlations are of agents that finished.
    """
    if not played:
        return {}
    figures: dict[str, Terms] = {
        "correct/first": [_share(_firsts(each)) for each in played],
        "correct/final": [_share(_finals(each)) for each in played],
        "correct/best": [(_best(each), 1.0) for each in played],
    }
    for k in ladder(len(played[0].agents)):
        for name, answers in (("first", _firsts), ("final", _finals)):
            figures[f"pass@{k}/{name}"] = [_pass(answers(each), k) for each in played]
            figures[f"maj@{k}/{name}"] = [_majority(answers(each), k) for each in played]
    figures |= {
        "flip/right_to_wrong": [_flips(each, was_right=True) for each in played],
        "flip/wrong_to_right": [_flips(each, was_right=False) for each in played],
        "rank_correlation": [term_of([_truth(each, rank_correlation)]) for each in played],
        "reward_truth_gap": [term_of([_truth(each, reward_truth_gap)]) for each in played],
        "finish_rate": [
            (sum(answer.finished for answer in _finals(each)), len(each.agents)) for each in played
        ],
        "void_rate": [(float(each.void_reason is not None), 1.0) for each in played],
        "tokens": [(each.num_tokens, 1.0) for each in played],
        "judge_tokens": [(each.num_judge_tokens, 1.0) for each in played],
    }
    return figures | _equal_tokens(played)


def _equal_tokens(played: Sequence[PlayedProblem]) -> dict[str, Terms]:
    """Direct answers in the place of the conversations, and what the conversations have over them."""
    if not all(each.direct for each in played):
        return {}
    majorities = [plurality(_votes(each.direct)) for each in played]
    figures: dict[str, Terms] = {
        "direct_samples": [(len(each.direct), 1.0) for each in played],
        "direct_tokens": [(sum(answer.num_tokens for answer in each.direct), 1.0) for each in played],
        "direct_avg": [
            (sum(answer.right for answer in each.direct) / len(each.direct), 1.0) for each in played
        ],
        "direct_maj": [(majority, 1.0) for majority in majorities],
        "direct_pass": [(float(any(answer.right for answer in each.direct)), 1.0) for each in played],
        "best_less_direct_maj": [
            (_best(each) - majority, 1.0) for each, majority in zip(played, majorities, strict=True)
        ],
        "maj_less_direct_maj": [
            (plurality(_votes(_finals(each))) - majority, 1.0)
            for each, majority in zip(played, majorities, strict=True)
        ],
    }
    return {f"equal_tokens/{name}": terms for name, terms in figures.items()}


def _firsts(played: PlayedProblem) -> list[Answer]:
    return [agent.first for agent in played.agents]


def _finals(played: PlayedProblem) -> list[Answer]:
    return [agent.final for agent in played.agents]


def _votes(answers: Sequence[Answer]) -> list[Vote]:
    return [(answer.vote, answer.right) for answer in answers]


def _share(answers: Sequence[Answer]) -> Term:
    return sum(answer.right for answer in answers), len(answers)


def _lenient(asked: Asked) -> Term:
    return sum(is_lenient(answer, asked.answer or "") for answer in asked.answers), len(asked.answers)


def _pass(answers: Sequence[Answer], k: int) -> Term:
    return pass_at_k(len(answers), sum(answer.right for answer in answers), k), 1.0


def _majority(answers: Sequence[Answer], k: int) -> Term:
    return majority_at_k(_votes(answers), k), 1.0


def _scored(played: PlayedProblem) -> list[tuple[AgentAnswers, float]]:
    return [(agent, agent.score) for agent in played.agents if agent.score is not None]


def _best(played: PlayedProblem) -> float:
    """Whether the final answer with the highest score is right, ties sharing; 0 if nobody has a score."""
    scored = _scored(played)
    highest = max((score for _, score in scored), default=0.0)
    chosen = [agent.final.right for agent, score in scored if score == highest]
    return sum(chosen) / len(chosen) if chosen else 0.0


def _flips(played: PlayedProblem, *, was_right: bool) -> Term:
    agents = [agent for agent, _ in _scored(played) if agent.first.right is was_right]
    return sum(agent.final.right is not was_right for agent in agents), len(agents)


def _truth(
    played: PlayedProblem, relation: Callable[[dict[int, float], dict[int, bool]], float | None]
) -> float | None:
    scored = _scored(played)
    if not scored:
        return None
    scores = {place: score for place, (_, score) in enumerate(scored)}
    return relation(scores, {place: agent.final.right for place, (agent, _) in enumerate(scored)})


_LEGEND = {
    "/greedy": "greedy: share of right answers at temperature 0, one to every problem",
    "avg@": "avg@n: share of right answers",
    "_lenient": "lenient: the known answer stands in the reply, finished or not, marked or not",
    "pass@": "pass@k: at least one of k is right",
    "maj@": "maj@k: the most frequent of k is right",
    "correct/": "correct/first, /final: all agents' answers, before and after; /best: the one with the highest score",
    "flip/": "flip: what the conversation did to right and to wrong answers",
    "rank_correlation": "rank_correlation: of scores with being right, where some are right and some wrong",
    "reward_truth_gap": "reward_truth_gap: pairs in which the wrong answer has the higher score; 50 % knows nothing",
    "equal_tokens/": "equal_tokens: direct answers within the tokens of the conversation, judge included",
}


def evaluation_text(evaluation: Evaluation) -> str:
    """All figures with their 95 % intervals."""
    rows = [
        (name, shown_figure(name, figure.value), shown_interval(name, figure), str(figure.num_problems))
        for name, figure in evaluation.figures.items()
    ]
    lines = [
        f"{_title(evaluation)}, {_size(evaluation)}",
        *([f"measured on {evaluation.problems}"] if evaluation.problems else []),
        "",
        *text_table([("figure", "value", "95 % interval", "problems"), *rows]),
        "",
        *_legend(evaluation.figures),
    ]
    return "\n".join([*lines, *_void_lines(evaluation), *cost_lines(evaluation.cost)]) + "\n"


def comparison_text(
    evaluation: Evaluation, against: Evaluation, differences: Mapping[str, Difference]
) -> str:
    """Figures of two policies side by side, with 95 % intervals of the differences."""
    rows = [
        (
            name,
            shown_figure(name, each.value),
            shown_figure(name, each.against),
            shown_figure(name, each.difference, sign="+"),
            shown_interval(name, each, sign="+"),
        )
        for name, each in differences.items()
    ]
    lines = [
        f"first:  {_title(evaluation)}",
        f"second: {_title(against)}",
        "differences are first less second, on the same problems",
        "",
        *text_table([("figure", "first", "second", "difference", "95 % interval"), *rows]),
    ]
    return "\n".join(lines) + "\n"


def _title(evaluation: Evaluation) -> str:
    target = evaluation.target
    checkpoint = target.get("checkpoint")
    return f"{target['name']}, checkpoint {checkpoint}" if checkpoint else str(target["name"])


def _size(evaluation: Evaluation) -> str:
    parts: list[str] = []
    if evaluation.asked:
        times = len(evaluation.asked[0].answers)
        told = f"asked directly {f'{times} times' if times > 1 else 'once'}"
        if evaluation.greedy and evaluation.greedy != evaluation.asked:
            told += " and once at temperature 0"
        parts.append(f"{counted(len(evaluation.asked), 'problem')} {told}")
    parts += [
        f"{len(played)} in {kind} of {counted(len(played[0].agents), 'agent')}"
        for kind, played in evaluation.played.items()
    ]
    return ", ".join(parts)


def _void_lines(evaluation: Evaluation) -> list[str]:
    lines: list[str] = []
    for kind, played in evaluation.played.items():
        reasons = [each.void_reason for each in played if each.void_reason is not None]
        if reasons:
            lines.append(
                f"note: {len(reasons)} of {len(played)} {kind} void and counted as wrong: {reasons[0]}"
            )
    return lines


def _legend(figures: Mapping[str, Figure]) -> list[str]:
    lines = [text for mark, text in _LEGEND.items() if any(mark in name for name in figures)]
    return [*lines, "intervals: resampled problems; - where all resampled values agree or there are too few"]


def shown_figure(name: str, value: float | None, *, sign: str = "") -> str:
    """A figure as text: shares in per cent, counts and correlations plain; `sign` is ``+`` for differences."""
    if value is None:
        return "-"
    if name.endswith(("tokens", "samples", "bits")):
        return f"{value:{sign}.1f}"
    if "correlation/" in name or name.endswith(("correlation", "nats", "kappa")):
        return f"{value:+.2f}"
    signed = "+" if "_less_" in name else sign
    return f"{100 * value:{signed}.1f} %"


def shown_interval(name: str, figure: Figure | Difference, *, sign: str = "") -> str:
    """The 95 % interval of a figure as text, in the form of `shown_figure`."""
    if figure.low is None or figure.high is None:
        return "-"
    return f"{shown_figure(name, figure.low, sign=sign)} to {shown_figure(name, figure.high, sign=sign)}"
