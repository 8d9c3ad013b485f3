"""Solutions of one problem, as rewards take them."""

from viva.judging.answers import is_correct
from viva.rewards.solutions import Solutions


def solutions(final, *, first=None, finished=None, logprobs=None, answer=None, seed=0):
    return Solutions(
        final_G=final,
        first_G=final if first is None else first,
        finished_G=[True] * len(final) if finished is None else finished,
        logprobs_G_T=logprobs,
        graded_G=None if answer is None else [float(is_correct(text, answer)) for text in final],
        seed=seed,
    )
