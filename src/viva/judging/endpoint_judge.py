"""Comparisons and scores by a model behind an endpoint, see `viva.judging.endpoint`.

``verdict`` mode reads the verdict that the model writes. ``logprob`` mode asks for the verdict alone, and reads how
probable the labels were where it stands, as far as the endpoint returns ``top_logprobs``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tinker_cookbook.renderers.base import Message

from viva.judging.comparison import (
    LABELS,
    VERDICT_PREFIX,
    Comparison,
    Judge,
    Outcome,
    read_labels,
    same_words,
)
from viva.judging.endpoint import ChatEndpoint, EndpointError, TokenChoice
from viva.judging.judge import VERDICT_SCORES, JudgeOptions, marked_fields, parse_verdict
from viva.judging.rubric import CRITERION_FIELD, criterion_messages

_TOP_LOGPROBS = 20
"""The interface's limit."""
_SHORT_REPLY = 24
"""Tokens of a verdict alone."""
_ALONE = f"Leave out the reasoning: begin with {VERDICT_PREFIX} and say nothing else."
_MARK = re.compile(r'"preference"\s*:\s*"?')


class EndpointJudge(Judge):
    """Judges solutions through an open `ChatEndpoint`; the policy in the options has no part here."""

    def __init__(self, endpoint: ChatEndpoint, options: JudgeOptions) -> None:
        self.endpoint = endpoint
        self.options = options
        self.answers_first = options.answers_first

    async def compare(
        self, question: str, solutions: Mapping[int, str], first: int, second: int, seed: int
    ) -> Comparison:
        """See `Judge.compare`; sampled at temperature 0, so the seed changes nothing.

        Raises:
            EndpointError: If the endpoint gives no answer, or in ``logprob`` mode no log-probabilities.
        """
        if same_words(solutions[first], solutions[second]):
            return Comparison(first=first, second=second, outcome=Outcome.TIE, score=0.0, was_asked=False)
        messages = await self.messages_for(
            question, solutions[first], solutions[second], self.options.system_prompt, seed
        )
        if self.options.mode == "verdict":
            answer = await self.endpoint.ask(messages, max_tokens=self.options.max_tokens)
            outcome = parse_verdict(answer.without_thinking)
            found = Comparison(first=first, second=second, outcome=outcome, score=VERDICT_SCORES[outcome])
        else:
            asked = f"{messages[-1]['content']}\n{_ALONE}"
            messages = [messages[0], Message(role="user", content=asked)]
            answer = await self.endpoint.ask(messages, max_tokens=_SHORT_REPLY, top_logprobs=_TOP_LOGPROBS)
            if not answer.tokens:
                raise EndpointError(
                    f"{self.endpoint.options.url} returned no log-probabilities of its answer; use judge_mode=verdict"
                )
            masses = label_masses(answer.tokens)
            found = read_labels(first, second, masses, max_off_set_mass=self.options.max_off_set_mass)
        return replace(found, text=answer.text, prompt=str(messages[-1]["content"]))

    async def answer(self, messages: Sequence[Message], seed: int) -> str:
        """See `Judge.answer`; raises an `EndpointError` if the endpoint gives none."""
        answer = await self.endpoint.ask(messages, max_tokens=self.options.max_tokens)
        return "" if answer.is_cut else answer.without_thinking

    async def score(self, question: str, answer: str, criterion: str, seed: int) -> float | None:
        """1 for a written yes and 0 for a no; see `Judge.score`. Raises as `compare`."""
        judge = await self.for_question(question, seed)
        messages = criterion_messages(question, answer, criterion, judge.own_answer)
        said = await self.endpoint.ask(messages, max_tokens=self.options.max_tokens)
        found = {text.strip().casefold() for text in marked_fields(said.without_thinking, CRITERION_FIELD)}
        return float(found == {"yes"}) if found in ({"yes"}, {"no"}) else None

    def described(self) -> dict[str, str]:
        """See `Judge.described`."""
        return {"system_prompt": self.options.system_prompt, "prefill": ""}


def label_masses(tokens: Sequence[TokenChoice]) -> tuple[float, float, float]:
    """Probabilities of A, B and Tie where the verdict begins; all 0 if the reply ends before.

    It begins behind the last ``"preference":``, or else with the first word.
    """
    text = "".join(token.text for token in tokens)
    marks = list(_MARK.finditer(text))
    start = marks[-1].end() if marks else len(text) - len(text.lstrip(" \n\t\"'`"))
    offset = 0
    for token in tokens:
        if offset <= start < offset + len(token.text):
            return _masses(token, token.text[: start - offset])
        offset += len(token.text)
    return 0.0, 0.0, 0.0


def _masses(token: TokenChoice, before: str) -> tuple[float, float, float]:
    masses: dict[str, float] = dict.fromkeys(LABELS, 0.0)
    for text, logprob in token.alternatives:
        label = _label(text[len(before) :]) if text.startswith(before) else None
        if label is not None and logprob <= 1e-3:
            masses[label] += math.exp(min(logprob, 0.0))
    return masses["A"], masses["B"], masses["Tie"]


def _label(text: str) -> str | None:
    """The label that a token begins."""
    said = text.strip(" \n\t\"'`}.,").casefold()
    for label in LABELS:
        if said == label.casefold() or (label == "Tie" and said and label.casefold().startswith(said)):
            return label
    return None
