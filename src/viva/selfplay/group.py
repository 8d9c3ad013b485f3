"""The group builder of every conversation: a protocol is played, and a reward pays it.

A group is one conversation: one environment for every agent and lane, all on one coordinator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.env import MultiAgentConversationEnv
from viva.conversation.protocol import Protocol
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.records import ConversationRecord
from viva.rewards.base import Grader, Played, Reward
from viva.rewards.credit import GroupCredit


@dataclass(kw_only=True)
class MultiAgentConversationEnvGroupBuilder(EnvGroupBuilder):
    """Builds the environments of one conversation and computes its rewards.

    Raises:
        ValueError: If the conversation could not be held, or the reward cannot pay it.
    """

    question: str
    renderer: Renderer
    """From `viva.conversation.rendering.load_renderer`."""
    protocol: Protocol
    reward: Reward
    judge: PolicySelfComparisonJudge | None = None
    """The judge of a reward that asks for one, see `Reward.judge`."""
    answer: str | None = None
    """The known answer, if there is one; with a grader, metrics tell who is right."""
    grader: Grader | None = None
    num_agents: int = 3
    seed: int = 0
    """Of letters and judge."""
    tags: tuple[str, ...] = ()
    _record: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _credit: GroupCredit | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Reject a conversation that could not be held."""
        self.reward.check(self.protocol, self.num_agents)
        if self.reward.judge is not None and self.judge is None:
            raise ValueError(
                f"the reward {self.reward.name!r} needs a judge; got none. Pass reward.judge.make(...)"
            )
        self._new_coordinator()

    async def make_envs(self) -> Sequence[Env]:
        """One fresh conversation: an environment for every agent and lane, agent by agent."""
        self._record, self._credit = None, None
        coordinator = self._new_coordinator()
        return [
            MultiAgentConversationEnv(agent_id, coordinator, self.renderer, lane)
            for agent_id, lane in self.protocol.seats(self.num_agents)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Pay the conversation.

        Args:
            trajectory_group: The sampled tokens, in the order of the environments.
            env_group: The environments of one `make_envs`.

        Returns:
            Rewards and metrics, in the order of the environments; an agent's metrics are with its first lane. An agent
            that failed (``continue``) gets 0.0 and no metrics: a place holder, its trajectory must not be trained.

        Raises:
            ConversationVoidError: If agents failed or did not finish, and the failure rule says so.
            ValueError: If the environments are not those of one conversation. Errors of the reward pass through.
        """
        coordinator, seats = coordinator_of(env_group)
        conversation = coordinator.conversation
        said = ConversationRecord.of(
            conversation,
            answer=self.answer,
            protocol=self.protocol.name,
            system_prompt=self.protocol.system_prompt,
            comparisons=(),
            rewards={},
            correct=None,
        )
        self._record = said.fields() | self.reward.new_record(self.protocol, self.judge)
        check_finished(coordinator)
        scored = await self.reward.score(
            Played(
                conversation=conversation,
                protocol=self.protocol,
                trajectories_G=trajectory_group,
                renderer=self.renderer,
                judge=self.judge,
                answer=self.answer,
                grader=self.grader,
                seed=self.seed,
                record=self._record,
            )
        )
        self._credit = scored.credit
        return [
            (
                scored.rewards.get((env.agent_id, env.lane), 0.0),
                {} if env.lane else scored.metrics.get(env.agent_id, {}),
            )
            for env in seats
        ]

    def credit(self) -> GroupCredit | None:
        """What the tokens of the last conversation earned; ``None``: what their seats did."""
        return self._credit

    def logging_tags(self) -> list[str]:
        """Tags for the metrics of this kind of group."""
        return list(self.tags or (self.protocol.name,))

    def record(self) -> dict[str, Any] | None:
        """What the transcript keeps of the last conversation whose rewards were asked for, ready for JSON.

        The fields of `ConversationRecord` and what the reward adds. Of a void conversation, what there was of
        them; rewards is then empty. ``None`` before the first.
        """
        if self._record is None:
            return None
        return ConversationRecord.model_validate(self._record).model_dump(mode="json", exclude_unset=True)

    def _new_coordinator(self) -> MultiAgentCoordinator:
        return MultiAgentCoordinator(self.question, self.num_agents, self.protocol, seed=self.seed)


class ConversationVoidError(RuntimeError):
    """A conversation that gives no rewards, by the failure rule."""


def coordinator_of(env_group: Sequence[Env]) -> tuple[MultiAgentCoordinator, list[MultiAgentConversationEnv]]:
    """The coordinator that all environments of a group share, and the environments.

    Raises:
        ValueError: If they are not seats of one conversation, each given once.
    """
    seats = [env for env in env_group if isinstance(env, MultiAgentConversationEnv)]
    coordinators = {id(env.coordinator): env.coordinator for env in seats}
    places = {(env.agent_id, env.lane) for env in seats}
    if len(seats) < len(env_group) or len(coordinators) != 1 or len(places) < len(seats):
        raise ValueError(
            "rewards need the environments of one make_envs call, each once; got "
            f"{[type(env).__name__ for env in env_group]} of {len(coordinators)} conversations"
        )
    return next(iter(coordinators.values())), seats


def check_finished(coordinator: MultiAgentCoordinator) -> None:
    """Apply the protocol's failure rule to a conversation that has ended.

    Raises:
        ConversationVoidError: If the rule says that there are no rewards.
    """
    reasons = [
        f"agent {failure.agent_id} failed in round {failure.round_index + 1}: {failure.reason}"
        for failure in coordinator.conversation.failures
    ]
    waiting = sorted(
        {
            agent_id
            for agent_id, lane in coordinator.protocol.seats(coordinator.num_agents)
            if not coordinator.is_out(agent_id, lane)
        }
    )
    if waiting:
        reasons.append(f"agents {waiting} stopped before their last turn without giving a reason")
    if waiting or coordinator.num_agents_left < coordinator.min_agents:
        raise ConversationVoidError("; ".join(reasons))
