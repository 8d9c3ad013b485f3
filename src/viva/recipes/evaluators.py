"""The evaluations of a run on its test prompts between steps: direct answers, conversations, answers judged."""

from dataclasses import replace

from viva.eval.conversations import ConversationEvaluator, group_seed
from viva.eval.direct import DirectEvaluator, DirectSampler
from viva.eval.judged import WinRateEvaluator
from viva.judging.judge import JudgeOptions
from viva.recipes.common import OpenRun
from viva.recipes.judges import judge_of, policy_of
from viva.recipes.plan import Plan
from viva.training.data import BuilderFactory
from viva.training.followers import Follower
from viva.training.loop import Evaluator


def direct_evaluators(plan: Plan, opened: OpenRun) -> list[Evaluator]:
    """Evaluators of bare questions, where test prompts have answers."""
    config = plan.config
    graded = [item for item in plan.test if item.answer is not None]
    if not graded:
        return []
    return [
        DirectEvaluator(
            items=graded,
            direct=direct_sampler(plan, opened, plan.eval_temperature),
            num_samples=config.eval_samples,
            asks_greedy=config.eval_greedy,
        )
    ]


def direct_sampler(plan: Plan, opened: OpenRun, temperature: float) -> DirectSampler:
    """Asks bare questions as the run does."""
    config = plan.config
    return DirectSampler(
        renderer=opened.renderer,
        # a question that took too long would end the run
        sampling=replace(config.sampling(opened.context_window), temperature=temperature, timeout_s=None),
        system_prompt=config.system_prompt,
        check=plan.check,
    )


def conversation_evaluators(
    plan: Plan, opened: OpenRun, make_builder: BuilderFactory | None
) -> list[Evaluator]:
    """Evaluators of whole conversations on the first test prompts; none without a builder of them."""
    config = plan.config
    spoken = plan.test[: config.num_test_conversations]
    if not spoken or make_builder is None:
        return []
    return [
        ConversationEvaluator(
            make_builders=lambda: [
                make_builder(item, group_seed(config.seed, index)) for index, item in enumerate(spoken)
            ],
            sampling=config.sampling(opened.context_window),
        )
    ]


async def win_rate_evaluators(plan: Plan, opened: OpenRun) -> tuple[list[Evaluator], list[Follower]]:
    """The evaluator of ``eval_judge``, if there is one, and what gives it the weights of the run's beginning.

    Raises:
        ValueError: If the judge cannot be had.
    """
    if plan.eval_judge is None:
        return [], []
    start, followers = await policy_of(JudgeOptions(policy="initial"), plan, opened, "start")
    if plan.eval_judge.model is None:
        judge = plan.eval_judge.make(start, opened.renderer)
    else:
        judge, _ = await judge_of(
            plan.eval_judge, plan, opened
        )  # stays as it is: nothing follows the run for it
    direct = direct_sampler(plan, opened, plan.eval_temperature)
    return [WinRateEvaluator(items=plan.test, direct=direct, start=start, judge=judge)], followers
