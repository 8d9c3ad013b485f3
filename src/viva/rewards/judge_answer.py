"""The reward ``judge_answer``: agreement with the judge's own answer (a pseudo-label; Lee, 2013).

The judge answers the bare question once, at temperature 0, and ``v`` is its answer:

    r_i = 1[s_i = v]

A judge that lags behind the policy is a slower voter than those of ``majority``: ``judge=initial`` never changes its
mind, ``judge=ema`` is a mean teacher (Tarvainen and Valpola, 2017, arXiv 1703.01780), ``judge=every`` one that is
renewed, and another model is a teacher whose answers are labels. Answers are compared as by ``majority``. A reply that
was cut or gives no answer earns 0, as all do where the judge's own is cut or gives none.
"""

from dataclasses import dataclass, replace

from tinker_cookbook.renderers.base import Message
from tinker_cookbook.rl.types import Metrics

from viva.conversation.protocol import Protocol
from viva.conversation.rendering import system_messages
from viva.judging.answers import answer_groups, answer_key
from viva.judging.comparison import Judge
from viva.judging.judge import JudgeOptions
from viva.rewards.base import JudgedReward, JudgeTask, Models
from viva.rewards.solutions import SolutionReward, Solutions

_WRITES = JudgeOptions(mode="verdict")


@dataclass(frozen=True, kw_only=True)
class JudgeAnswer(JudgedReward, SolutionReward):
    """Agreement of a final solution with the judge's own; needs no known answers."""

    judge_options: JudgeOptions = _WRITES
    name: str = "judge_answer"

    @property
    def judge_task(self) -> JudgeTask:
        """The judge answers the question itself."""
        return "answer"

    def new_record(self, protocol: Protocol, judge: Judge | None) -> dict[str, object]:
        """Nothing: the judge is asked what the agents are asked."""
        return {}

    async def ask(self, group: Solutions, question: str, models: Models) -> Solutions:
        """The solutions with the judge's own; what engines and endpoints raise passes through."""
        judge = self.needed(models.judge)
        messages = [*system_messages(models.system_prompt), Message(role="user", content=question)]
        return replace(group, judge_answer=await judge.answer(messages, group.seed))

    def pay(self, group: Solutions) -> list[float]:
        """1 for the same answer, else 0."""
        return [float(agrees) for agrees in self._agreeing(group)]

    def figures(self, group: Solutions) -> Metrics:
        """Whether the judge gave an answer, the share that agrees, and where answers are known whether it is right.

        The last is known where a solution agrees.
        """
        agreeing = self._agreeing(group)
        metrics: Metrics = {
            "judge_answer/given": float(answer_key(group.judge_answer or "") is not None),
            "judge_answer/agreement": sum(agreeing) / max(len(agreeing), 1),
        }
        if group.graded_G is not None and any(agreeing):
            metrics["judge_answer/correct"] = float(group.graded_G[agreeing.index(True)] > 0)
        return metrics

    def _agreeing(self, group: Solutions) -> list[bool]:
        answer = self.known(group.judge_answer, "the judge's own answer")
        own, *given_G = answer_groups([answer, *group.final_G])
        return [
            own is not None and is_done and given == own
            for given, is_done in zip(given_G, group.finished_G, strict=True)
        ]


def judge_answer(*, judge: JudgeOptions | None = None) -> JudgeAnswer:
    """Agreement with the answer that the judge gives itself, at temperature 0; needs no known answers.

    Args:
        judge: By default the policy being trained: its most probable answer. On the command line ``judge=initial``,
            ``ema``, ``every``, another model or an endpoint.
    """
    return JudgeAnswer(judge_options=judge or _WRITES)
