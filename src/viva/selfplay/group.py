"""The group builder of every conversation: a protocol is played, and a reward pays it.

A group is one conversation: one environment for every agent and lane, all on one coordinator.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations
from typing import TypeAlias, get_args

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Observation,
    StepResult,
    Trajectory,
)

from viva.conversation.coordinator import MultiAgentCoordinator, gather_or_cancel
from viva.conversation.guard import remembering
from viva.conversation.protocol import Protocol, View
from viva.conversation.records import CallFailure, Reply, ReplyStatus, ToolCall, Turn
from viva.conversation.rendering import build_prompt, read_reply
from viva.conversation.roles import Roles, Speaker
from viva.conversation.tools import answer_call
from viva.judging.comparison import Comparison, Judge, Outcome, same_words
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.ranking import LabelAnswer, LabelBallot, label_ballot
from viva.judging.records import ConversationRecord
from viva.judging.scorer import Scorer
from viva.rewards.base import Grader, Played, Reward
from viva.rewards.credit import GroupCredit
from viva.selfplay.controls import DEALT, CritiqueBoard, Dealt, as_read, foreign, reads_critiques, shuffled

Deal: TypeAlias = Callable[[Sequence[Turn], View], Awaitable[Sequence[Turn]]]
"""From what an agent may read, in a round in which critiques are read, to what it is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A turn that waits for a reply."""

    view: View
    turns: Sequence[Turn] = ()
    """Turns that it may show."""
    calls: tuple[Turn, ...] = ()
    """The agent's calls of tools so far."""
    prompt: str = ""


@dataclass(eq=False, repr=False)
class MultiAgentConversationEnv(Env):
    """One agent's seat in one lane of a conversation; all seats of a conversation share a coordinator.

    The policy is called once for every turn, again after each call of a tool, and never after the last turn. Rewards
    come at the end, from the group's builder. A rollout loop that catches a failed policy call must tell `abort`, or
    the other agents wait for ever.
    """

    agent_id: int
    coordinator: MultiAgentCoordinator
    renderer: Renderer
    lane: int = 0
    deal: Deal | None = None
    """The exchange of a control that has agents read other critiques than those of their solutions."""
    voter: PolicySelfComparisonJudge | None = None
    """The policy whose label probabilities are votes without words."""
    roles: Roles | None = None
    """The policies that talk, if there are several."""
    _asked: _Asked | None = field(default=None, init=False)

    async def initial_observation(self) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Wait for the first turn and return its prompt; an empty episode if the conversation is over."""
        observation = await self._next_observation()
        if observation is None:
            rounds = self.coordinator.protocol.rounds
            first = next(each.segments[self.lane] for each in rounds if len(each.segments) > self.lane)
            return InitialObservationOverflow(reward=0.0, logs={"segment": first.name})
        return observation, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Read the reply, hand it in and wait for the next turn, if there is one.

        The reply of an agent that has left, or to a conversation that ended meanwhile, is dropped.

        A call of a tool is answered, and the same turn is asked again.

        Returns:
            ``episode_done`` with an empty observation after the seat's last turn. Metrics: ``parse/ok``,
            ``parse/repaired`` and ``parse/unstructured`` (0 or 1), also as ``parse/<segment>/...`` where the protocol
            asks for more than one thing. Where there are tools ``tools/called``, and of calls ``tools/failed``, also by
            cause, like ``tools/failed/timeout``.

        Raises:
            RuntimeError: If there was no observation to act on.
        """
        if self._asked is None:
            raise RuntimeError(
                f"agent {self.agent_id} has nothing to reply to: call initial_observation first, and step "
                "only until the episode is done"
            )
        asked, self._asked = self._asked, None
        text, _ = read_reply(self.renderer, action)
        round_ = self.coordinator.protocol.rounds[asked.view.round_index]
        segment = round_.segments[self.lane]
        may_call = round_.tools and len(asked.calls) < round_.max_calls
        call = await answer_call(text, round_.tools) if may_call else None
        response: Reply
        if call is None:
            reading = segment.read(text, asked.view)
            response, status, strategy = reading.response, reading.status, reading.strategy
        else:
            is_read = call.failure != "malformed"
            response, status, strategy = call, ReplyStatus.OK if is_read else ReplyStatus.UNSTRUCTURED, "call"
        turn = None
        if not self.coordinator.is_out(self.agent_id, self.lane):
            turn = await self.coordinator.submit_response(
                self.agent_id, response, lane=self.lane, prompt=asked.prompt, text=text, status=status
            )
        if call is None or turn is None:
            observation = await self._next_observation()
        else:
            observation = self._observe(replace(asked, calls=(*asked.calls, turn)))
        called = _call_metrics(call) if round_.tools else {}
        return StepResult(
            reward=0.0,
            episode_done=observation is None,
            next_observation=tinker.ModelInput.empty() if observation is None else observation,
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics=self._parse_metrics(segment.name, status) | called,
            logs={"segment": segment.name, "strategy": strategy},
        )

    @property
    def round_index(self) -> int | None:
        """Round of the turn that was asked for and not replied to yet, from 0; ``None`` if there is none."""
        return None if self._asked is None else self._asked.view.round_index

    @property
    def speaker(self) -> str | None:
        """The policy that the turn is asked of; ``None`` where all policies are one, or nothing is asked."""
        if self.roles is None or self._asked is None:
            return None
        segment = self.coordinator.protocol.rounds[self._asked.view.round_index].segments[self.lane]
        return self.roles.speaker(self.agent_id, segment.name).name

    async def abort(self, reason: str) -> None:
        """Leave the conversation because the agent's policy failed, timed out or was cancelled."""
        await self.coordinator.fail(self.agent_id, reason)

    def _parse_metrics(self, segment: str, status: ReplyStatus) -> Metrics:
        metrics: Metrics = {f"parse/{known}": float(status is known) for known in ReplyStatus}
        names = {asked.name for round_ in self.coordinator.protocol.rounds for asked in round_.segments}
        if len(names) > 1:
            metrics |= {f"parse/{segment}/{known}": float(status is known) for known in ReplyStatus}
        return metrics

    async def _next_observation(self) -> Observation | None:
        """The prompt of the next turn that is written; votes without words before it are cast on the way."""
        protocol = self.coordinator.protocol
        while await self.coordinator.wait_for_turn(self.agent_id, self.lane) is not None:
            view = self.coordinator.view(self.agent_id, self.lane)
            turns: Sequence[Turn] = self.coordinator.visible_turns(self.agent_id, self.lane)
            if self.deal is not None and reads_critiques(protocol.rounds[view.round_index]):
                turns = await self.deal(turns, view)
                if self.coordinator.is_out(self.agent_id, self.lane):  # others failed meanwhile
                    return None
            if protocol.rounds[view.round_index].segments[self.lane].votes_on is not None:
                await self._vote(turns, view)
                continue
            return self._observe(_Asked(view=view, turns=turns))
        return None

    def _observe(self, asked: _Asked) -> Observation:
        protocol, question = self.coordinator.protocol, self.coordinator.question
        prompt = protocol.prompt(question, asked.turns, asked.view, self.lane, asked.calls)
        self._asked = replace(asked, prompt=prompt)
        with remembering(self.coordinator.line_tokens):
            return build_prompt(self.renderer, protocol.messages(prompt))

    async def _vote(self, turns: Sequence[Turn], view: View) -> None:
        if self.voter is None:
            raise RuntimeError(
                f"agent {self.agent_id} votes by label probabilities and has no policy to ask: pass voter"
            )
        self._asked = _Asked(view=view)  # where it is, should it fail
        with remembering(self.coordinator.line_tokens):
            ballot, prompt = await self._ballot(self.voter, turns, view)
        self._asked = None
        if not self.coordinator.is_out(self.agent_id, self.lane):
            await self.coordinator.submit_response(
                self.agent_id, ballot, lane=self.lane, prompt=prompt, status=ballot.status
            )

    async def _ballot(
        self, voter: PolicySelfComparisonJudge, turns: Sequence[Turn], view: View
    ) -> tuple[LabelBallot, str]:
        """The agent's ballot by label probabilities, and all it was asked: each pair in both orders, concurrently.

        The voter's own system message is not used, but the protocol's. Solutions with the same words tie unasked.

        Raises:
            JudgeError: If the engine's probabilities are unusable; the other comparisons are cancelled then.
        """
        protocol, question = self.coordinator.protocol, self.coordinator.question
        texts = protocol.voted_on(turns, view, self.lane)
        items = list(texts)

        async def compare(one: int, other: int) -> Comparison:
            first, second = texts[items[one]], texts[items[other]]
            if same_words(first, second):
                return Comparison(first=one, second=other, outcome=Outcome.TIE, score=0.0, was_asked=False)
            prompt = protocol.pair_prompt(question, first, second, view, self.lane)
            return await voter.compare_by_labels(protocol.messages(prompt), one, other, seed=0)

        orders = list(permutations(range(len(items)), 2))
        found = await gather_or_cancel(compare(one, other) for one, other in orders)
        answers = (
            LabelAnswer.of(each, items[one], items[other])
            for each, (one, other) in zip(found, orders, strict=True)
        )
        return label_ballot(answers), "\n\n".join(each.prompt for each in found if each.was_asked)


def _call_metrics(call: ToolCall | None) -> Metrics:
    if call is None:
        return {"tools/called": 0.0}
    causes = {f"tools/failed/{cause}": float(call.failure == cause) for cause in get_args(CallFailure)}
    return {"tools/called": 1.0, "tools/failed": float(call.failure is not None), **causes}


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
    judge: Judge | None = None
    """The judge of a reward that asks for one, see `Reward.judge`."""
    scorer: Scorer | None = None
    """The scorer of a reward that asks for one, see `Reward.scorer`."""
    voter: PolicySelfComparisonJudge | None = None
    """The policy that talks, in mode ``logprob``, where the protocol has votes without words."""
    roles: Roles | None = None
    """The policies that talk, if there are several."""
    initial_judge: Judge | None = None
    """The policy as it was at the start: it compares final solutions, too, for `viva.training.signs` alone."""
    initial_judge_pairs: int = 0
    """Pairs that it compares, in both orders."""
    answer: str | None = None
    """The known answer, if there is one; with a grader, metrics tell who is right."""
    grader: Grader | None = None
    num_agents: int = 3
    seed: int = 0
    """Seed of letters and judge."""
    tags: tuple[str, ...] = ()
    board: CritiqueBoard | None = field(default=None, init=False, repr=False)
    """Critiques of this conversation for another one to read, where the protocol's control says so, see `pair_up`."""
    partner: CritiqueBoard | None = field(default=None, init=False, repr=False)
    """The board of the conversation whose critiques are read here, see `pair_up`."""
    _shown: dict[tuple[int, int], list[Dealt]] = field(
        default_factory=dict[tuple[int, int], list[Dealt]], init=False, repr=False
    )
    """Critiques that others than their targets were shown, by round and reader."""
    _record: dict[str, object] | None = field(default=None, init=False, repr=False)
    _credit: GroupCredit | None = field(default=None, init=False, repr=False)
    _unpaid_seats: frozenset[int] = field(default=frozenset(), init=False, repr=False)

    def __post_init__(self) -> None:
        self.reward.check(self.protocol, self.num_agents)
        if self.reward.judge is not None and self.judge is None:
            raise ValueError(
                f"the reward {self.reward.name!r} needs a judge; got none. Pass reward.judge.make(...)"
            )
        if self.reward.scorer is not None and self.scorer is None:
            raise ValueError(
                f"the reward {self.reward.name!r} needs a scorer; got none. Pass one, a viva.judging.scorer.Scorer"
            )
        if self.protocol.votes_by_labels and self.voter is None:
            raise ValueError(
                f"protocol {self.protocol.name!r} has votes by label probabilities, which need the policy; got none. "
                "Pass voter, a PolicySelfComparisonJudge of the policy that talks"
            )
        if self.protocol.control == "foreign_critiques":
            self.board = CritiqueBoard(self.question)
        self._new_coordinator()

    async def make_envs(self) -> Sequence[Env]:
        """One fresh conversation: an environment for every agent and lane, agent by agent.

        Raises:
            ValueError: If it is to read the critiques of another conversation, and was not paired with one.
        """
        control = self.protocol.control
        if control == "foreign_critiques" and self.partner is None:
            raise ValueError(
                f"control={control} reads critiques of another conversation of the same batch; play batches with "
                "viva.training.rollouts.run_groups, which pairs them, or use another control"
            )
        self._record, self._credit, self._shown = None, None, {}
        coordinator = self._new_coordinator()
        deal = self._deal if control in DEALT else None
        return [
            MultiAgentConversationEnv(
                agent_id, coordinator, self.renderer, lane, deal, self.voter, roles=self.roles
            )
            for agent_id, lane in self.protocol.seats(self.num_agents)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Pay the conversation.

        Returns:
            Rewards and metrics, in the order of the environments; an agent's metrics are with its first lane. Seats
            without a reward (`unpaid_seats`) get 0.0; an agent that failed (``continue``) has no metrics either, and
            its trajectory must not be trained.

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
        self._record = said.fields() | self._control() | self.reward.new_record(self.protocol, self.judge)
        coordinator.check_finished()
        scored = await self.reward.score(
            Played(
                conversation=conversation,
                protocol=self.protocol,
                trajectories_G=trajectory_group,
                renderer=self.renderer,
                judge=self.judge,
                scorer=self.scorer,
                answer=self.answer,
                grader=self.grader,
                seed=self.seed,
                record=self._record,
            )
        )
        self._credit = scored.credit
        places = [(env.agent_id, env.lane) for env in seats]
        self._unpaid_seats = frozenset(
            seat for seat, place in enumerate(places) if place not in scored.rewards
        )
        if self.initial_judge is not None:
            compared = await self.initial_judge.some_pairs(
                self.question, conversation.final_solutions, self.initial_judge_pairs, self.seed
            )
            self._record["initial_judge_comparisons"] = [asdict(each) for each in compared]
        return [
            (scored.rewards.get((agent_id, lane), 0.0), {} if lane else scored.metrics.get(agent_id, {}))
            for agent_id, lane in places
        ]

    def credit(self) -> GroupCredit | None:
        """Credit of the last conversation's tokens; ``None``: each earned its seat's reward."""
        return self._credit

    def unpaid_seats(self) -> frozenset[int]:
        """Seats of the last conversation without a reward: of failed agents, and lanes that its reward does not pay."""
        return self._unpaid_seats

    def logging_tags(self) -> list[str]:
        """Tags for the metrics of this kind of group."""
        return list(self.tags or (self.protocol.name,))

    def record(self) -> dict[str, object] | None:
        """Record of the last conversation whose rewards were asked for, ready for JSON.

        The fields of `ConversationRecord` and what the reward adds. Of a void conversation, what there was of
        them; rewards is then empty. ``None`` before the first.
        """
        if self._record is None:
            return None
        return ConversationRecord.model_validate(self._record).model_dump(mode="json", exclude_unset=True)

    def _new_coordinator(self) -> MultiAgentCoordinator:
        return MultiAgentCoordinator(self.question, self.num_agents, self.protocol, seed=self.seed)

    async def _deal(self, turns: Sequence[Turn], view: View) -> Sequence[Turn]:
        if self.board is None or self.partner is None:
            dealt = shuffled(turns, self.num_agents, f"{self.seed}/{self.question}")
        else:
            self.board.put_up(view.round_index, turns)
            dealt = foreign(turns, await self.partner.read(view.round_index))
        # whole turns may be shown, so they must hold nothing that was dealt to others
        own = {slot: critique for slot, critique in dealt.items() if critique.reader == view.agent_id}
        self._shown[view.round_index, view.agent_id] = list(own.values())
        return as_read(turns, own)

    def _control(self) -> dict[str, object]:
        """The control's part of the record; nothing without one."""
        if self.protocol.control is None:
            return {}
        shown = [
            {"round_index": round_index, **asdict(critique)}
            for (round_index, _), own in sorted(self._shown.items())
            for critique in own
        ]
        partner = None if self.partner is None else self.partner.question
        return {"control": {"name": self.protocol.control, "question": partner, "shown": shown}}


def speakers_of(builder: EnvGroupBuilder, seat: int, trajectory: Trajectory) -> list[Speaker] | None:
    """The policy that sampled each reply of a seat; ``None`` where one speaks for all."""
    if not isinstance(builder, MultiAgentConversationEnvGroupBuilder) or builder.roles is None:
        return None
    agent_id, _ = builder.protocol.seats(builder.num_agents)[seat]
    return [builder.roles.speaker(agent_id, str(turn.logs["segment"])) for turn in trajectory.transitions]


def pair_up(builders: Sequence[EnvGroupBuilder]) -> None:
    """Let every conversation of a batch that reads another one's critiques read those of the next on another problem.

    Where a batch has no other problem, it reads none.
    """
    waiting = [
        (builder, builder.board)
        for builder in builders
        if isinstance(builder, MultiAgentConversationEnvGroupBuilder) and builder.board is not None
    ]
    for place, (builder, _) in enumerate(waiting):
        others = (*waiting[place + 1 :], *waiting[:place])
        boards = (board for _, board in others if board.question != builder.question)
        builder.partner = next(boards, None) or CritiqueBoard.empty()


def close_board(builder: EnvGroupBuilder) -> None:
    """Let nobody wait any longer for a conversation that is over."""
    if isinstance(builder, MultiAgentConversationEnvGroupBuilder) and builder.board is not None:
        builder.board.close()


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
