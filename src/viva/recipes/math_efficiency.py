"""Expert iteration on problems with known answers: several search strategies, trained into the bare question.

    viva train math_efficiency model_name=<hub name or path> 'strategies=["iid", "prompt_augmentation"]' \\
        train_prompts_path=problems.jsonl log_path=/tmp/run3

Options are ``key=value``; ``--help`` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

import chz

from viva.recipes.config import DEFAULT_DATAPOINTS
from viva.recipes.protocol import Game
from viva.recipes.reward import AskedConfig, is_own, refuse_unused
from viva.selfplay.critique import critique_protocol
from viva.selfplay.round_robin import round_robin_protocol
from viva.selfplay.user_code import reward_named, source_digests

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import EnvGroupBuilder

    from viva.experts.estimation import Estimator
    from viva.judging.comparison import Judge
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import BatchUnit, Plan
    from viva.recipes.strategies import StrategyFactory, Task
    from viva.rewards.base import Reward
    from viva.rewards.solutions import SolutionReward
    from viva.training.batch import ExpertConfig
    from viva.training.data import BuilderFactory, PromptItem
    from viva.training.loop import Training


_UNSWAPPED = ("iid", "best_of")
"""Strategies that sample behind the context they are trained in."""
_READ_BY: Mapping[str, Sequence[str]] = {
    "hint": ("prompt_augmentation",),
    "leak_phrases": ("prompt_augmentation", "feedback", "conversation"),
    **dict.fromkeys(("feedback", "train_behind"), ("feedback",)),
    "keep": ("best_of",),
    "kl_penalty_coef": _UNSWAPPED,  # it is measured of the policy's own samples
    **dict.fromkeys(("conversation", "conversation_reward", "max_rounds", "num_agents"), ("conversation",)),
}
"""Strategies that read an option; those of the user's own may read them all."""


def _strategies(given: object) -> object:
    """Strategies by name; one alone needs no list."""
    return [given] if isinstance(given, str) else given


@chz.chz
class Config(AskedConfig):
    """Options of math efficiency."""

    strategies: list[str] = chz.field(
        default_factory=lambda: ["iid", "prompt_augmentation"],
        metadata={"read": _strategies},
        doc="of iid, prompt_augmentation, feedback, conversation, best_of, module:FUNCTION, path.py:FUNCTION",
    )
    weights: dict[str, float] | None = chz.field(
        default=None, doc="share of every strategy in the update; default: each sample counts once"
    )
    assignment: Literal["all", "split"] = chz.field(
        default="all", doc="every strategy answers every problem, or each problem goes to one of them"
    )
    group_size: int = chz.field(
        default=4, doc="samples per problem and strategy; a conversation has num_agents"
    )
    batch_size: int | None = chz.field(
        default=None,
        doc="samples per step; default: the largest multiple up to 128 of what one problem takes",
    )
    max_training_datapoints: int = chz.field(default=DEFAULT_DATAPOINTS, doc="samples of the whole run")

    estimator: Literal[
        "importance_sampling",
        "token_tis",
        "balance",
        "none",
        "positives",
        "shaped",
        "seq_tis",
        "seq_is",
        "distill",
    ] = chz.field(default="shaped", doc="how samples of other contexts are weighed")
    estimator_options: dict[str, float | str | bool] | None = chz.field(
        default=None, doc="of the estimator, like {'gamma': 0.2}"
    )
    baseline: Literal["stratum", "prompt_union", "weighted", "none"] | None = chz.field(
        default=None, doc="what a reward is compared with; default: the estimator's own"
    )
    min_effective_share: float = chz.field(
        default=0.1, doc="lowest effective sample size and mean weight of a strategy, of 1; 0 lets all pass"
    )
    on_waste: Literal["warn", "stop"] = chz.field(default="warn", doc="what to do below that")
    samples_every: int = chz.field(
        default=10, doc="steps between batches that are kept for viva estimate; 0 keeps none"
    )

    reward: str = chz.field(
        default="answers",
        doc="answers; with strategies=iid also majority, judge_answer, log_probability, peer_prediction, rubric, serl, "
        "shuffled_NAME, path.py:REWARD",
    )
    length_weight: float = chz.field(
        default=0.1, doc="share of the reward of a right answer that depends on its length, below 1"
    )
    token_budget: int | None = chz.field(
        default=None, doc="length that the share refers to; default: max_tokens"
    )
    hint: str | None = chz.field(
        default=None, doc="prompt_augmentation: what the sampler is told; a text of its own by default"
    )
    leak_phrases: list[str] | None = chz.field(
        default=None,
        doc="words of hint, feedback or conversation that should not turn up in answers; counted",
    )
    feedback: Literal["verifier", "generated"] = chz.field(
        default="verifier", doc="feedback: right or wrong, or a critique by the policy itself"
    )
    train_behind: Literal["problem", "attempt"] = chz.field(
        default="problem",
        doc="feedback: train the second attempt behind the problem, or behind problem and first",
    )
    keep: Literal["best", "all"] = chz.field(
        default="best", doc="best_of: imitate the best right answer of a group, or all right ones"
    )
    conversation: Literal["critique", "round_robin"] = chz.field(
        default="critique", doc="conversation: which"
    )
    conversation_reward: str = chz.field(
        default="verifier",
        doc="conversation: by the known answer (verifier), by what the agents say of one another (own), or a reward "
        "of the conversation that asks no other model, such as majority",
    )
    max_rounds: int = chz.field(default=2, doc="conversation=round_robin: rounds")

    hf_prompt_column: str = "question"
    hf_answer_column: str | None = "answer"
    log_path: str = "runs/math_efficiency"

    @property
    def budget(self) -> int:
        """The length that the reward's length term refers to."""
        return self.max_tokens if self.token_budget is None else self.token_budget

    def experts(self) -> ExpertConfig:
        """Settings of the estimator; `ValueError` if its options and the baseline do not go together."""
        from viva.experts.diagnostics import mixes_units
        from viva.training.batch import ExpertConfig

        return ExpertConfig(
            estimator=self.estimator,
            estimator_options=self.estimator_options or {},
            baseline=self.baseline,
            min_effective_share=self.min_effective_share,
            on_waste=self.on_waste,
            mixed_units=mixes_units(self.strategies, self.conversation_reward),
        )

    def group_reward(self) -> SolutionReward | None:
        """The reward of groups of plain samples, if it is not the known answers.

        Raises:
            ValueError: If the option names none, or there are other strategies.
        """
        from viva.rewards.solutions import SolutionReward

        reward = reward_named(self.reward)
        if not (self.talks and reward.name == "answers"):  # there the judge is that of the conversation
            reward = self.asking(reward, is_whole=is_own(self.reward))
        if reward.name == "answers":
            return None
        if not isinstance(reward, SolutionReward) or not reward.pays_samples:
            raise ValueError(
                f"reward={self.reward} pays conversations; of single replies use answers, majority, judge_answer, "
                "log_probability, peer_prediction, rubric, serl, shuffled or shuffled_majority"
            )
        if set(self.strategies) != {"iid"}:
            raise ValueError(
                f"reward={self.reward} pays plain samples as a group; use strategies=iid; got "
                f"{', '.join(self.strategies)}"
            )
        return reward

    @property
    def talks(self) -> bool:
        """Whether ``conversation`` is one of the strategies."""
        return "conversation" in self.strategies

    def game(self) -> Game:
        """The protocol and reward of the strategy ``conversation``.

        Raises:
            ValueError: If there is no such reward or judge, or it does not go with the conversation.
        """
        from viva.rewards import peer_review, tournament
        from viva.rewards.answers import Answers

        is_critique, is_verified = self.conversation == "critique", self.conversation_reward == "verifier"
        reward: Reward = peer_review() if is_critique else tournament()
        if is_critique:
            protocol = critique_protocol(self.num_agents, personas=self.personas, on_failure=self.on_failure)
            if is_verified:  # what comes behind the last solutions, nobody reads then
                protocol = replace(protocol, rounds=protocol.rounds[:-1])
        else:
            protocol = round_robin_protocol(
                self.max_rounds, personas=self.personas, on_failure=self.on_failure
            )
        if is_verified:  # the strategy grades solutions itself
            reward = Answers(name="verifier")
        elif self.conversation_reward != "own":
            reward = reward_named(self.conversation_reward)
            if reward.scorer is not None or reward.needs_answers:
                asks = "a scorer" if reward.scorer is not None else "the known answer"
                raise ValueError(
                    f"conversation_reward={self.conversation_reward} asks {asks}; give verifier, own, or a reward that "
                    "pays by what was said, such as majority, maca or tournament"
                )
            reward.check(protocol, self.num_agents)
        reward = self.asking(reward, is_whole=is_own(self.conversation_reward))
        return Game(protocol=protocol, reward=reward, num_agents=self.num_agents)

    def unit(self, strategies: Sequence[str]) -> BatchUnit:
        """The smallest batch in which every strategy has its part."""
        from viva.recipes.plan import BatchUnit

        sizes = [self.num_agents if name == "conversation" else self.group_size for name in strategies]
        return BatchUnit(
            samples=sum(sizes),
            prompts=1 if self.assignment == "all" else len(strategies),
            name="the samples of all strategies",
            groups="problems",
        )

    def make_plan(self) -> Plan:
        """Check all options and load the problems; no model is loaded."""
        from viva.recipes.judges import with_checked_judge
        from viva.recipes.plan import at_least, plan_run
        from viva.recipes.strategies import DEFAULT_HINT, EfficientReward, find_strategies

        at_least(
            self, {"group_size": 1, "max_rounds": 1, "samples_every": 0, "token_budget": 1, "max_tokens": 1}
        )
        for phrase in self.leak_phrases or ():
            if not phrase.strip():
                raise ValueError(
                    f"leak_phrases must hold words, since nothing is in every answer; got {self.leak_phrases}"
                )
        strategies = list(find_strategies(self.strategies))
        _check_mixture(self, strategies)
        _check_estimator(self, strategies)
        game = self.game() if self.talks else None
        reward = self.group_reward()
        told = "" if reward is None else f"reward {self.reward}, "
        if self.max_staleness or self.stream_updates:
            raise ValueError(
                "the estimators weigh a whole batch that the policy being trained has sampled; leave out "
                f"max_staleness and stream_updates; got {self.max_staleness} and {self.stream_updates}"
            )
        EfficientReward(answer="0", token_budget=self.budget, length_weight=self.length_weight)
        plan = plan_run(
            self,
            recipe="math_efficiency",
            summary=f"{', '.join(strategies)}, {told}estimator {self.estimator}",
            unit=self.unit(strategies),
            record={
                "hint": DEFAULT_HINT if self.hint is None else self.hint,
                "token_budget": self.budget,
                "user_code": source_digests(
                    *self.strategies, self.reward, self.conversation_reward if game else None
                ),
            },
        )
        _check_read(self, strategies, reward)
        if reward is None or reward.needs_answers:
            _check_answers(plan)
        return with_checked_judge(plan, game.reward if game else reward, self.judge_text())

    async def build_training(self, plan: Plan, opened: OpenRun) -> Training:
        """The loop's parts for an open run."""
        from viva.experts.strategy import ExpertGroupBuilder
        from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
        from viva.recipes.judges import asked_by
        from viva.recipes.loop import make_training
        from viva.recipes.strategies import EfficientReward, Task, conversation, find_strategies
        from viva.training.data import MixtureDataset
        from viva.training.followers import Current

        policy = PolicyRef(timeout_s=self.policy_timeout_s)
        group_reward = self.group_reward()
        asker = self.game().reward if self.talks else group_reward
        asked_judge, group_scorer, followers = await asked_by(asker, plan, opened)

        @functools.cache
        def judge() -> Judge:
            return asked_judge or PolicySelfComparisonJudge(policy, opened.renderer)

        def task(item: PromptItem, seed: int) -> Task:
            return Task(
                item=item,
                seed=seed,
                renderer=opened.renderer,
                reward=EfficientReward(
                    answer=item.answer,
                    token_budget=self.budget,
                    length_weight=self.length_weight,
                    grader=plan.check.is_right,
                ),
                group_size=self.group_size,
                policy=policy,
                judge=judge,
                options=self,
                group_reward=group_reward,
                group_scorer=group_scorer,
            )

        def as_strategy(name: str, factory: StrategyFactory) -> BuilderFactory:
            weight = None if self.weights is None else self.weights[name]

            def make(item: PromptItem, seed: int) -> EnvGroupBuilder:
                return ExpertGroupBuilder(inner=factory(task(item, seed)), strategy_id=name, weight=weight)

            _try_once(name, factory, task(plan.order.items[0], self.seed))

            return make

        strategies = find_strategies(self.strategies)
        return await make_training(
            plan,
            opened,
            (lambda item, seed: conversation(task(item, seed))) if self.talks else None,
            dataset=MixtureDataset(
                order=plan.order,
                factories={name: as_strategy(name, factory) for name, factory in strategies.items()},
                assignment=self.assignment,
            ),
            needs_answers=self.talks and self.game().reward.needs_answers,
            experts=self.experts(),
            samples_every=self.samples_every,
            followers=[Current(policy), *followers],
        )


def _check_read(config: Config, strategies: Sequence[str], reward: SolutionReward | None) -> None:
    """Refuse options that nothing reads."""
    from viva.recipes.strategies import STRATEGIES

    if not set(strategies) <= set(STRATEGIES):
        return
    named = ", ".join(strategies)
    for option, readers in _READ_BY.items():
        if set(readers).isdisjoint(strategies):
            any_of = " or ".join(readers)
            why = f"it belongs to {any_of}, and strategies are {named}"
            refuse_unused(config, [option], why, remedy=f"add {any_of} to strategies, or leave it out")
    if config.talks and config.conversation == "critique":
        fix = "use conversation=round_robin, or leave it out"
        refuse_unused(config, ["max_rounds"], "conversation=critique has four rounds", remedy=fix)
    talk = "" if set(strategies) != {"conversation"} else config.conversation_reward
    is_graded = reward is None or reward.needs_answers
    if not is_graded or talk not in ("", "verifier"):
        why = f"it belongs to known answers, and reward is {talk or config.reward}"
        fix = "conversation_reward=verifier" if talk else "reward=answers"
        refuse_unused(config, ["length_weight", "token_budget"], why, remedy=f"use {fix}, or leave it out")


def _check_mixture(config: Config, strategies: Sequence[str]) -> None:
    from viva.experts.estimation import check_mixture

    if config.weights is None:
        return
    if sorted(config.weights) != sorted(strategies):
        raise ValueError(
            f"weights must name just the strategies {', '.join(strategies)}; got {', '.join(config.weights) or 'none'}"
        )
    check_mixture(config.weights)


def _check_estimator(config: Config, strategies: Sequence[str]) -> None:
    from viva.experts.estimation import Need
    from viva.experts.estimators import Distill
    from viva.training.update import trained_temperature

    experts = config.experts()
    experts.check_temperature(config.temperature, trained_temperature(config.loss_fn_config))
    estimator = experts.make()
    if estimator.combines_strategies and config.weights is not None:
        raise ValueError(
            f"{config.estimator} weighs the strategies by their numbers of samples; leave out weights"
        )
    if experts.mixed_units:
        _check_units(config, estimator)
    if estimator.anchors_at_sampling:
        _check_clip(config, strategies)
    if isinstance(estimator, Distill):
        _check_teacher(estimator.teacher, strategies)
    if Need.CONTEXT_LOGPROBS not in estimator.needs:
        return
    if config.assignment == "split":
        raise ValueError(
            f"{config.estimator} compares strategies on the same problem; use assignment=all; got assignment=split"
        )
    if "feedback" in strategies and config.train_behind == "attempt":
        raise ValueError(
            f"{config.estimator} needs one training context for all strategies; use train_behind=problem"
        )


def _check_clip(config: Config, strategies: Sequence[str]) -> None:
    """Refuse a clip on the whole ratio: it drops what should be unlearnt and keeps what should be imitated."""
    swapped = [name for name in strategies if name not in _UNSWAPPED]
    if swapped and config.loss_fn in ("ppo", "cispo"):
        raise ValueError(
            f"loss_fn={config.loss_fn} with {config.estimator} would clip how far the training context of "
            f"{', '.join(swapped)} is from the sampling context, not how stale the samples are; use "
            "loss_fn=importance_sampling, or another estimator, such as shaped"
        )


def _check_teacher(teacher: str, strategies: Sequence[str]) -> None:
    if teacher in (*_UNSWAPPED, "feedback", "conversation"):
        raise ValueError(
            f"distill: {teacher} cannot be the teacher; a teacher is one context for a whole problem, other than the "
            "problem alone, such as prompt_augmentation"
        )
    if not {"iid", teacher} <= set(strategies):
        raise ValueError(
            f"distill needs the strategies iid and {teacher} (its teacher); got {', '.join(strategies)}"
        )


def _check_units(config: Config, estimator: Estimator) -> None:
    """Refuse a mean over rewards of conversations and of other strategies, which are in different units."""
    from viva.experts.estimation import Baseline, choose_baseline

    baseline = choose_baseline(estimator, config.baseline)
    if baseline in (Baseline.STRATUM, Baseline.NONE):
        return
    has_stratum = Baseline.STRATUM in estimator.baselines
    fix = "baseline=stratum" if has_stratum else "estimator=shaped with baseline=stratum"
    raise ValueError(
        f"conversation_reward={config.conversation_reward} pays conversations in another unit than the other "
        f"strategies are paid in, and the baseline {baseline} of {config.estimator} is one mean over all samples of a "
        f"problem; use {fix}, or conversation_reward=verifier"
    )


def _check_answers(plan: Plan) -> None:
    missing = [item.question for item in plan.order.items if item.answer is None]
    if missing:
        raise ValueError(
            f"every problem needs a known answer; {len(missing)} of {len(plan.order.items)} have none, the first is "
            f"{missing[0][:80]!r}. Give them in the key answer, or name the column with hf_answer_column."
        )


def _try_once(name: str, factory: StrategyFactory, task: Task) -> None:
    """Refuse a strategy of the user's that makes no group of a problem; what its own code raises passes through."""
    from tinker_cookbook.rl.types import EnvGroupBuilder

    try:
        made = cast(object, factory(task))
    except TypeError as error:
        raise ValueError(
            f"the strategy {name!r} cannot be called with a Task: {error}; see its docs"
        ) from error
    if not isinstance(made, EnvGroupBuilder):
        raise ValueError(
            f"the strategy {name!r} must return an EnvGroupBuilder for a Task; got {type(made).__name__}"
        )
