"""``conversation``: agents argue, and each one's final solution is trained as an answer to the bare question.

What is trained of a final turn is the solution, found on the sampled token ids, and nothing before it:

- free text (critique self-play): everything after the marker ``Revise:`` or ``Defend:``, the stop token included, and
  white space before the solution where a token joins it to the first word;
- JSON (round robin): the value of ``solution`` up to the last token that holds nothing else, and the stop token, if
  nothing but the closing of the object stands between the two. Its logprob is that sampled behind the brace: the end
  looks more certain than it was, and ratios that look at it are a little too small rather than too large;
- a reply that was not structured: all of it. Thinking always stays out.

A solution whose tokens spell something else (escaped in JSON, a first token that began before it) is not trained and
counted in the metric ``unlocated``. An agent that defends without saying its solution again has none.

The advantage comes from the conversation (what the final turn's tokens were credited with, else the seat's reward),
or from a verifier of the solution.

Legend: ``_G`` seats of a group, ``_T`` tokens.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    Trajectory,
    TrajectoryGroup,
)

from viva.conversation.records import Conversation, Solution
from viva.conversation.rendering import build_prompt, direct_messages
from viva.experts.assisted import leak
from viva.experts.strategy import Completion, credit_of, record_of
from viva.rewards.credit import token_ranges
from viva.selfplay.group import coordinator_of

_CLOSING = re.compile(r'"\s*\}\s*(```\s*)?')
"""The end of an object behind the value of its last key."""


@runtime_checkable
class _Asking(Protocol):
    """A builder with a question and a chat format."""

    question: str
    renderer: Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinalTurn:
    transition: int
    solution: str
    finished: bool
    completion: Completion | None


@dataclass(kw_only=True)
class ConversationExpertGroupBuilder(EnvGroupBuilder):
    """Any builder of conversations as a search strategy for the bare question.

    Raises:
        ValueError: If the conversation is about another question or in another chat format.
    """

    inner: EnvGroupBuilder
    """The builder of a whole conversation, such as those of `viva.selfplay`."""
    question: str
    renderer: Renderer
    """The conversation's: both contexts are written in one format."""
    verify: Callable[[str], float] | None = None
    """Reward of a final solution; one that was cut at the token limit earns 0. By default, the conversation's own
    rewards count."""
    system_prompt: str | None = None
    """System message before the bare question."""
    leak_phrases: tuple[str, ...] = ()
    """Words about the conversation that should not turn up in final solutions; their rate is the metric ``leak``."""
    strategy_id: str = "conversation"
    weight: float | None = None
    _final_G: list[_FinalTurn | None] = field(default_factory=list[_FinalTurn | None], init=False, repr=False)

    def __post_init__(self) -> None:
        """Check that both contexts are about one question and in one format."""
        if not isinstance(self.inner, _Asking):
            return
        if self.inner.question != self.question:
            raise ValueError(
                f"the conversation is about {self.inner.question!r}, not about {self.question!r}"
            )
        if self.inner.renderer is self.renderer:
            return
        probe = direct_messages(self.question)
        if build_prompt(self.inner.renderer, probe) != build_prompt(self.renderer, probe):
            raise ValueError(
                "the conversation's renderer writes the question in other tokens than the one given: sampling and "
                "training context need the same chat format and tokenizer"
            )

    async def make_envs(self) -> Sequence[Env]:
        """The conversation's."""
        self._final_G = []
        return await self.inner.make_envs()

    def context_transform(self, observation: Observation, turn_index: int) -> Observation:
        """The bare question."""
        del observation, turn_index
        return build_prompt(self.renderer, direct_messages(self.question, self.system_prompt))

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Rewards of the final solutions, with the conversation's metrics. `unpaid_seats` gave none and get 0.0.

        Raises:
            ValueError: If the environments are not those of one conversation, or it credits tokens but not those of a
                final turn. Errors of the conversation's own rewards pass through.
        """
        own_G = await self.inner.compute_group_rewards(trajectory_group, env_group)
        coordinator, seats = coordinator_of(env_group)
        self._final_G = [
            self._final_turn(coordinator.conversation, (env.agent_id, env.lane), trajectory)
            for env, trajectory in zip(seats, trajectory_group, strict=True)
        ]
        credit = credit_of(self.inner)
        credited = (
            {} if credit is None else {(each.seat, each.transition): each.reward for each in credit.spans}
        )
        paid_G: list[tuple[float, Metrics]] = []
        for seat, (final, (own, metrics)) in enumerate(zip(self._final_G, own_G, strict=True)):
            if final is None:
                paid_G.append((0.0, metrics))
                continue
            if self.verify is not None:
                reward = float(self.verify(final.solution)) if final.finished else 0.0
            elif credit is None:
                reward = own
            elif (seat, final.transition) in credited:
                reward = credited[seat, final.transition]
            else:
                raise ValueError(
                    f"the conversation credits nothing to the final solution of seat {seat}; give a verify function"
                )
            unlocated = {"unlocated": float(final.completion is None)}
            paid_G.append((reward, metrics | unlocated | leak(final.solution, self.leak_phrases)))
        return paid_G

    def completions(self, group: TrajectoryGroup) -> list[Sequence[Completion]]:
        """The final solution of every agent; `RuntimeError` before the rewards were computed."""
        if len(self._final_G) != len(group.trajectories_G):
            raise RuntimeError("what to train of a conversation is known once its rewards were computed")
        return [
            [] if final is None or final.completion is None else [final.completion] for final in self._final_G
        ]

    def unpaid_seats(self) -> frozenset[int]:
        """Seats that gave no solution: those of critiques, of failed agents, and all before the rewards."""
        return frozenset(seat for seat, final in enumerate(self._final_G) if final is None)

    async def cleanup(self) -> None:
        """The conversation's."""
        await self.inner.cleanup()

    def logging_tags(self) -> list[str]:
        """The strategy, and the conversation's tags."""
        return [self.strategy_id, *self.inner.logging_tags()]

    def record(self) -> Any:
        """The conversation's record."""
        return record_of(self.inner)

    def _final_turn(
        self, conversation: Conversation, place: tuple[int, int], trajectory: Trajectory
    ) -> _FinalTurn | None:
        """The last turn of a seat that gave a solution; ``None`` if the agent failed, or is never asked for one."""
        if place[0] in {failure.agent_id for failure in conversation.failures}:
            return None
        turns = conversation.sampled_turns(*place)
        found = [index for index, turn in enumerate(turns) if isinstance(turn.response, Solution)]
        if not found or len(turns) != len(trajectory.transitions):
            return None
        turn = turns[found[-1]]
        solution = cast(Solution, turn.response).solution
        action = trajectory.transitions[found[-1]].ac
        finished = action.stop_reason == "stop"
        span = solution_tokens(self.renderer, action.tokens, turn.text, solution)
        completion = None
        if span is not None:
            with_end = finished and ends_behind(self.renderer, action.tokens, turn.text, solution, span)
            completion = Completion(transition=found[-1], start=span[0], stop=span[1], with_end=with_end)
        return _FinalTurn(transition=found[-1], solution=solution, finished=finished, completion=completion)


def solution_tokens(
    renderer: Renderer, tokens_T: Sequence[int], text: str, solution: str
) -> tuple[int, int] | None:
    """Sampled tokens ``[start, stop)`` of a reply that spell a solution; ``None`` where none spell it without doubt.

    The last place where the solution stands verbatim in the reply's text counts.
    """
    first = _last_place(text, solution) if solution else -1
    if first < 0:
        return None
    last = first + len(solution)
    space = len(text[:first].rstrip())
    for start in dict.fromkeys((first, space)):
        (span,) = token_ranges(renderer, tokens_T, text, [(start, last)])
        if span is None:
            continue
        spelt = _decode(renderer, tokens_T[span[0] : span[1]])
        if not text[last:].strip() and spelt.rstrip() == text[start:last]:
            return span[0], len(tokens_T)
        # the last token may reach beyond the solution
        for stop in (span[1], span[1] - 1):
            spelt = _decode(renderer, tokens_T[span[0] : stop])
            if spelt.strip() and text[start:last].startswith(spelt):
                return span[0], stop
    return None


def ends_behind(
    renderer: Renderer, tokens_T: Sequence[int], text: str, solution: str, span: tuple[int, int]
) -> bool:
    """Whether the span spells all of the solution, and only the object's closing and one stop token come after it."""
    if span[1] >= len(tokens_T) or tokens_T[-1] not in renderer.get_stop_sequences():
        return False
    spelt = _decode(renderer, tokens_T[span[0] : span[1]])
    rest = text[_last_place(text, solution) + len(solution) :]
    return spelt.strip() == solution.strip() and _CLOSING.fullmatch(rest) is not None


def _last_place(text: str, piece: str) -> int:
    """The last place of a piece of text, or -1. ``rfind`` could take time quadratic in a text that a model wrote."""
    place = text[::-1].find(piece[::-1])
    return -1 if place < 0 else len(text) - place - len(piece)


def _decode(renderer: Renderer, tokens_T: Sequence[int]) -> str:
    return str(cast(Any, renderer.tokenizer).decode(list(tokens_T)))
