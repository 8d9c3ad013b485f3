"""Sampling requests: checked, with their rules for stopping, and with what they ask to know about the prompt.

Shapes: ``P`` prompt tokens, ``V`` vocabulary, ``k`` alternatives, ``K`` chosen targets per position.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import tinker
import torch

from viva.engine.model import BaseModel, head_logits, output_layer
from viva.engine.scheduler import LocalFuture
from viva.sdk import make_topk

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from viva.engine.adapters import Adapter

BLOCK = 8
"""Tokens per block; prefixes are shared in multiples of it."""
_MARGIN = 4
"""Tokens decoded in front of the longest stop string, so that a decoder's treatment of the first token of a text
(a dropped space, a broken character) cannot reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSequences:
    """Tokens or strings that end a sample."""

    ids: frozenset[int]
    strings: tuple[str, ...]
    tokenizer: "PreTrainedTokenizerBase"
    text_of: dict[int, str]
    """Text of single tokens, filled as needed and shared by all rules of one tokenizer."""

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these sampled tokens ends the sample. Called after every token."""
        last = tokens[-1]
        if last in self.ids:
            return True
        return bool(self.strings) and self._may_complete(last) and self._text_ends(tokens)

    def _may_complete(self, token: int) -> bool:
        """Whether this token can hold the last character of a stop string. Cheap, and never wrongly false."""
        text = self.text_of.get(token)
        if text is None:
            text = self.text_of[token] = self._text([token])
        # parts of a character decode to U+FFFD, and some tokenizers drop a leading space
        return "\ufffd" in text or any(string[-1] in text or string[-1].isspace() for string in self.strings)

    def _text(self, tokens: Sequence[int]) -> str:
        given = list(tokens)
        return str(
            self.tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _text_ends(self, tokens: Sequence[int]) -> bool:
        """Whether the text contains a stop string. A string of ``n`` bytes spans at most ``n`` tokens."""
        window = max(len(string.encode()) for string in self.strings) + _MARGIN
        text = self._text(tokens[-window:])
        return any(string in text for string in self.strings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A token at the moment it is drawn."""

    index: int
    """Index of the sample among those of its request."""
    token: int
    logprob: float
    alternatives: tuple[np.ndarray, np.ndarray] | None
    """``[k]`` most likely token ids and their logprobs (minus infinity: could not be drawn), if any were asked for."""
    stop_reason: str | None
    """``stop`` or ``length`` if the sample ends here."""


Listener = Callable[[Drawn], None]
"""Called by the engine for every token as it is drawn, in the engine's thread. It must not raise."""


def make_stop_rule(
    stop: str | Sequence[str] | Sequence[int] | None, base: BaseModel, also: Sequence[int] = ()
) -> StopSequences:
    """Read the ``stop`` field of ``SamplingParams``; the ids `also` given end a sample beside it.

    Strings do not replace the end of text. Renderers without control tokens count on it: tinker-cookbook's
    `RoleColonRenderer`, which stops at a string, reads a reply that the end of text has ended as finished.

    Raises:
        ValueError: An empty string, a mixture of strings and ids, or an id the model does not have.
    """
    entries: list[object] = [stop] if isinstance(stop, str) else list(base.eos_ids if stop is None else stop)
    strings = [entry for entry in entries if isinstance(entry, str)]
    ids = [entry for entry in entries if isinstance(entry, int)]
    if len(strings) + len(ids) != len(entries) or (strings and ids):
        raise ValueError(f"stop must be a string, a list of strings or a list of token ids, not {stop!r}.")
    ids += [*also, *(base.eos_ids if strings else ())]
    if "" in strings:
        raise ValueError("stop holds an empty string, which would end every sample at once. Remove it.")
    if any(not 0 <= token < base.vocab_size for token in ids):
        raise ValueError(
            f"stop={stop!r} has token ids outside 0 to {base.vocab_size - 1}, the ids of {base.name!r}."
        )
    return StopSequences(
        ids=frozenset(ids), strings=tuple(strings), tokenizer=base.tokenizer, text_of=base.token_texts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """Logprobs to report of a prompt's tokens."""

    first: int
    """First position to score, at least 1: position 0 has nothing before it."""
    logprobs: bool
    """The prompt's own tokens."""
    topk: int
    """The most likely tokens."""
    targets: np.ndarray | None
    """``[P - 1, K]`` chosen token ids; row ``i`` is scored at position ``i + 1``, -1 scores nothing."""


def make_scoring(
    tokens: np.ndarray,
    base: BaseModel,
    *,
    logprobs: bool,
    topk: int = 0,
    last_n: int | None = None,
    targets: tinker.TensorData | None = None,
) -> PromptScoring | None:
    """Check what a request asks to know about its prompt, by a `ValueError`; ``None`` if nothing."""
    num_tokens = len(tokens)
    if topk < 0:
        raise ValueError(f"topk_prompt_logprobs must be at least 0, not {topk}.")
    if last_n is not None and not logprobs:
        raise ValueError(
            "prompt_logprobs_last_n applies to prompt logprobs; set include_prompt_logprobs=True."
        )
    if last_n is not None and not 1 <= last_n <= num_tokens - 1:
        raise ValueError(
            f"prompt_logprobs_last_n must be from 1 to {num_tokens - 1} for this prompt, not {last_n}."
        )
    ids = None
    if targets is not None:
        ids = (
            targets.to_numpy(pad_value=-1) if targets.sparse_crow_indices is not None else targets.to_numpy()
        )
        if targets.dtype != "int64" or ids.ndim != 2 or len(ids) != num_tokens - 1:
            raise ValueError(
                f"target_prompt_logprobs must be int64 of shape [{num_tokens - 1}, K] for this prompt, not "
                f"{targets.dtype} of shape {list(ids.shape)}."
            )
        if ids.min(initial=-1) < -1 or ids.max(initial=-1) >= base.vocab_size:
            raise ValueError(f"target_prompt_logprobs has ids outside -1 to {base.vocab_size - 1}.")
    if not logprobs and not topk and ids is None:
        return None
    first = 1 if last_n is None else num_tokens - last_n
    if ids is not None:
        named = np.flatnonzero((ids >= 0).any(axis=1))
        first = min(first, int(named[0]) + 1) if len(named) else first
    return PromptScoring(first=first, logprobs=logprobs, topk=topk, targets=ids)


def score_prompt(
    module: "PreTrainedModel",
    hidden: torch.Tensor,
    prompt: np.ndarray,
    scoring: PromptScoring,
    max_logits: int,
) -> dict[str, object]:
    """Fields of the response that concern the prompt, by `max_logits` logits at a time.

    The ``[P - first, H]`` hidden states of positions ``first - 1 .. P - 2`` predict positions ``first .. P - 1``.

    Raises:
        FloatingPointError: Logits are not finite.
    """
    num_tokens, first = len(prompt), scoring.first
    own = np.full(num_tokens, np.nan, dtype=np.float32)
    topk_ids = np.zeros((num_tokens, scoring.topk), dtype=np.int64)
    topk_values = np.full((num_tokens, scoring.topk), -np.inf, dtype=np.float32)
    chosen = None if scoring.targets is None else np.zeros(scoring.targets.shape, dtype=np.float32)
    vocab_size = output_layer(module).out_features
    size = max(1, max_logits // vocab_size)
    for start in range(0, len(hidden), size):
        logits = head_logits(module, hidden[start : start + size])
        totals = logits.logsumexp(dim=1, keepdim=True)
        if not torch.isfinite(totals).all():
            raise not_finite("of the prompt")
        span = slice(first + start, first + start + len(logits))
        tokens = torch.from_numpy(prompt[span]).to(logits.device)
        own[span] = (logits.gather(1, tokens[:, None]) - totals)[:, 0].cpu().numpy()
        if scoring.topk:
            values, ids = logits.topk(min(scoring.topk, vocab_size), dim=1)
            topk_ids[span, : ids.shape[1]] = ids.cpu().numpy()
            topk_values[span, : ids.shape[1]] = (values - totals).cpu().numpy()
        if chosen is not None and scoring.targets is not None:
            rows = slice(span.start - 1, span.stop - 1)
            ids = scoring.targets[rows]
            picked = (
                (logits.gather(1, torch.from_numpy(ids.clip(min=0)).to(logits.device)) - totals).cpu().numpy()
            )
            chosen[rows] = np.where(ids >= 0, picked, 0.0)
    result: dict[str, object] = {}
    if scoring.logprobs:
        result["prompt_logprobs_np"] = own
    if scoring.topk:
        result["topk_prompt_logprobs_np"] = make_topk(topk_ids, topk_values)
    if chosen is not None:
        result["target_prompt_logprobs"] = tinker.TensorData.from_numpy(chosen)
    return result


def not_finite(where: str) -> FloatingPointError:
    """The error of logits that are not finite."""
    return FloatingPointError(
        f"The model's logits {where} are not finite numbers. If training led there, go back to an earlier checkpoint "
        "and lower the learning rate; else try precision='float32'."
    )


@dataclass(kw_only=True, eq=False)
class SampleRequest:
    """One call of ``sample``. Its samples become rows of the decoder's batch."""

    prompt: np.ndarray
    """``[P]`` int64."""
    client: str
    """The sampling client that was called, distinct within the service."""
    name: str
    """Distinct within the service."""
    digests: list[bytes]
    """Digests of the prompt's full blocks."""
    num_samples: int
    max_tokens: int
    """0 where only the prompt is scored."""
    params: tinker.SamplingParams
    """The distribution that tokens are drawn from; what else it says was read."""
    stop: StopSequences
    seed: int
    topk_samples: int
    scoring: PromptScoring | None
    future: LocalFuture[tinker.SampleResponse]
    listener: Listener | None = None
    adapter: "Adapter | None" = None
    """The adapter of its rows, where adapters share a batch."""
    started: int = 0
    """Samples that have a row or are finished."""
    finished: dict[int, tinker.SampledSequence] = field(default_factory=dict[int, tinker.SampledSequence])
    """By sample index."""
    prompt_fields: dict[str, object] = field(default_factory=dict[str, object])
    """Fields of the response that concern the prompt."""

    @property
    def unscored(self) -> PromptScoring | None:
        """The scoring of the prompt that is still to be done."""
        return None if self.prompt_fields else self.scoring

    @property
    def fed(self) -> np.ndarray:
        """The tokens the model must read: a last one that nothing follows is only scored."""
        return self.prompt if self.max_tokens else self.prompt[: max(1, len(self.prompt) - 1)]

    @property
    def waiting(self) -> int:
        """Samples that have no row yet."""
        return self.num_samples - self.started if self.max_tokens else 0

    @property
    def reusable(self) -> int:
        """Leading tokens whose hidden states are not needed, so that their keys and values may be reused."""
        needed = len(self.fed) - 1
        return needed if self.unscored is None else min(needed, self.unscored.first - 1)


def token_array(prompt: tinker.ModelInput, base: BaseModel) -> np.ndarray:
    """The prompt's tokens, ``[P]`` int64; `ValueError` if it is empty, holds images, or unknown tokens."""
    tokens = np.asarray(prompt.to_ints(), dtype=np.int64)
    if tokens.size == 0:
        raise ValueError("The prompt is empty; the model needs at least one token to continue.")
    if tokens.min() < 0 or tokens.max() >= base.vocab_size:
        raise ValueError(
            f"The prompt has token ids from {tokens.min()} to {tokens.max()}; {base.name!r} has ids 0 to "
            f"{base.vocab_size - 1}. Encode the prompt with this model's tokenizer."
        )
    if len(tokens) > base.context_length:
        raise ValueError(
            f"The prompt has {len(tokens)} tokens; {base.name!r} holds {base.context_length}. Shorten the prompt."
        )
    return tokens


def resolve_max_tokens(base: BaseModel, num_tokens: int, asked: int | None) -> int:
    """Tokens to sample at most after a prompt of ``num_tokens``; ``asked=None`` means up to the end of the context.

    Raises:
        ValueError: If they do not fit, or are fewer than one.
    """
    room = base.context_length - num_tokens
    if asked is not None and asked < 1:
        raise ValueError(f"max_tokens must be at least 1, not {asked}.")
    if room < 1 or (asked is not None and asked > room):
        raise ValueError(
            f"A prompt of {num_tokens} tokens and max_tokens={asked} exceed the context of {base.name!r}, "
            f"{base.context_length} tokens. Shorten the prompt or lower max_tokens."
        )
    return room if asked is None else asked


def check_distribution(params: tinker.SamplingParams) -> None:
    """Refuse a distribution to draw from that makes no sense, by a `ValueError`."""
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(
            f"temperature must be a number of at least 0 (0 is greedy), not {params.temperature}."
        )
    if params.top_k != -1 and params.top_k < 1:
        raise ValueError(f"top_k must be at least 1, or -1 for no limit, not {params.top_k}.")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {params.top_p}.")


def block_digests(tokens: np.ndarray, client: str = "") -> list[bytes]:
    """A digest for every full block of tokens, each covering all tokens up to the block's end.

    Those of two sampling clients, which have weights of their own, are never the same.
    """
    data = np.ascontiguousarray(tokens, dtype=np.int32)
    digests: list[bytes] = []
    previous = client.encode()
    for end in range(BLOCK, len(data) + 1, BLOCK):
        previous = hashlib.blake2b(previous + data[end - BLOCK : end].tobytes(), digest_size=16).digest()
        digests.append(previous)
    return digests
