"""Conversation preference RL: agents take turns, the policy compares their solutions, win minus loss pays.

A group is one conversation: one environment for every agent, all on one coordinator, and one tournament at its end.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.env import MultiAgentConversationEnv
from viva.conversation.protocol import Order
from viva.conversation.records import Conversation, ReplyStatus, Solution
from viva.conversation.round_robin import round_robin_protocol
from viva.judging.comparison import Comparison
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.tournament import (
    TournamentPattern,
    judge_accuracy,
    judge_health,
    matchup_count,
    win_minus_loss,
    win_rate,
)
from viva.selfplay.group import Grader, by_agent, check_finished, coordinator_of, graded, transcript

__all__ = ["MultiAgentConversationEnvGroupBuilder"]


@dataclass(kw_only=True)
class MultiAgentConversationEnvGroupBuilder(EnvGroupBuilder):
    """Builds the environments of one conversation and computes its rewards.

    Raises:
        ValueError: If there are fewer than two agents, no round, or personas without an agent 0, 1, 2, ...
    """

    question: str
    renderer: Renderer
    """From `viva.conversation.rendering.load_renderer`."""
    judge: PolicySelfComparisonJudge
    answer: str | None = None
    """The known answer, if there is one. It never enters a reward; with a grader, metrics tell who is right."""
    grader: Grader | None = None
    num_agents: int = 3
    max_rounds: int = 5
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    order: Order = "sequential"
    on_failure: Literal["void", "continue"] = "void"
    """``void``: one agent's failure ends and voids the conversation. ``continue``: the others go on, and
    those that finish are compared; void if fewer than two do."""
    personas: dict[int, str] | None = None
    seed: int = 0
    """Of the tournament."""
    tags: tuple[str, ...] = ("round_robin",)
    _record: dict[str, Any] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Reject a conversation that could not be held."""
        if self.num_agents < 2:
            raise ValueError(
                f"num_agents must be at least 2, or there is nobody to compare; got {self.num_agents}"
            )
        if self.on_failure not in ("void", "continue"):
            raise ValueError(f"on_failure must be 'void' or 'continue'; got {self.on_failure!r}")
        self._new_coordinator()

    async def make_envs(self) -> Sequence[Env]:
        """One fresh conversation: an environment for every agent, in order of their ids."""
        coordinator = self._new_coordinator()
        return [
            MultiAgentConversationEnv(agent_id, coordinator, self.renderer)
            for agent_id in range(self.num_agents)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Judge the final solutions and pay win minus loss.

        Args:
            trajectory_group: Not looked at; what was said is with the environments' coordinator.
            env_group: The environments of one `make_envs`.

        Returns:
            Reward in [-1, 1] and metrics, in the order of the environments. An agent that failed
            (``continue``) gets 0.0 and no metrics: a place holder, its trajectory must not be trained.

        Raises:
            ConversationVoidError: If agents failed or did not finish, and the failure rule says so.
            NoValidComparisonsError: If the judge said nothing readable about an agent.
            ValueError: If the environments are not those of one conversation.
        """
        coordinator, seats = coordinator_of(env_group)
        conversation = coordinator.conversation
        self._record = transcript(
            conversation, "round_robin", self.answer, system_prompt=coordinator.protocol.system_prompt
        )
        self._record |= {"order": self.order, "judge": self.judge.described()}
        check_finished(coordinator)
        solutions = conversation.final_solutions
        comparisons = await self.judge.tournament(
            self.question, solutions, self.tournament_pattern, self.seed
        )
        self._record["comparisons"] = [asdict(comparison) for comparison in comparisons]
        rewards = win_minus_loss(comparisons, list(solutions))
        correct = graded(solutions, self.answer, self.grader)
        self._record["rewards"] = by_agent(rewards)
        self._record["correct"] = by_agent(correct)
        metrics_A = self._metrics(conversation, comparisons, rewards, correct)
        return [
            (rewards[env.agent_id], metrics_A[env.agent_id]) if env.agent_id in rewards else (0.0, {})
            for env in seats
        ]

    def logging_tags(self) -> list[str]:
        """Tags for the metrics of this kind of group."""
        return list(self.tags)

    def record(self) -> dict[str, Any] | None:
        """What the transcript keeps of the last conversation whose rewards were asked for, ready for JSON.

        Keys: question, answer, protocol, system_prompt, num_agents, max_rounds, order, judge, turns,
        failures, comparisons, rewards, correct.
        Of a void conversation, what there was of them; rewards is then empty. ``None`` before the first.
        """
        return self._record

    def _new_coordinator(self) -> MultiAgentCoordinator:
        protocol = round_robin_protocol(
            self.max_rounds, order=self.order, personas=self.personas, on_failure=self.on_failure
        )
        return MultiAgentCoordinator(self.question, self.num_agents, protocol)

    def _metrics(
        self,
        conversation: Conversation,
        comparisons: Sequence[Comparison],
        rewards: dict[int, float],
        correct: dict[int, bool] | None,
    ) -> dict[int, Metrics]:
        agent_ids = list(rewards)
        shared = judge_health(comparisons)
        counts, rates = matchup_count(comparisons, agent_ids), win_rate(comparisons, agent_ids)
        first: dict[int, bool] | None = None
        if correct is not None:
            shared |= judge_accuracy(comparisons, correct)
            first = graded(_first_solutions(conversation), self.answer, self.grader)
        metrics_A: dict[int, Metrics] = {}
        for agent_id in agent_ids:
            turns = [turn for turn in conversation.turns if turn.agent_id == agent_id]
            metrics: Metrics = {
                "episode_length": len(conversation.turns),
                "parsing_failures": sum(turn.status is ReplyStatus.UNSTRUCTURED for turn in turns),
                "win_minus_loss/mean": rewards[agent_id],
                "matchup_count": counts[agent_id],
                f"agent_{agent_id}/reward": rewards[agent_id],
                f"agent_{agent_id}/win_rate": rates[agent_id],
                **shared,
            }
            if correct is not None and first is not None:
                metrics["correct/first"] = float(first[agent_id])
                metrics["correct/final"] = float(correct[agent_id])
                metrics[f"agent_{agent_id}/correct"] = float(correct[agent_id])
            metrics_A[agent_id] = metrics
        return metrics_A


def _first_solutions(conversation: Conversation) -> dict[int, str]:
    return {
        turn.agent_id: turn.response.solution
        for turn in conversation.turns
        if turn.round_index == 0 and isinstance(turn.response, Solution)
    }
