"""Problems sampled with help and trained without it: extra instructions, or feedback on a first attempt.

``prompt_augmentation`` samples behind extra instructions and trains without them: the policy learns to do unasked what
it can do when instructed. ``feedback`` samples a second attempt behind ``problem, attempt 1, feedback`` and trains it
behind ``problem, attempt 1`` (self-correction unasked) or behind the ``problem`` alone (right at once); the first
attempt weighs 0 by default. Training contexts are rendered from messages, like the sampled ones: where a chat format
rewrites earlier replies (drops their thinking), the second turn just becomes a datum of its own.

What else the help puts into the policy's words (a habit of speech, a mention of the instruction itself) may be learnt
as well: name such phrases, and watch their rate, the metric ``leak``.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers.base import Message, Renderer
from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    StepResult,
    Trajectory,
    TrajectoryGroup,
)

from viva.conversation.critiques import LONE_CRITIC, attempt_messages, read_critiques
from viva.conversation.records import Conversation, CritiqueReply, ReplyStatus, Solution, Turn
from viva.conversation.rendering import build_prompt, read_reply
from viva.experts.strategy import Completion
from viva.judging.judge import PolicyRef, sample
from viva.judging.records import ConversationRecord

RIGHT_FEEDBACK = "Your answer is right."
WRONG_FEEDBACK = "Your answer is wrong. Try again."


def leak(text: str, phrases: Sequence[str]) -> dict[str, float]:
    """Metric ``leak``: 1 if one of the phrases occurs in the text, whatever the case; nothing without phrases."""
    if not phrases:
        return {}
    return {"leak": float(any(phrase.casefold() in text.casefold() for phrase in phrases))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One reply to a problem, as it was asked."""

    prompt: str
    text: str
    is_right: bool | None
    """``None``: it is not known."""


def problem_record(
    envs_G: Sequence[Env], trajectories_G: Sequence[Trajectory], rewards: Sequence[float] | None = None
) -> dict[str, object]:
    """The record of a group of problems, ready for JSON: every seat is an agent, and every attempt a round.

    Rewards of the group, if it has any, stand for those of the environments. Only the last attempt of a seat is graded.
    """
    envs = {
        seat: env
        for seat, env in enumerate(envs_G)
        if isinstance(env, PromptAugmentedEnv | FeedbackEnv) and env.attempts
    }
    if not envs:
        return {}
    first = next(iter(envs.values()))
    problem = first.problem if isinstance(first, FeedbackEnv) else first
    answer = problem.get_reference_answer() or None
    turns = [
        Turn(
            agent_id=seat,
            round_index=place,
            prompt=attempt.prompt,
            text=attempt.text,
            response=Solution(solution=attempt.text),
            status=ReplyStatus.OK,
        )
        for seat, env in envs.items()
        for place, attempt in enumerate(env.attempts)
    ]
    talk = Conversation(
        question=problem.get_question(),
        num_agents=len(envs_G),
        max_rounds=max(len(env.attempts) for env in envs.values()),
        turns=tuple(sorted(turns, key=lambda turn: (turn.round_index, turn.agent_id))),
        answer=answer,
    )
    graded = {seat: env.attempts[-1].is_right for seat, env in envs.items()}
    record = ConversationRecord.of(
        talk,
        answer=answer,
        protocol="problem",
        order="simultaneous",
        rewards={
            seat: math.fsum(each.reward for each in trajectories_G[seat].transitions)
            if rewards is None
            else rewards[seat]
            for seat in envs
        },
        correct={seat: is_right for seat, is_right in graded.items() if is_right is not None},
    )
    return record.model_dump(mode="json", exclude_unset=True)


class PromptAugmentedEnv(ProblemEnv):
    """One question, asked behind one prefix and trained behind another.

    Subclasses say what the question is and how answers are checked, as for every ``ProblemEnv``. With equal prefixes it
    is an ordinary problem.

    The prefixes are the messages before the question as it is sampled and as it is trained; the rate of
    ``leak_phrases``, words of the hint that should not turn up in replies, is the metric ``leak``.
    """

    def __init__(
        self,
        renderer: Renderer,
        sampling_convo_prefix: list[Message],
        training_convo_prefix: list[Message],
        *,
        leak_phrases: Sequence[str] = (),
        format_coef: float = 0.1,
    ) -> None:
        super().__init__(renderer, convo_prefix=training_convo_prefix, format_coef=format_coef)
        self.attempts: list[Attempt] = []
        """The replies so far."""
        self.sampling_convo_prefix = sampling_convo_prefix
        self.training_convo_prefix = training_convo_prefix
        self.leak_phrases = tuple(leak_phrases)

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The question as it is sampled."""
        return self._observation(self.sampling_convo_prefix), self.stop_condition

    def get_training_observation(self) -> Observation:
        """The question as it is trained."""
        return self._observation(self.training_convo_prefix)

    def _observation(self, prefix: list[Message]) -> Observation:
        return build_prompt(self.renderer, [*prefix, Message(role="user", content=self.get_question())])

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grade the reply; see ``ProblemEnv``."""
        result = await super().step(action, extra=extra)
        text, _ = read_reply(self.renderer, list(action))
        self.keep(text, result.metrics)
        result.metrics |= leak(text, self.leak_phrases)
        return result

    def keep(self, text: str, metrics: Metrics) -> None:
        """Keep a reply, which is right if the metric ``correct`` says so; its prompt has the help, if there was any."""
        is_plain = self.sampling_convo_prefix == self.training_convo_prefix
        asked = [] if is_plain else [str(each["content"]) for each in self.sampling_convo_prefix]
        asked.append(self.get_question())
        self.attempts.append(Attempt(prompt="\n\n".join(asked), text=text, is_right=_is_right(metrics)))


def _is_right(metrics: Metrics) -> bool | None:
    correct = metrics.get("correct")
    return None if correct is None else bool(correct)


@dataclass(kw_only=True)
class _AssistedGroupBuilder(EnvGroupBuilder):
    """A group of answers to one problem, which are kept for the transcript."""

    num_envs: int
    strategy_id: str
    weight: float | None = None
    _record: dict[str, object] = field(default_factory=dict[str, object], init=False, repr=False)

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Nothing beside the rewards of the environments; keeps what was said."""
        self._record = problem_record(env_group, trajectory_group)
        return await super().compute_group_rewards(trajectory_group, env_group)

    def record(self) -> dict[str, object] | None:
        """The problem and the replies of the last group, with the keys of a conversation."""
        return self._record or None

    def logging_tags(self) -> list[str]:
        """The strategy."""
        return [self.strategy_id]


@dataclass(kw_only=True)
class PromptAugmentedGroupBuilder(_AssistedGroupBuilder):
    """A group of answers to one question under extra instructions, trained without them."""

    env_thunk: Callable[[], PromptAugmentedEnv]
    """Makes one environment; all of a group ask the same."""
    strategy_id: str = "prompt_augmentation"
    _training_observation: Observation | None = field(default=None, init=False, repr=False)

    async def make_envs(self) -> Sequence[Env]:
        """`num_envs` environments.

        Raises:
            ValueError: If they would be trained in different contexts.
        """
        envs = [self.env_thunk() for _ in range(self.num_envs)]
        contexts = [env.get_training_observation() for env in envs]
        if any(context != contexts[0] for context in contexts):
            raise ValueError(
                "all environments of a group must ask the same question; env_thunk made different ones"
            )
        self._training_observation = contexts[0] if contexts else None
        return envs

    def context_transform(self, observation: Observation, turn_index: int) -> Observation:
        """The question without the extra instructions; `RuntimeError` before `make_envs`."""
        del observation, turn_index
        if self._training_observation is None:
            raise RuntimeError("the training context is known once make_envs was called")
        return self._training_observation


class Feedback(Protocol):
    """Says something about an attempt."""

    async def __call__(self, question: str, attempt: str, *, is_right: bool, place: int) -> str:
        """The feedback; `place` is the attempt's place in its group."""
        ...


async def verifier_feedback(question: str, attempt: str, *, is_right: bool, place: int) -> str:
    """Whether the attempt is right, and nothing else."""
    del question, attempt, place
    return RIGHT_FEEDBACK if is_right else WRONG_FEEDBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedFeedback:
    """The policy criticises the attempt, without knowing whether it is right. Its own tokens are not trained."""

    policy: PolicyRef
    """The training loop keeps it at the current policy."""
    renderer: Renderer
    seed: int
    """Seed of the group; every place in it draws with a seed of its own."""
    max_tokens: int = 256
    temperature: float = 1.0

    async def __call__(self, question: str, attempt: str, *, is_right: bool, place: int) -> str:
        """The critique, without the header that names its target. Errors of the engine pass through."""
        del is_right
        params = tinker.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=(self.seed + 1_000_003 * place) % 2**31,
            stop=self.renderer.get_stop_sequences(),
        )
        async with asyncio.timeout(self.policy.timeout_s):
            prompt = build_prompt(self.renderer, attempt_messages(question, attempt))
            response = await sample(self.policy.current(), prompt, params, role="policy")
        text, _ = read_reply(self.renderer, list(response.sequences[0].tokens))
        reading = read_critiques(text, LONE_CRITIC).response
        critiques = reading.critiques if isinstance(reading, CritiqueReply) else ()
        return critiques[0].text if critiques else text


class FeedbackEnv(Env):
    """Two turns at one problem. The reward is that of the second; the first is in the metric ``first_correct``.

    The problem says what the question is and grades both attempts; its ``convo_prefix`` stands in every context.
    ``train_behind=attempt`` keeps the first attempt in the second one's training context, ``problem`` drops it. The
    rate of ``leak_phrases`` in second attempts is the metric ``leak``.
    """

    def __init__(
        self,
        problem: ProblemEnv,
        feedback: Feedback,
        *,
        place: int = 0,
        train_behind: Literal["attempt", "problem"] = "attempt",
        leak_phrases: Sequence[str] = (),
    ) -> None:
        self.attempts: list[Attempt] = []
        """The replies so far."""
        self.problem = problem
        self.feedback = feedback
        self.place = place
        self.train_behind = train_behind
        self.leak_phrases = tuple(leak_phrases)
        self.training_observations: list[tuple[Observation, Observation]] = []
        """Sampling and training context of each turn so far."""
        self._messages = [*problem.convo_prefix, Message(role="user", content=problem.get_question())]
        self._said = ""

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The bare problem."""
        observation = build_prompt(self.problem.renderer, self._messages)
        self.training_observations = [(observation, observation)]
        return observation, self.problem.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Ask for feedback after the first attempt, grade the second."""
        problem, renderer = self.problem, self.problem.renderer
        text, ended = read_reply(renderer, list(action))
        if len(self.training_observations) > 1:
            result = await problem.step(action, extra=extra)
            self.attempts.append(Attempt(prompt=self._said, text=text, is_right=_is_right(result.metrics)))
            result.metrics |= leak(text, self.leak_phrases)
            return result
        question, is_right = problem.get_question(), ended and bool(problem.check_answer(text))
        self._said = await self.feedback(question, text, is_right=is_right, place=self.place)
        self.attempts.append(Attempt(prompt=question, text=text, is_right=is_right))
        attempted = [*self._messages, Message(role="assistant", content=text)]
        observation = build_prompt(renderer, [*attempted, Message(role="user", content=self._said)])
        kept = attempted if self.train_behind == "attempt" else self._messages
        self.training_observations.append((observation, build_prompt(renderer, kept)))
        return StepResult(
            reward=0.0,
            episode_done=False,
            next_observation=observation,
            next_stop_condition=problem.stop_condition,
            metrics={"first_correct": float(is_right)},
            logs={"feedback": self._said},
        )


@dataclass(kw_only=True)
class FeedbackGroupBuilder(_AssistedGroupBuilder):
    """A group of two-turn attempts at one problem."""

    env_thunk: Callable[[], ProblemEnv]
    """Makes the problem; called once for every environment."""
    feedback: Feedback = verifier_feedback
    train_behind: Literal["attempt", "problem"] = "attempt"
    transition_weights: tuple[float, float] = (0.0, 1.0)
    """Weights of the first and the second attempt. A first attempt that counts earns what the second earns."""
    leak_phrases: tuple[str, ...] = ()
    strategy_id: str = "feedback"
    _envs: list[FeedbackEnv] = field(default_factory=list[FeedbackEnv], init=False, repr=False)

    def __post_init__(self) -> None:
        """Check; `ValueError` if an option has no meaning."""
        if self.train_behind not in ("attempt", "problem"):
            raise ValueError(f"train_behind must be 'attempt' or 'problem'; got {self.train_behind!r}")
        for weight in self.transition_weights:
            Completion(transition=0, weight=weight)

    async def make_envs(self) -> Sequence[Env]:
        """`num_envs` environments."""
        self._envs = [
            FeedbackEnv(
                self.env_thunk(),
                self.feedback,
                place=place,
                train_behind=self.train_behind,
                leak_phrases=self.leak_phrases,
            )
            for place in range(self.num_envs)
        ]
        return self._envs

    def context_transform(self, observation: Observation, turn_index: int) -> Observation:
        """The observation without the feedback, rendered afresh from the messages it was made of.

        Raises:
            ValueError: If none of this group's environments ever showed it.
        """
        for env in self._envs:
            if len(env.training_observations) > turn_index:
                sampled, trained = env.training_observations[turn_index]
                if sampled == observation:
                    return trained
        raise ValueError(
            f"turn {turn_index} was not sampled in an observation of this group; transform the trajectories of the "
            "last make_envs only"
        )

    def completions(self, group: TrajectoryGroup) -> list[Sequence[Completion]]:
        """Both attempts, each with its weight."""
        return [
            [
                Completion(transition=turn, weight=self.transition_weights[turn])
                for turn in range(len(trajectory.transitions))
            ]
            for trajectory in group.trajectories_G
        ]
