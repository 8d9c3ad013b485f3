"""An agent's vote by label probabilities: the policy, prompted as that agent, compares each pair in both orders."""

from collections.abc import Sequence
from itertools import permutations

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.protocol import Protocol, View
from viva.conversation.records import Turn
from viva.judging.comparison import Comparison, Outcome, same_words
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.label_ballots import LabelAnswer, LabelBallot, label_ballot


async def vote_by_labels(
    voter: PolicySelfComparisonJudge,
    protocol: Protocol,
    question: str,
    turns: Sequence[Turn],
    view: View,
    lane: int = 0,
) -> tuple[LabelBallot, str]:
    """The agent's ballot in a segment with `viva.conversation.protocol.Segment.votes_on`, and all it was asked.

    All comparisons are in flight together. Solutions with the same words tie without being asked about.

    Args:
        voter: Has the policy; its mode is ``logprob``. Its own system message is not used, but the protocol's.
        protocol: The conversation's.
        question: The problem.
        turns: What the agent may see, in order of (round, agent, lane).
        view: Its place in the round.
        lane: Which segment of the round.

    Raises:
        JudgeError: If the engine's probabilities are unusable; the other comparisons are cancelled then.
    """
    texts = protocol.voted_on(turns, view, lane)
    items = list(texts)

    async def compare(one: int, other: int) -> Comparison:
        first, second = texts[items[one]], texts[items[other]]
        if same_words(first, second):
            return Comparison(first=one, second=other, outcome=Outcome.TIE, score=0.0, was_asked=False)
        prompt = protocol.pair_prompt(question, first, second, view, lane)
        return await voter.compare_by_labels(protocol.messages(prompt), one, other, seed=0)

    orders = list(permutations(range(len(items)), 2))
    found = await gather_or_cancel(compare(one, other) for one, other in orders)
    answers = (
        LabelAnswer.of(each, items[one], items[other])
        for each, (one, other) in zip(found, orders, strict=True)
    )
    return label_ballot(answers), "\n\n".join(each.prompt for each in found if each.was_asked)
