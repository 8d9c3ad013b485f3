"""The reward of conversation preference RL: final solutions are compared in pairs, and win minus loss pays."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation
from viva.judging.comparison import (
    Judge,
    TournamentPattern,
    judge_accuracy,
    judge_health,
    matchup_count,
    pairs,
    win_minus_loss,
    win_rate,
)
from viva.judging.judge import JudgeOptions
from viva.judging.records import ConversationRecord
from viva.rewards.base import (
    JUDGE_REMEDY,
    NO_MODELS,
    JudgedReward,
    Match,
    Models,
    Played,
    Scored,
    agent_pay,
    check_compared,
    check_solutions,
    paid,
    stored_comparisons,
)


@dataclass(frozen=True, kw_only=True)
class Tournament(JudgedReward):
    """Win minus loss in [-1, 1] over the pairs of final solutions, see `viva.judging.comparison`."""

    pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    name: str = "tournament"

    def matches(self, protocol: Protocol, num_agents: int) -> list[Match]:
        """Final solutions in pairs."""
        last = len(protocol.rounds) - 1
        return [((first, last), (second, last)) for first, second in pairs(range(num_agents), self.pattern)]

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a conversation of one agent."""
        check_compared(num_agents)

    def check_played(self, conversation: Conversation) -> None:
        """Refuse a conversation in which an agent gives no final solution."""
        check_solutions(conversation, "a tournament compares")

    def new_record(self, protocol: Protocol, judge: Judge | None) -> dict[str, object]:
        """The judge, and who replies when."""
        return {"order": protocol.rounds[0].order, **super().new_record(protocol, judge)}

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """Win minus loss of the stored comparisons, or of new ones."""
        conversation = record.conversation()
        self.check_played(conversation)
        solutions = conversation.final_solutions
        if models.judge is not None:
            comparisons = await models.judge.tournament(record.question, solutions, self.pattern, seed)
        elif not (comparisons := stored_comparisons(record).get(None)):
            raise ValueError(
                "the reward 'tournament' needs comparisons of final solutions, and none are stored; runs that were "
                f"paid by tournament or serl have them. {JUDGE_REMEDY}"
            )
        return win_minus_loss(comparisons, sorted(solutions))

    async def score(self, played: Played) -> Scored:
        """Judge the final solutions."""
        self.check_played(played.conversation)
        judge, solutions = self.needed(played.judge), played.conversation.final_solutions
        question = played.conversation.question
        comparisons = await judge.tournament(question, solutions, self.pattern, played.seed)
        played.record["comparisons"] = [asdict(comparison) for comparison in comparisons]
        rewards = win_minus_loss(comparisons, list(solutions))
        scored = paid(played, agent_pay(played, rewards))
        _, correct = played.correctness
        shared = judge_health(comparisons) | ({} if correct is None else judge_accuracy(comparisons, correct))
        counts, rates = matchup_count(comparisons, list(rewards)), win_rate(comparisons, list(rewards))
        metrics = {
            agent_id: own
            | {
                "win_minus_loss/mean": rewards[agent_id],
                "matchup_count": counts[agent_id],
                f"agent_{agent_id}/win_rate": rates[agent_id],
            }
            | shared
            for agent_id, own in scored.metrics.items()
        }
        return replace(scored, metrics=metrics)


def tournament(
    *, pattern: TournamentPattern | str = TournamentPattern.ALL_PAIRS_BOTH_WAYS, **judge: Any
) -> Tournament:
    """The reward win minus loss: a judge compares the final solutions of all agents in pairs.

    Args:
        pattern: ``all_pairs_both_ways`` or ``all_pairs_one_way``.
        **judge: Fields of `viva.judging.judge.JudgeOptions`: ``policy`` (``current``, ``initial``, ``every``, ``ema``
            or another model), ``every``, ``decay``, ``checkpoint``, ``endpoint`` (a
            `viva.judging.endpoint.EndpointOptions`), ``mode``, ``system_prompt``, ``max_tokens``, ``answers_first``,
            ``max_off_set_mass``.

    Raises:
        ValueError: If a value is none of those allowed.
    """
    return Tournament(pattern=TournamentPattern(pattern), judge_options=JudgeOptions.of(judge))
