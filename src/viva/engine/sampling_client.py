"""``tinker.SamplingClient``, in this process."""

from collections.abc import Generator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Self

import numpy as np
import tinker

from viva.engine.core import Core, Source
from viva.engine.model import BaseModel
from viva.engine.policy import Snapshot, stored_snapshot
from viva.engine.requests import (
    Listener,
    PromptScoring,
    SampleRequest,
    block_digests,
    check_distribution,
    make_scoring,
    make_stop_rule,
    resolve_max_tokens,
    token_array,
)
from viva.engine.scheduler import LocalFuture
from viva.sdk import async_twin, awaited_twin, check_carried, refuses_the_rest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@refuses_the_rest(tinker.SamplingClient)
class LocalSamplingClient:
    """Samples from a snapshot of weights; later training does not change it.

    Newer SDKs return a future of the client where older ones return the client. This one is both: awaiting it, or
    calling ``result()``, gives the client itself once its weights are there.
    """

    answers_together = True
    """Whether the last bits of an answer depend on what is decoded with it, or was before."""

    def __init__(self, core: Core, base: BaseModel, source: LocalFuture[Source], stream: str) -> None:
        self._core = core
        self._base = base
        self._source = source
        self._stream = stream
        self._numbers = count()

    def __await__(self) -> Generator[object, None, Self]:
        return self.result_async().__await__()

    async def result_async(self, timeout: float | None = None) -> Self:
        """This client, when its weights are there.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
        """
        await self._source.result_async(timeout)
        return self

    def result(self, timeout: float | None = None) -> Self:
        """This client, when its weights are there; does the work that they depend on.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
        """
        self._source.result(timeout)
        return self

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: tinker.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> LocalFuture[tinker.SampleResponse]:
        """Sample completions of a prompt.

        ``stop=None`` ends a sample at the model's end-of-text tokens; strings end it beside those, ids replace them,
        and ``[]`` ends at none. The token that ends a sample is part of it. Logprobs are those of the distribution
        drawn from, tempered and truncated; greedy tokens (temperature 0) have those of the untempered one. Prompt
        logprobs are untempered.

        A sample depends on its seed, its index among ``num_samples``, its prompt and its settings, not on what else
        is being decoded. Without a seed, one is derived from the service's seed, this client and the request's number.

        Args:
            prompt: Tokens (no images or audio).
            num_samples: Independent samples.
            sampling_params: Settings; ``max_tokens=None`` means to the end of the context.
            include_prompt_logprobs: Score the prompt's tokens.
            topk_prompt_logprobs: Alternatives to report at each prompt position.
            topk_sample_logprobs: Alternatives to report at each sampled position.
            target_prompt_logprobs: ``[len(prompt) - 1, K]`` token ids to score at positions 1 and up; -1 for none.
            prompt_alt_tokens_k: Not supported; must be 0.
            prompt_logprobs_last_n: Score only the last ones.

        Raises:
            ValueError: A setting that makes no sense, with what is allowed.
        """
        if prompt_alt_tokens_k:
            raise ValueError(
                f"prompt_alt_tokens_k={prompt_alt_tokens_k}: the local engine does not draw alternatives to prompt "
                "tokens. Use topk_prompt_logprobs."
            )
        check_carried(
            topk_sample_logprobs=topk_sample_logprobs > 0,
            target_prompt_logprobs=target_prompt_logprobs is not None,
        )
        tokens = token_array(prompt, self._base)
        scoring = make_scoring(
            tokens,
            self._base,
            logprobs=include_prompt_logprobs,
            topk=topk_prompt_logprobs,
            last_n=prompt_logprobs_last_n,
            targets=target_prompt_logprobs,
        )
        return self._submit(tokens, sampling_params, num_samples, topk_sample_logprobs, scoring)

    sample_async = awaited_twin(sample)

    def stream(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        listener: Listener,
        *,
        stop_ids: Sequence[int] = (),
        topk_sample_logprobs: int = 0,
        topk_prompt_logprobs: int | None = None,
    ) -> LocalFuture[tinker.SampleResponse]:
        """`sample`, whose `listener` also gets every token as it is drawn. Servers of Tinker have nothing like it.

        The `stop_ids` end a sample beside the ids or strings of ``sampling_params.stop``. With `topk_prompt_logprobs`
        the prompt's tokens are scored, with so many alternatives to each.

        Raises:
            ValueError: A setting that makes no sense, with what is allowed.
        """
        tokens = token_array(prompt, self._base)
        scoring = make_scoring(
            tokens,
            self._base,
            logprobs=topk_prompt_logprobs is not None,
            topk=topk_prompt_logprobs or 0,
        )
        return self._submit(
            tokens,
            sampling_params,
            num_samples,
            topk_sample_logprobs,
            scoring,
            stop_ids=stop_ids,
            listener=listener,
        )

    def compute_logprobs(
        self, prompt: tinker.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> LocalFuture[list[float | None]]:
        """Untempered logprobs of the prompt's tokens; ``None`` for the first and for those not asked for.

        Raises:
            ValueError: An empty prompt, or ``prompt_logprobs_last_n`` out of range.
        """
        tokens = token_array(prompt, self._base)
        scoring = make_scoring(tokens, self._base, logprobs=True, last_n=prompt_logprobs_last_n)
        response = self._submit(tokens, None, 1, 0, scoring)
        return response.map(lambda value: value.prompt_logprobs or [])

    compute_logprobs_async = awaited_twin(compute_logprobs)

    def get_telemetry(self) -> None:
        """``None``: the engine reports nothing to anybody."""

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._base.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a text where no ``stop`` is given."""
        return tuple(self._base.eos_ids)

    @property
    def context_length(self) -> int:
        """Tokens that prompt and sample may have together."""
        return self._base.context_length

    def get_base_model(self) -> str:
        """Path or name of the base model."""
        return self._base.name

    get_base_model_async = async_twin(get_base_model)

    def _submit(
        self,
        tokens: np.ndarray,
        params: tinker.SamplingParams | None,
        num_samples: int,
        topk_samples: int,
        scoring: PromptScoring | None,
        *,
        stop_ids: Sequence[int] = (),
        listener: Listener | None = None,
    ) -> LocalFuture[tinker.SampleResponse]:
        """Check a call of ``sample`` and queue it. Without `params` nothing is sampled, only the prompt is scored."""
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {num_samples}.")
        if topk_samples < 0:
            raise ValueError(f"topk_sample_logprobs must be at least 0, not {topk_samples}.")
        max_tokens = 0 if params is None else resolve_max_tokens(self._base, len(tokens), params.max_tokens)
        params = params or tinker.SamplingParams()
        check_distribution(params)
        stop = make_stop_rule(params.stop, self._base, stop_ids)
        number = next(self._numbers)  # a call that was refused has none
        derived_seed = self._core.derived_seed(self._stream, number)
        future: LocalFuture[tinker.SampleResponse] = LocalFuture(self._core.pump, cancellable=True)
        request = SampleRequest(
            prompt=tokens,
            client=self._stream,
            name=f"{self._stream}-{number}",
            digests=block_digests(tokens, self._stream),
            num_samples=num_samples,
            max_tokens=max_tokens,
            params=params,
            stop=stop,
            seed=derived_seed if params.seed is None else params.seed,
            topk_samples=topk_samples,
            scoring=scoring,
            future=future,
            listener=listener,
        )

        def enter(source: Source) -> None:
            request.adapter = source.adapter
            source.decoder.add(request)
            self._core.pump.submit(source.decoder)

        self._source.then(enter, future.reject)
        return future


def open_sampling_client(core: Core, path: str | None, base_model: str | None) -> LocalSamplingClient:
    """See `LocalServiceClient.create_sampling_client`."""
    if path is not None:
        state, base = core.open_state(path, base_model)
        snapshot = stored_snapshot(base, state.settings, state.folder)
    elif base_model is not None:
        base = core.base_model(base_model)
        snapshot = Snapshot(base=base, weights={}, scale=0.0)  # an adapter of no layers
    else:
        raise ValueError("create_sampling_client needs model_path or base_model.")
    source = LocalFuture.resolved(core.pump, core.new_source(snapshot))
    return LocalSamplingClient(core, base, source, f"sampler-{core.count('sampler')}")
