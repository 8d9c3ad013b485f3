"""The reward ``rubric``: what a judge says of one solution by itself (rubrics as rewards; arXiv 2507.17746).

A judge is asked about every solution and criterion, see `viva.judging.rubric`; with its scores ``s_ic`` from 0 to 1 and
the weights ``w_c``

    r_i = sum_c w_c s_ic / sum_c w_c

The default is one criterion, that the answer is right: P(True) (Kadavath et al., 2022, arXiv 2207.05221), which those
authors found better behind further answers of the model; ``answers_first`` shows the judge's own. Unlike a tournament
it asks once a solution instead of once a pair and order, and no solution's place can matter.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tinker_cookbook.rl.types import Metrics

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.guard import remembering
from viva.conversation.protocol import Protocol
from viva.judging.comparison import Judge, JudgeError
from viva.judging.judge import JudgeOptions
from viva.judging.records import ConversationRecord, Criterion
from viva.judging.rubric import CRITERION_SYSTEM_PROMPT, RIGHT, criteria_of, weighted_mean
from viva.rewards.base import NO_MODELS, JudgedReward, JudgeTask, Models
from viva.rewards.solutions import SolutionReward, Solutions


@dataclass(frozen=True, kw_only=True)
class Rubric(JudgedReward, SolutionReward):
    """The weighted mean of a judge's scores of a final solution by criteria; needs no known answers."""

    criteria: tuple[Criterion, ...] = (RIGHT,)
    is_default: bool = False
    """Whether nobody chose the criteria: a judge that is asked anew about a stored conversation is then asked by those
    that the conversation was paid by."""
    name: str = "rubric"

    @property
    def judge_task(self) -> JudgeTask:
        """The judge scores each solution."""
        return "score"

    def new_record(self, protocol: Protocol, judge: Judge | None) -> dict[str, object]:
        """The judge's system message."""
        return {"judge": {"system_prompt": CRITERION_SYSTEM_PROMPT}}

    async def ask(self, group: Solutions, question: str, models: Models) -> Solutions:
        """The solutions with the judge's scores; the same words are asked about once.

        Raises:
            JudgeError: If the judge fails. What engines and endpoints raise passes through.
            ValueError: If there is no judge.
        """
        judge = self.needed(models.judge)
        texts = list(dict.fromkeys(group.final_G))
        rng = random.Random(group.seed)
        with remembering({}):
            judge = await judge.for_question(question, group.seed)
            scores = await gather_or_cancel(
                judge.score(question, text, each.text, rng.getrandbits(31))
                for text in texts
                for each in self.criteria
            )
        width = len(self.criteria)
        by_text = {
            text: tuple(scores[place * width : (place + 1) * width]) for place, text in enumerate(texts)
        }
        return replace(group, rubric={key: by_text[text] for key, text in group.by_id().items()})

    def told(self, group: Solutions) -> dict[str, object]:
        """The criteria, and the scores by agent in their order."""
        return {"criteria": [asdict(each) for each in self.criteria]} | super().told(group)

    def pay(self, group: Solutions) -> list[float]:
        """Weighted means of the scores.

        Raises:
            JudgeError: If a score could not be read.
            ValueError: If the scores are not known.
        """
        weights_C = [each.weight for each in self.criteria]
        rewards: list[float] = []
        for key, scores_C in self._scores(group).items():
            reward = None if None in scores_C else weighted_mean(scores_C, weights_C)
            if reward is None:
                raise JudgeError(
                    f"the judge could not be read about solution {key} by all criteria; got {list(scores_C)}. Use "
                    "a judge that follows instructions, or a higher judge_max_off_set_mass"
                )
            rewards.append(reward)
        return rewards

    def figures(self, group: Solutions) -> Metrics:
        """Mean score by criterion."""
        metrics: Metrics = {}
        for number, scores_G in enumerate(zip(*self._scores(group).values(), strict=True), 1):
            known = [score for score in scores_G if score is not None]
            if known:
                metrics[f"rubric/criterion_{number}"] = math.fsum(known) / len(known)
        return metrics

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """The final solutions' rewards, by the criteria that the run had, if it had some; see `is_default`."""
        keeps_own = record.criteria and (self.is_default or models.judge is None)
        paid_by = replace(self, criteria=record.criteria) if keeps_own else self
        return await super(Rubric, paid_by).stored_pay(record, seed, models)

    def _scores(self, group: Solutions) -> Mapping[int, Sequence[float | None]]:
        rubric = self.known(group.rubric, "a judge's score by each criterion")
        return {key: rubric[key] for key in group.ids}


def rubric(
    criteria: Mapping[str, float] | Sequence[str] | None = None, *, judge: JudgeOptions | None = None
) -> Rubric:
    """A judge's score of every solution by itself: the weighted mean of how probably it fulfils each criterion.

    Args:
        criteria: Texts, or texts with their weights; by default that the answer is right.
        judge: By default the policy being trained. On the command line ``judge=initial``, ``ema``, ``every``, another
            model or an endpoint, which writes yes or no.

    Raises:
        ValueError: If there is no criterion, they are one text instead of a list, one has no text or no weight above
            0, or two are the same.
    """
    found = (RIGHT,) if criteria is None else criteria_of(criteria)
    return Rubric(criteria=found, is_default=criteria is None, judge_options=judge or JudgeOptions())
