"""The policy judges its own solutions; `PolicyRef` is the place where the policy is swapped.

Two modes of comparing pairs. ``logprob``: the judge's reply is made to begin with `VERDICT_PREFIX`, and the
probabilities of the labels at the next position are read in one forward pass, without generation; their soft score
beats the mode of the distribution as a signal (Wang, Zhang and Choi, 2025, arXiv 2503.03064). ``verdict``: the judge
writes its reply, and the JSON verdict in it is read.

Of a written reply, only what is marked as the verdict counts: the ``preference`` field of a JSON object, a
``<preference>`` tag, or a reply that is nothing but the label. Prose is never searched for letters: "A is worse; B is
better" names no winner here.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import tinker
from tinker_cookbook.renderers.base import Message, Renderer

from viva.conversation.coordinator import gather_or_cancel
from viva.conversation.messages import did_you_mean, unknown
from viva.conversation.rendering import build_prompt, read_reply
from viva.conversation.replies import FoundObject, ObjectScanner, fenced_objects, whole_object
from viva.judging import comparison
from viva.judging.comparison import (
    LABELS,
    VERDICT_PREFIX,
    Comparison,
    Judge,
    JudgeError,
    Outcome,
    read_labels,
    same_words,
)
from viva.judging.endpoint import EndpointOptions
from viva.judging.rubric import CRITERION_PREFIX, YES_OR_NO, criterion_messages
from viva.judging.usage import Role, count_tokens

T = TypeVar("T")


class SamplingClient(Protocol):
    """The one method of tinker's ``SamplingClient`` that judging needs, with whatever future it returns."""

    def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> Any:
        """Draw completions of one prompt."""
        ...


@dataclass(kw_only=True)
class PolicyRef:
    """Holds the sampling client that judges now: set at every step for a judge that follows the policy, else once."""

    sampling_client: SamplingClient | None = None
    timeout_s: float | None = None
    """Longest time one comparison may take. Results then depend on the clock, so it is off by default."""

    def current(self) -> SamplingClient:
        """The client that is set; a `RuntimeError` if none is."""
        if self.sampling_client is None:
            raise RuntimeError(
                "the judge has no policy: set PolicyRef.sampling_client to a sampling client before rewards "
                "are computed (the training loop does so at every step)"
            )
        return self.sampling_client


def accepts(method: Callable[..., object], option: str) -> bool:
    """Whether a client's method takes an option; SDKs and engines differ in what they can return."""
    parameters = inspect.signature(method).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


async def sample(
    client: SamplingClient,
    prompt: tinker.ModelInput,
    params: tinker.SamplingParams,
    num_samples: int = 1,
    *,
    role: Role | None = None,
    **options: Any,
) -> tinker.SampleResponse:
    """Completions of a prompt from a client of any version, with further options of its ``sample``.

    With a `role`, their tokens are counted (`viva.judging.usage`); whoever counts by other means leaves it out.
    """
    response = await response_of(
        cast(Any, client).sample(prompt=prompt, num_samples=num_samples, sampling_params=params, **options)
    )
    if role is not None:
        sampled = sum(len(sequence.tokens) for sequence in response.sequences)
        count_tokens(role, prompt=prompt.length * num_samples, sampled=sampled)
    return response


async def response_of(pending: Awaitable[T] | Future[T]) -> T:
    """The response behind an awaitable, or behind the ``concurrent.futures.Future`` of older clients."""
    if isinstance(pending, Awaitable):
        return await pending
    return await asyncio.wrap_future(pending)


JudgeMode = Literal["logprob", "verdict"]

_TOP_K = 20
"""Alternatives asked for (tinker's limit). A label outside them counts as 0."""
_HAS_ALTERNATIVES = hasattr(tinker.SampledSequence, "topk_logprobs")
"""Older SDKs cannot return alternatives for sampled tokens, only within the prompt."""

_Row = list[tuple[int, float]]

VERDICT_SCORES = {Outcome.A: -1.0, Outcome.TIE: 0.0, Outcome.B: 1.0, Outcome.INVALID: None}


POLICIES = ("current", "initial", "every", "ema")
"""Names of the weights of the policy that is trained; every other name is that of a model."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Options of the judge: its model, and its way to compare.

    Raises:
        ValueError: If a value is out of range, or would change nothing.
    """

    policy: str = "current"
    """The policy being trained (``current``), as it was at the start (``initial``) or every so many steps (``every``),
    the moving average of its weights (``ema``), or another model that stays as it is: ``tiny``, a folder, a GGUF file,
    a hub's name, or a run's folder."""
    every: int = 10
    """``every``: steps between two refreshments."""
    decay: float = 0.9
    """``ema``: share of the average that stays at each step."""
    checkpoint: str | None = None
    """Another model that is a run: its checkpoint, as in ``viva eval``; ``None``: what it ended with."""
    endpoint: EndpointOptions | None = None
    """A model behind an endpoint, in the policy's place; many of them write verdicts alone."""
    mode: JudgeMode = "logprob"
    """``logprob`` or ``verdict``, see the module."""
    system_prompt: str = field(default_factory=lambda: comparison.JUDGE_SYSTEM_PROMPT)
    max_tokens: int = 256
    """Longest reply in ``verdict`` mode, and longest answer of its own."""
    answers_first: bool = False
    """The judge answers the problem itself at temperature 0, once for all comparisons of its solutions, which it then
    reads behind its answer."""
    max_off_set_mass: float = 0.9
    """Where labels are read by their probabilities, a verdict or score is invalid if anything else is more probable
    than this."""

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.endpoint is not None and self.policy != "current":
            raise ValueError(
                f"the policy {self.policy!r} and an endpoint both say who judges; leave out one or the other"
            )
        if self.every < 1 or not 0 < self.decay < 1:
            raise ValueError(
                "a judge needs every of 1 or more and a decay above 0 and below 1, for example 0.9; got "
                f"{self.every} and {self.decay}"
            )
        belongs = {"every": self.policy == "every", "decay": self.policy == "ema", "checkpoint": self.model}
        for each in fields(self):
            if each.name in belongs and not belongs[each.name] and getattr(self, each.name) != each.default:
                raise ValueError(
                    f"{each.name}={getattr(self, each.name)} would change nothing: the judge's policy is "
                    f"{self.policy}; leave out one or the other"
                )
        if self.mode not in ("logprob", "verdict"):
            raise ValueError(f"judge mode must be 'logprob' or 'verdict'; got {self.mode!r}")
        if self.max_tokens < 1 or not 0 <= self.max_off_set_mass <= 1:
            raise ValueError(
                "a judge needs max_tokens of at least 1 and a max_off_set_mass from 0 to 1; got "
                f"{self.max_tokens} and {self.max_off_set_mass}"
            )

    @property
    def model(self) -> str | None:
        """Another model's name; ``None`` where the policy judges."""
        return None if self.policy in POLICIES else self.policy

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> JudgeOptions:
        """Options by name; one that is unknown is refused with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(unknown("option of the judge", name, known))
        return cls(**values)

    def make(self, policy: PolicyRef, renderer: Renderer) -> PolicySelfComparisonJudge:
        """The judge with a policy."""
        return PolicySelfComparisonJudge(policy, renderer, self)


def check_policy(policy: str, option: str = "policy") -> None:
    """Refuse a name that is neither of `POLICIES` nor could be that of a model; `option` is for the message."""
    if policy.startswith(("https://", "http://")):
        raise ValueError(
            f"{option} must name a policy or model, and {policy} is an endpoint's address; give a "
            "viva.judging.endpoint.EndpointOptions as endpoint in its place"
        )
    path = Path(policy).expanduser()
    if policy in POLICIES or policy == "tiny" or "/" in policy or (policy.strip() and path.exists()):
        return
    raise ValueError(
        f"{option} must be {', '.join(POLICIES)}, or a model: tiny, a folder, a GGUF file, a run's folder or "
        f"a hub's name like Qwen/Qwen3-8B; got {policy!r}.{did_you_mean(policy, POLICIES)}"
    )


class PolicySelfComparisonJudge(Judge):
    """Compares solutions with the policy that a `PolicyRef` holds, looked up at every comparison.

    ``options.policy`` and ``options.endpoint`` are ignored: the weights are those that `policy` holds.

    Raises:
        ValueError: If the labels do not begin with different tokens.
    """

    def __init__(self, policy: PolicyRef, renderer: Renderer, options: JudgeOptions | None = None) -> None:
        self.policy = policy
        self.renderer = renderer
        self.options = options or JudgeOptions()
        self.answers_first = self.options.answers_first
        self._labels = None
        if self.options.mode == "logprob":  # labels that begin alike are refused before any request
            _first_tokens(renderer, VERDICT_PREFIX, LABELS)
            self._labels = LabelReader(policy, renderer, VERDICT_PREFIX, LABELS)
        self._yes_or_no = LabelReader(policy, renderer, CRITERION_PREFIX, YES_OR_NO)

    async def compare(
        self, question: str, solutions: Mapping[int, str], first: int, second: int, seed: int
    ) -> Comparison:
        """See `Judge.compare`; the seed has no effect: verdicts are sampled at temperature 0.

        Raises:
            JudgeError: If the engine's probabilities are unusable. Its own errors pass through.
            TimeoutError: If the comparison took longer than the policy's ``timeout_s``.
        """
        if same_words(solutions[first], solutions[second]):
            return Comparison(first=first, second=second, outcome=Outcome.TIE, score=0.0, was_asked=False)
        messages = await self.messages_for(
            question, solutions[first], solutions[second], self.options.system_prompt, seed
        )
        if self._labels is not None:
            return await self.compare_by_labels(messages, first, second, seed)
        text, _ = await self._reply(messages, seed)
        outcome = parse_verdict(text)
        return Comparison(
            first=first,
            second=second,
            outcome=outcome,
            score=VERDICT_SCORES[outcome],
            text=text,
            prompt=str(messages[-1]["content"]),
        )

    async def compare_by_labels(
        self, messages: Sequence[Message], first: int, second: int, seed: int
    ) -> Comparison:
        """The comparison that a prompt asks for, by the probabilities of the labels where its verdict begins.

        The messages show both solutions, as A (``first``) and as B, and ask for the JSON object with a ``preference``.
        Raises a `ValueError` if the mode is not ``logprob``, else as `compare`.
        """
        if self._labels is None:
            raise ValueError(f"label probabilities need judge mode 'logprob'; got {self.options.mode!r}")
        p_a, p_b, p_tie = await self._labels.probabilities(messages, seed)
        found = read_labels(first, second, (p_a, p_b, p_tie), max_off_set_mass=self.options.max_off_set_mass)
        return replace(found, prompt=str(messages[-1]["content"]))

    async def answer(self, messages: Sequence[Message], seed: int) -> str:
        """See `Judge.answer`; raises a `TimeoutError` if it took longer than the policy's ``timeout_s``."""
        text, is_finished = await self._reply(messages, seed)
        return text if is_finished else ""

    async def score(self, question: str, answer: str, criterion: str, seed: int) -> float | None:
        """The probability of yes, of yes and no; see `Judge.score`.

        ``None`` if anything but yes and no is more probable than ``max_off_set_mass``. Raises as `compare`.
        """
        judge = await self.for_question(question, seed)
        messages = criterion_messages(question, answer, criterion, judge.own_answer)
        yes, no = await self._yes_or_no.probabilities(messages, seed)
        return yes / (yes + no) if 0.0 < yes + no >= 1.0 - self.options.max_off_set_mass else None

    def described(self) -> dict[str, str]:
        """See `Judge.described`."""
        return {
            "system_prompt": self.options.system_prompt,
            "prefill": VERDICT_PREFIX if self.options.mode == "logprob" else "",
        }

    async def _reply(self, messages: Sequence[Message], seed: int) -> tuple[str, bool]:
        """A written reply at temperature 0, and whether the judge ended it itself."""
        prompt = build_prompt(self.renderer, messages)
        params = tinker.SamplingParams(
            max_tokens=self.options.max_tokens,
            temperature=0.0,
            seed=seed,
            stop=self.renderer.get_stop_sequences(),
        )
        async with asyncio.timeout(self.policy.timeout_s):
            response = await sample(self.policy.current(), prompt, params, role="judge")
        (sequence,) = response.sequences
        text, is_clean = read_reply(self.renderer, list(sequence.tokens))
        return text, is_clean and sequence.stop_reason == "stop"


class LabelReader:
    """Probabilities of some labels as the beginning of a model's reply, behind a given prefix, without generation."""

    def __init__(self, policy: PolicyRef, renderer: Renderer, prefix: str, labels: Sequence[str]) -> None:
        self.policy = policy
        self.renderer = renderer
        self.prefix = prefix
        self.labels = labels
        self._knows_alternatives = True
        """Until an engine has left them out of its answer."""

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """First token of every label; a `ValueError` if two labels begin alike."""
        return _first_tokens(self.renderer, self.prefix, self.labels)

    async def probabilities(self, messages: Sequence[Message], seed: int) -> tuple[float, ...]:
        """Probability of every label behind messages; what is missing to 1 went to anything else.

        Raises as `PolicySelfComparisonJudge.compare`.
        """
        prompt = build_prompt(self.renderer, messages, prefill=self.prefix)
        async with asyncio.timeout(self.policy.timeout_s):
            logprobs = await self._next_token(prompt, seed)
        return tuple(math.exp(logprobs.get(token, -math.inf)) for token in self.tokens)

    async def _next_token(self, prompt: tinker.ModelInput, seed: int) -> dict[int, float]:
        """Log-probabilities of the most probable next tokens."""
        client = self.policy.current()
        params = tinker.SamplingParams(max_tokens=1, temperature=1.0, seed=seed)
        row = None
        if _HAS_ALTERNATIVES and accepts(client.sample, "topk_sample_logprobs"):
            response = await sample(client, prompt, params, role="judge", topk_sample_logprobs=_TOP_K)
            row = _row(response.sequences[0].topk_logprobs, 0)
        if row is None and self._knows_alternatives:
            # add a token to the prompt and ask what could stand in its place
            longer = prompt.append_int(self.tokens[0])
            options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": _TOP_K}
            response = await sample(client, longer, params, role="judge", **options)
            row = _row(response.topk_prompt_logprobs, prompt.length)
            self._knows_alternatives = row is not None
        if row is None:
            row = await self._in_prompt(client, prompt, params)
        if not row or any(math.isnan(logprob) or logprob > 1e-3 for _, logprob in row):
            raise JudgeError(
                f"the engine returned no usable probabilities for the judge's next token; got {row}. "
                "If it cannot return any, use judge mode 'verdict'."
            )
        return dict(row)

    async def _in_prompt(
        self, client: SamplingClient, prompt: tinker.ModelInput, params: tinker.SamplingParams
    ) -> _Row | None:
        """One request for every label, for engines that only tell how probable the tokens of a prompt are."""

        async def ask(label: int) -> float | None:
            longer = prompt.append_int(label)
            response = await sample(client, longer, params, role="judge", include_prompt_logprobs=True)
            return response.prompt_logprobs[-1] if response.prompt_logprobs else None

        logprobs = await gather_or_cancel(ask(label) for label in self.tokens)
        pairs = zip(self.tokens, logprobs, strict=True)
        row = [(label, logprob) for label, logprob in pairs if logprob is not None]
        return row if len(row) == len(self.tokens) else None


def _row(rows: Sequence[_Row | None] | None, place: int) -> _Row | None:
    return rows[place] if rows is not None and len(rows) > place else None


def _first_tokens(renderer: Renderer, prefix_text: str, labels: Sequence[str]) -> tuple[int, ...]:
    """First token of every label as it stands after the prefix."""

    def encode(text: str) -> list[int]:
        return renderer.tokenizer.encode(text, add_special_tokens=False)

    prefix = encode(prefix_text)
    tokens: list[int] = []
    for label in labels:
        whole = encode(f'{prefix_text}{label}"}}')
        continues = whole[: len(prefix)] == prefix
        tokens.append(whole[len(prefix)] if continues else encode(label)[0])
    if len(set(tokens)) < len(labels):
        raise ValueError(
            f"a judge whose labels are read by their probabilities needs labels that begin with different tokens; this "
            f"tokenizer encodes {', '.join(labels)} beginning with {tokens}. Pairs can be compared in words: use judge "
            "mode 'verdict'; scores need another model as judge."
        )
    return tuple(tokens)


_OUTCOMES = {
    label: outcome
    for outcome in (Outcome.A, Outcome.B, Outcome.TIE)
    for label in (outcome.lower(), f"solution {outcome}".lower())
}


def parse_verdict(text: str) -> Outcome:
    """The verdict of a reply; ``INVALID`` if none is marked, the marked one is no label, or two of them disagree."""
    labels = marked_fields(text, "preference")
    outcomes = {_OUTCOMES.get(label.strip().lower(), Outcome.INVALID) for label in labels}
    return outcomes.pop() if len(outcomes) == 1 else Outcome.INVALID


def marked_fields(text: str, field: str) -> list[str]:
    """Values of a field in a reply's JSON objects, else in its tags, else the whole reply; in linear time."""
    scanner = ObjectScanner(text, ("reasoning", field), field)
    found = [each.fields[field] for each in _objects(scanner)]
    tag = re.compile(rf"<{field}>([^<]*+)</{field}>", re.IGNORECASE | re.ASCII)
    return found or tag.findall(text) or [text.strip().strip("\"'`*.")]


def _objects(scanner: ObjectScanner) -> list[FoundObject]:
    """Objects that may hold the verdict: the reply itself, else those in fences, else those in the text."""
    if (whole := whole_object(scanner)) is not None:
        return [whole]
    if fenced := list(fenced_objects(scanner)):
        return fenced
    found: list[FoundObject] = []
    place = 0
    while (one := scanner.first(place)) is not None:
        found.append(one)
        place = one.end
    return found
