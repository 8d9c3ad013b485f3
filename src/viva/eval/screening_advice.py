"""Advice from the figures of a screening: which reward can work, or that none can and why.

A reward ``works`` or ``fails`` only where its whole 95 % interval says so; else it is ``unclear``. Rules and their
levels are in the functions below, each a few lines long.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from viva.conversation.messages import counted
from viva.eval.records import Figure
from viva.eval.screening import Advice
from viva.rewards.solutions import SolutionReward

FEW_PROBLEMS = 10
"""Problems with right and wrong answers below which a reward is not told to work or to fail."""
FEW_ENDED = 0.5
"""Share of replies that must be finished, and of those in which an answer must be found."""
FEW_MIXED = 0.05
"""Share of problems with right and wrong tries below which hardly any group has a signal."""
MUCH_SHARPER = 0.15
"""Points of accuracy that the greedy answer may be above sampled ones."""
MUCH_LENIENT = 0.1
"""Points of accuracy that may be lost to the form of answers."""
MOSTLY = 0.5
"""One half: of problems, of verdicts, of conversations."""
SETTLED = 0.95
"""Share of equal answers above which voting has nothing left to teach."""

Figures = Mapping[str, Figure]


def screening_advice(
    figures: Figures,
    *,
    rewards: Sequence[str],
    talks: Mapping[str, str],
    untold: SolutionReward | None = None,
    has_answers: bool,
) -> tuple[Advice, ...]:
    """Advice in the order of importance: what stands in the way, then each reward, then a summary.

    `rewards` pay plain samples; `talks` are the names of those that pay conversations, by kind of conversation. A
    planned reward that is `untold` by these answers is named, and nothing more.
    """
    notes = list(_about_replies(figures))
    if not has_answers:
        return (*notes, *_without_answers(figures))
    notes += _about_accuracy(figures)
    told = [_about_answers(figures)]
    told += [_about_reward(name, figures) for name in rewards if name != "answers"]
    if "judge/pair_accuracy" in figures:
        told.append(_about_judge(figures))
    told += [_about_talk(kind, reward, figures) for kind, reward in talks.items()]
    if "critique/critics/readable" in figures:
        notes.append(_about_critics(figures))
    if untold is not None:
        told.append(_about_untold(untold, figures))
    return (*notes, *told, _summary(told, figures))


def _about_replies(figures: Figures) -> Iterator[Advice]:
    finished, read = _value(figures, "replies/finished"), _value(figures, "replies/answer_found")
    if finished < FEW_ENDED:
        yield _note(
            "max_tokens",
            f"only {_percent(finished)} of the replies end by themselves: raise max_tokens, or ask for less "
            "(question_template=...)",
        )
    if read < FEW_ENDED:
        yield _note(
            "question_template",
            f"an answer is found in {_percent(read)} of the replies: name the form, as in "
            "question_template='{question} Give only the final number.'",
        )


def _about_accuracy(figures: Figures) -> Iterator[Advice]:
    greedy, sampled = _value(figures, "accuracy/greedy"), _value(figures, "accuracy/sampled")
    if greedy - sampled > MUCH_SHARPER:
        yield _note(
            "temperature",
            f"greedy answers are right in {_percent(greedy)}, sampled ones in {_percent(sampled)}: lower the "
            "temperature, and compare results at temperature 0, where mere sharpening shows no gain",
        )
    lost = _value(figures, "accuracy/sampled_lenient") - sampled
    if lost > MUCH_LENIENT:
        yield _note(
            "format",
            f"another {_percent(lost)} of the replies name the right answer without giving it as theirs: "
            "much of what is learnt first will be form",
        )


def _about_answers(figures: Figures) -> Advice:
    mixed, never = _value(figures, "solved/mixed"), _value(figures, "solved/never")
    told = f"{_percent(mixed)} of the problems have right and wrong tries"
    if mixed >= FEW_MIXED:
        reach = _percent(_value(figures, "solved/in_20_to_80_percent"))
        told += f", which a known answer tells apart ({reach} are solved in 20 to 80 % of tries)"
        return Advice("answers", "works", told)
    why = "most are always solved; take harder problems"
    if never > MOSTLY:
        why = "hardly any is ever solved; take easier problems, or strategies that help (hint, feedback)"
    return Advice("answers", "fails", f"only {told}: {why}")


def _about_reward(name: str, figures: Figures) -> Advice:
    figure = figures[f"correlation/{name}"]
    known = "unknown" if figure.value is None else _with_interval(figure, "{:+.2f}".format)
    told = f"correlation with the truth within groups {known}"
    if name == "shuffled":
        return _note("shuffled", f"{told}: the zero line")
    mixed = figures["solved/mixed"]
    num_mixed = round((mixed.value or 0.0) * mixed.num_problems)
    if figure.value is None and num_mixed < FEW_PROBLEMS:
        verdict = "fails" if not num_mixed and mixed.num_problems >= FEW_PROBLEMS else "unclear"
        return Advice(name, verdict, f"{counted(num_mixed, 'problem')} with right and wrong tries")
    if figure.value is None:
        return Advice(name, "fails", "it tells no answers apart")
    verdict, greedy = _verdict(figure, chance=0), _percent(_value(figures, "accuracy/greedy"))
    if figure.num_problems < FEW_PROBLEMS:
        told += f", of {figure.num_problems} problems only"
    if name == "majority":
        verdict, why = _about_voting(figures, verdict)
        told += f"; {why}"
    elif verdict == "works" and name == "log_probability":
        told += f"; it can lift accuracy to about the greedy one, {greedy}"
    elif verdict == "works" and name == "judge_answer":
        told += f"; its labels are the greedy answers, right on {greedy}"
    return Advice(name, verdict, told)


def _about_voting(figures: Figures, verdict: str) -> tuple[str, str]:
    """The verdict and its reason by all problems that were asked, where `verdict` is that of the correlation."""
    # of all answers: the last rung of the ladder
    majority = [figure for name, figure in figures.items() if name.startswith("accuracy/maj@")][-1]
    low, high = _ends(majority)
    told = f"the most frequent answer is right on {_with_interval(majority, _percent)} of the problems"
    if majority.num_problems >= FEW_PROBLEMS:
        if high < MOSTLY:
            return "fails", f"{told} only; on all others training votes the right answer away"
        if _ends(figures["majority_less_sampled"])[1] < 0:
            single = _percent(_value(figures, "accuracy/sampled"))
            return "fails", f"voting collapses: {told}, less often than a single one ({single})"
    if verdict == "works":
        if low >= MOSTLY:
            return verdict, f"{told}, to which voting can lift accuracy, by sharpening"
        verdict = "unclear"
    return verdict, told


def _about_judge(figures: Figures) -> Advice:
    accuracy, bias = figures["judge/pair_accuracy"], _value(figures, "judge/position_bias")
    told = f"the judge, over both orders, is right on {_with_interval(accuracy, _percent)} of pairs"
    if accuracy.value is None:
        return Advice("tournament", "fails", "no pair could be judged")
    told += f"; its verdict follows the order in {_percent(bias)} of them"
    likelihood = figures.get("likelihood/accuracy")
    if likelihood is not None and likelihood.value is not None:
        told += f"; the likelihood of the reply alone is right on {_with_interval(likelihood, _percent)}"
    if accuracy.num_problems < FEW_PROBLEMS:
        told += f"; these are {accuracy.num_problems} pairs only"
    return Advice("tournament", _verdict(accuracy, chance=0.5), told)


def _about_untold(reward: SolutionReward, figures: Figures) -> Advice:
    asked = "scorer" if reward.judge is None else "judge"
    told = f"it asks a {asked} about all pairs of answers, which a screening does not"
    if reward.judge is not None and "judge/pair_accuracy" in figures:
        told += "; what is said of tournament holds for that judge"
    name = reward.name if reward.inner is reward else f"{reward.name}_{reward.inner.name}"
    return Advice(name, "unclear", told)


def _about_talk(kind: str, reward: str, figures: Figures) -> Advice:
    """A reward of conversations, by conversations that were held."""
    about, void = f"{reward}, in {kind}", _value(figures, f"{kind}/void_rate")
    gap = figures[f"{kind}/reward_truth_gap"]
    if void > MOSTLY:
        return Advice(about, "fails", f"{_percent(void)} of the conversations come to nothing")
    ended = _value(figures, f"{kind}/finish_rate")
    if ended < FEW_ENDED:
        told = (
            f"only {_percent(ended)} of the final answers end by themselves: raise max_tokens, or warm it up"
        )
        return Advice(about, "fails", told)
    if gap.value is None:
        told = "no conversation ends with right and wrong answers that are paid differently"
        return Advice(about, "unclear", told)
    wrong = _with_interval(gap, _percent)
    told = f"it pays the wrong of two final answers more in {wrong} of pairs (50 %: knows nothing)"
    if gap.num_problems < FEW_PROBLEMS:
        return Advice(about, "unclear", f"{told}, of {gap.num_problems} conversations only")
    low, high = _ends(gap)
    return Advice(about, "works" if high < 0.5 else "fails" if low >= 0.5 else "unclear", told)


def _about_critics(figures: Figures) -> Advice:
    """Critics beside the judge, on the same pairs of a right and a wrong solution."""
    readable = figures["critique/critics/readable"].value
    critics, judge = (figures[f"critique/{name}/pair_accuracy"] for name in ("critics", "judge"))
    if readable is None:
        return _note("critics", "no critique of a solution whose rightness is known could be read")
    if critics.value is None:
        return _note(
            "critics",
            f"whether critics classify better than the judge cannot be told: {_percent(readable)} of the critiques "
            "end in a verdict ('it is right', 'it is wrong'), and no critic gives one on a right and a wrong solution",
        )
    ballots = figures["critique/ballots/pair_accuracy"]
    told = f"critics tell the right of two solutions in {_with_interval(critics, _percent)} of pairs"
    if ballots.value is not None:
        told += f", their votes in {_with_interval(ballots, _percent)}"
    if judge.value is None:
        return _note("critics", f"{told}; no judge was asked about the same pairs (num_pairs)")
    told += f", the judge in {_with_interval(judge, _percent)} of the same"
    less = figures["critique/critics_less_judge"]
    ahead = f"{100 * (less.value or 0.0):+.0f} points"
    if less.num_problems < FEW_PROBLEMS or less.low is None or less.high is None:
        return _note("critics", f"{told} ({ahead}): {less.num_problems} conversations are too few to say")
    ahead += f", {100 * less.low:+.0f} to {100 * less.high:+.0f}"
    verdict = "better than the judge" if less.low > 0 else "worse than the judge" if less.high < 0 else ""
    return _note("critics", f"{told} ({ahead}): {verdict or 'no difference from the judge is shown'}")


def _summary(told: Sequence[Advice], figures: Figures) -> Advice:
    works = [each.about for each in told if each.verdict == "works"]
    free = [name for name in works if name != "answers"]
    unclear = [each.about for each in told if each.verdict == "unclear"]
    hope = _percent(_value(figures, "accuracy/greedy"))
    if free:
        reason = f"without known answers: {', '.join(free)} can work"
    elif works and unclear:
        reason = f"known answers can teach here; these problems say too little about {', '.join(unclear)}"
    elif works:
        reason = (
            "only known answers can teach here; no reward without them follows the truth on these problems"
        )
    else:
        reason = (
            f"no reward can work on these problems as they are asked (greedy accuracy {hope}); change the problems, "
            "how they are asked, or the model first"
        )
    return _note("summary", reason)


def _without_answers(figures: Figures) -> Iterator[Advice]:
    agreement, entropy = figures["answers/agreement"], figures["answers/entropy_bits"]
    if agreement.value is not None:
        bits = f"{entropy.value or 0.0:.1f} bits of entropy"
        told = f"{_percent(agreement.value)} of the answers to a problem agree ({bits})"
        if agreement.value > SETTLED:
            yield Advice("majority", "fails", f"{told}: nothing is left to sharpen")
        else:
            told += (
                "; whether the most frequent one is right, only known answers tell: give some, even twenty"
            )
            yield Advice("majority", "unclear", told)
    bias = figures.get("judge/position_bias")
    if bias is not None and bias.value is not None:
        told = f"the judge follows the order in {_percent(bias.value)} of pairs of different answers"
        yield Advice("tournament", "fails" if bias.value > MOSTLY else "unclear", told)


def _value(figures: Figures, name: str) -> float:
    figure = figures.get(name)
    return 0.0 if figure is None or figure.value is None else figure.value


def _note(about: str, reason: str) -> Advice:
    return Advice(about, "note", reason)


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _ends(figure: Figure) -> tuple[float, float]:
    """The interval; without one all draws agree, as where every group is ranked without a mistake."""
    value = figure.value or 0.0
    return value if figure.low is None else figure.low, value if figure.high is None else figure.high


def _verdict(figure: Figure, *, chance: float) -> str:
    """``works`` where all of its interval is above chance, ``fails`` where none is, ``unclear`` else, or of few."""
    low, high = _ends(figure)
    if figure.num_problems < FEW_PROBLEMS:
        return "unclear"
    return "works" if low > chance else "fails" if high <= chance else "unclear"


def _with_interval(figure: Figure, shown: Callable[[float], str]) -> str:
    value = shown(figure.value or 0.0)
    if figure.low is None or figure.high is None:
        return value
    return f"{value} ({shown(figure.low)} to {shown(figure.high)})"
