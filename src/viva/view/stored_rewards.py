"""Pay of a stored conversation by any reward, as far as its transcript suffices."""

from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from viva.conversation.records import Conversation
from viva.judging.comparison import Comparison, Outcome, same_words, win_minus_loss
from viva.judging.records import ComparisonRecord, ConversationRecord
from viva.rewards import PeerReview, Reward, Shuffled, Tournament
from viva.rewards.comas import Comas
from viva.rewards.critique import SEGMENTS, Judged, review_votes
from viva.rewards.log_probability import LogProbability
from viva.rewards.review import STREAMS, ReviewRules, score_review
from viva.rewards.serl import SerlVotes
from viva.rewards.shuffled import permuted
from viva.rewards.solutions import SolutionReward, stored_solutions

_RULES: TypeAdapter[ReviewRules] = TypeAdapter(ReviewRules)


def stored_pay(reward: Reward, record: ConversationRecord, seed: int) -> dict[int, float]:
    """Rewards by agent, by the rules that are stored with the conversation where it has any; some may have none.

    Raises:
        ValueError: If the transcript does not suffice, with what is missing.
        NoValidComparisonsError: If a judge said nothing readable about an agent.
        BradleyTerryError: If a fit does not converge.
    """
    if isinstance(reward, Shuffled):
        own = stored_pay(reward.of, record, seed)
        return dict(zip(own, permuted(list(own.values()), seed), strict=True))
    conversation = record.conversation()
    if isinstance(reward, SolutionReward) and not isinstance(reward, LogProbability):
        if record.protocol == "problem" and not reward.pays_samples:
            raise ValueError(f"the reward {reward.name!r} pays conversations, and these are plain samples")
        group = replace(
            stored_solutions(conversation, seed=seed, right=record.correct),
            comparisons=_between_agents(record) or None,
            gains=record.gains,
        )
        return dict(zip(group.ids, reward.pay(group), strict=True))
    if isinstance(reward, Tournament):
        if not (comparisons := _between_agents(record)):
            raise ValueError(
                "the reward 'tournament' needs comparisons of final solutions, and none are stored; runs that were "
                "paid by tournament or serl have them"
            )
        return win_minus_loss(comparisons, sorted(conversation.final_solutions))
    if isinstance(reward, PeerReview | SerlVotes | Comas):
        _require_segments(reward, record)
    if isinstance(reward, SerlVotes):
        return reward.earned(conversation).totals
    judged = stored_comparisons(record)
    if isinstance(reward, Comas):
        require_links(conversation, judged)
        earned = reward.earned(conversation, judged)
        return {agent_id: earned.total(agent_id) for agent_id in sorted(earned.revision)}
    if isinstance(reward, PeerReview):
        return _reviewed(reward, record, conversation, judged)
    raise ValueError(
        f"the reward {reward.name!r} needs more than a transcript holds, so stored conversations cannot be scored by it"
    )


def _reviewed(
    reward: PeerReview, record: ConversationRecord, conversation: Conversation, judged: Judged
) -> dict[int, float]:
    rules = replace(stored_rules(record), weights=reward.rules.weights) if record.rules else reward.rules
    if rules.fit == "joint":
        require_links(conversation, judged)
    scores = score_review(review_votes(conversation, judged), rules)
    if reward.name not in STREAMS:
        return scores.totals
    column = {"r_sol": scores.r_sol, "r_meta": scores.r_meta, "r_diag": scores.r_diag}[reward.name]
    return {agent_id: value for agent_id, value in column.items() if value is not None}


def _require_segments(reward: Reward, record: ConversationRecord) -> None:
    missing = set(SEGMENTS) - {turn.segment for turn in record.turns}
    if not isinstance(reward, Comas) and reward.name != "r_diag":
        missing -= {"critique"}  # where nobody criticised, nothing is paid for it
    if missing:
        raise ValueError(
            f"the reward {reward.name!r} pays conversations of critique self-play; this one, of protocol "
            f"{record.protocol!r}, has no {', '.join(sorted(missing))}"
        )


def require_links(conversation: Conversation, judged: Judged) -> None:
    """Refuse a joint fit of two rounds that nothing links, by a `ValueError` that says what to do."""
    before, after = conversation.solutions("proposal"), conversation.solutions("revision")
    changed = [agent for agent in after if not same_words(before[agent], after[agent])]
    if changed and not judged and all(turn.segment != "comparison" for turn in conversation.turns):
        raise ValueError(
            "fit=joint needs comparisons of revised with initial solutions, and none are stored: a run by the paper "
            "preset makes none, nor does one by a reward that needs none. Without them nothing says how the two rounds "
            "compare, so no gain could be measured. Add fit=separate for two scales, on which nobody gains where all "
            "improve alike."
        )


def stored_rules(record: ConversationRecord) -> ReviewRules:
    """The rules that a conversation was scored by; `ValueError` if they cannot be read."""
    try:
        return _RULES.validate_python(record.rules)
    except ValidationError as error:
        raise ValueError(f"the stored rules cannot be read: {error.errors()[0]['msg']}") from error


def stored_comparisons(record: ConversationRecord) -> dict[int, list[Comparison]]:
    """The judge's comparisons of initial (item 0) with revised (item 1) solutions, by agent.

    Raises:
        ValueError: If an outcome is none that a comparison can have.
    """
    found: dict[int, list[Comparison]] = {}
    for item in record.comparisons:
        if item.agent_id is not None:
            found.setdefault(item.agent_id, []).append(_comparison(item))
    return found


def _between_agents(record: ConversationRecord) -> list[Comparison]:
    """The judge's comparisons of final solutions."""
    return [_comparison(item) for item in record.comparisons if item.agent_id is None]


def _comparison(item: ComparisonRecord) -> Comparison:
    fields = item.model_dump(include=set(ComparisonRecord.model_fields) - {"agent_id", "outcome"})
    return Comparison(outcome=Outcome(item.outcome), **fields)
