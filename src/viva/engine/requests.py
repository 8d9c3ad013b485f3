"""A sampling request, checked and in the form the decoder works on."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker

from viva.engine.futures import LocalFuture
from viva.engine.model import BaseModel
from viva.engine.prefixes import block_digests
from viva.engine.sampling import SamplingRule
from viva.engine.scoring import PromptScoring
from viva.engine.stopping import StopRule, make_stop_rule

__all__ = ["SampleRequest", "make_request", "token_array"]


@dataclass(kw_only=True, eq=False)
class SampleRequest:
    """One call of ``sample``. Its samples become rows of the decoder's batch."""

    prompt: np.ndarray
    """``[P]`` int64."""
    digests: list[bytes]
    """Of the prompt's full blocks."""
    num_samples: int
    max_tokens: int
    """0 where only the prompt is scored."""
    rule: SamplingRule
    stop: StopRule
    seed: int
    topk_samples: int
    scoring: PromptScoring | None
    name: str
    """Distinct within the service."""
    future: LocalFuture[tinker.SampleResponse]
    started: int = 0
    """Samples that have a row or are finished."""
    finished: dict[int, tinker.SampledSequence] = field(default_factory=dict[int, tinker.SampledSequence])
    """By sample index."""
    prompt_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the response that concern the prompt."""

    @property
    def unscored(self) -> PromptScoring | None:
        """What is still to be found out about the prompt."""
        return None if self.prompt_fields else self.scoring

    @property
    def fed(self) -> np.ndarray:
        """What the model must read: a last token that nothing follows is only scored."""
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
    """The prompt's tokens, ``[P]`` int64.

    Raises:
        ValueError: Images or audio, an empty prompt, or a token the model does not have.
    """
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


def make_request(
    base: BaseModel,
    tokens: np.ndarray,
    params: tinker.SamplingParams | None,
    *,
    num_samples: int,
    topk_samples: int,
    scoring: PromptScoring | None,
    seed: int,
    name: str,
    future: LocalFuture[tinker.SampleResponse],
) -> SampleRequest:
    """Check a call of ``sample``.

    Args:
        base: The model.
        tokens: Result of `token_array`.
        params: Settings; ``max_tokens=None`` in them means up to the end of the context. ``None`` instead of settings
            means that nothing is sampled and only the prompt is scored.
        num_samples: Independent samples.
        topk_samples: Alternatives to report at each sampled position.
        scoring: What to report about the prompt.
        seed: Used where ``params.seed`` is ``None``.
        name: Distinct within the service.
        future: Where the response goes.

    Raises:
        ValueError: A setting that makes no sense, with what is allowed.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {num_samples}.")
    if topk_samples < 0:
        raise ValueError(f"topk_sample_logprobs must be at least 0, not {topk_samples}.")
    scored_only = params is None
    params = params or tinker.SamplingParams()
    return SampleRequest(
        prompt=tokens,
        digests=block_digests(tokens),
        num_samples=num_samples,
        max_tokens=0 if scored_only else _max_tokens(base, len(tokens), params.max_tokens),
        rule=_make_rule(params),
        stop=make_stop_rule(params.stop, base),
        seed=seed if params.seed is None else params.seed,
        topk_samples=topk_samples,
        scoring=scoring,
        name=name,
        future=future,
    )


def _max_tokens(base: BaseModel, num_tokens: int, asked: int | None) -> int:
    room = base.context_length - num_tokens
    if asked is not None and asked < 1:
        raise ValueError(f"max_tokens must be at least 1, not {asked}.")
    if room < 1 or (asked is not None and asked > room):
        raise ValueError(
            f"A prompt of {num_tokens} tokens and max_tokens={asked} exceed the context of {base.name!r}, "
            f"{base.context_length} tokens. Shorten the prompt or lower max_tokens."
        )
    return room if asked is None else asked


def _make_rule(params: tinker.SamplingParams) -> SamplingRule:
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(
            f"temperature must be a number of at least 0 (0 is greedy), not {params.temperature}."
        )
    if params.top_k != -1 and params.top_k < 1:
        raise ValueError(f"top_k must be at least 1, or -1 for no limit, not {params.top_k}.")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {params.top_p}.")
    return SamplingRule(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
