"""Lenient grading, with form apart: the known answer stands in the reply, wherever, finished or not.

Strict grading is `viva.eval.records.Answer.right`: the reply is finished, and the answer that it marks is right. What
is right strictly is right leniently, too. What is right leniently alone is an upper end of what form costs, since an
answer's words may stand in a reply for another reason.
"""

from viva.eval.records import Answer
from viva.judging.reasoning_gym import plain_answer


def is_lenient(answer: Answer, known: str | None) -> bool:
    """Whether a reply is right, or names the known answer."""
    return answer.right or is_named(answer.text, known)


def is_named(text: str, answer: str | None) -> bool:
    """Whether a known answer stands in a text by itself, in any place; letter case counts for a lone letter only."""
    wanted = " ".join(plain_answer(answer or "").split()).rpartition("####")[2].strip()
    if not wanted:
        return False
    whole = f" {' '.join(text.split())} "
    if len(wanted) > 1:  # "a" is an article, "A" a choice
        wanted, whole = wanted.casefold(), whole.casefold()
    start = whole.find(wanted)
    while start >= 0:
        before, after = whole[start - 1], whole[start + len(wanted)]
        follows = whole[start + len(wanted) : start + len(wanted) + 2]
        is_longer = after.isalnum() or (follows[:1] in ".," and follows[1:].isdecimal())
        if not before.isalnum() and before not in ".-" and not is_longer:
            return True
        start = whole.find(wanted, start + 1)
    return False
