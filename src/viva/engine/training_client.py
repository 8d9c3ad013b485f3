"""``tinker.TrainingClient``, in this process."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import tinker
import torch
from tinker import types

from viva.engine.adam import check_adam
from viva.engine.checkpoint import check_base_of, read_state, write_checkpoint
from viva.engine.core import Core
from viva.engine.losses import LOSSES, Loss, find_loss
from viva.engine.packing import DatumArrays, make_examples
from viva.engine.policy import LossResult, Policy, Snapshot
from viva.engine.sampling_client import LocalSamplingClient, open_sampling_client
from viva.engine.scheduler import LocalFuture, Operation
from viva.model_files import check_name
from viva.sdk import async_twin, awaited_twin, refuses_the_rest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CustomLoss = Callable[[list[tinker.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]
"""``(data, logprobs)`` to ``(loss, metrics)``; the loss is a scalar with a graph to the logprobs."""


@refuses_the_rest(tinker.TrainingClient)
class LocalTrainingClient:
    """Trains one set of weights. Operations are done strictly in the order in which they are called.

    Each returns a future at once; it is carried out whether the future is awaited or not. The ``_async`` twins exist
    for code written for older SDKs.

    Newer SDKs return a future of the client where older ones return the client. This one is both: awaiting it, or
    calling ``result()``, gives the client itself.
    """

    def __init__(
        self, core: Core, policy: Policy, model_id: str, user_metadata: Mapping[str, str] | None
    ) -> None:
        self._core = core
        self._policy = policy
        self._user_metadata = dict(user_metadata or {})
        self._folder: Path | None = None
        self.model_id = model_id

    @property
    def precision(self) -> str:
        """The compute dtype, for instance ``float32``."""
        return self._core.precision

    def __await__(self) -> Generator[object, None, Self]:
        return self.result_async().__await__()

    takes_mask = True
    """Whether `forward_backward` takes a mask."""

    takes_temperature = True
    """Whether losses can be computed at another temperature than 1."""

    def result(self, timeout: float | None = None) -> Self:
        """This client."""
        return self

    result_async = async_twin(result)

    def forward(
        self, data: list[tinker.Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> LocalFuture[tinker.ForwardBackwardOutput]:
        """Losses and logprobs of the targets, without gradients. See `forward_backward`."""
        return self._run(data, loss_fn, loss_fn_config, backward=False)

    forward_async = async_twin(forward)

    def forward_backward(
        self, data: list[tinker.Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> LocalFuture[tinker.ForwardBackwardOutput]:
        """Add the gradient of the losses' sum to the accumulated gradient.

        Args:
            data: Model inputs ``[N]`` with the loss's inputs ``[N]`` (``cross_entropy`` also takes ``[N, K]``). Unlike
                servers this engine takes a further input ``mask``: where it is 0, a target has no loss, and its
                logprob is not computed but NaN.
            loss_fn: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo`` or ``dro``.
            loss_fn_config: ``clip_low_threshold`` and ``clip_high_threshold`` (ratios), or ``beta``; unlike servers
                this engine takes a ``temperature``, which divides the logits.

        Returns:
            Per datum ``logprobs`` of the targets and ``elementwise_loss``; the metrics ``loss:sum`` and
            ``tree_token_ratio``, tokens computed (padding included) by tokens given. An error while computing drops
            the accumulated gradient and fails the next `optim_step`, which then changes nothing.

        Raises:
            ValueError: Data or settings that this loss does not take.
        """
        return self._run(data, loss_fn, loss_fn_config, backward=True)

    forward_backward_async = async_twin(forward_backward)

    def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: CustomLoss
    ) -> LocalFuture[tinker.ForwardBackwardOutput]:
        """Add the gradient of a loss of your own: one forward pass, ``loss_fn``, then one forward and backward pass.

        Args:
            data: Datums with ``target_tokens``; ``loss_fn`` may read further inputs.
            loss_fn: Gets the data and one tensor of logprobs per datum; returns a scalar loss and metrics.

        Returns:
            As `forward_backward`, with the metrics of ``loss_fn``, its loss as ``loss:sum`` and the linear loss that
            carried its gradient as ``surrogate_loss:sum``.

        Raises:
            ValueError: A datum without fitting ``target_tokens``.
        """
        loss = LOSSES["cross_entropy"]
        bare = [
            tinker.Datum(
                model_input=datum.model_input,
                loss_fn_inputs={k: v for k, v in datum.loss_fn_inputs.items() if k == "target_tokens"},
            )
            for datum in data
        ]
        examples = self._examples(bare, loss, "cross_entropy")
        return self._core.operations.submit(self._custom(list(data), examples, loss, loss_fn))

    forward_backward_custom_async = async_twin(forward_backward_custom)

    def optim_step(
        self, optim_params: tinker.AdamParams | None = None, *, adam_params: tinker.AdamParams | None = None
    ) -> LocalFuture[tinker.OptimStepResponse]:
        """One step of AdamW from the accumulated gradient, which is then cleared.

        Args:
            optim_params: Settings of the step.
            adam_params: The name that older SDKs give them.

        Returns:
            The metric ``grad_norm``, before clipping. Fails, with the weights unchanged, if there is no gradient or it
            is not finite.

        Raises:
            ValueError: Not exactly one of the two is given, or a setting is no number or out of its range.
            TypeError: Settings of another optimiser.
        """
        if (optim_params is None) == (adam_params is None):
            raise ValueError("optim_step needs either optim_params or adam_params.")
        params = adam_params if optim_params is None else optim_params
        if not isinstance(params, tinker.AdamParams):
            raise TypeError(
                f"The local engine's optimiser is AdamW; give AdamParams, not {type(params).__name__}."
            )
        check_adam(params)
        return self._core.operations.call(lambda: tinker.OptimStepResponse(metrics=self._policy.step(params)))

    optim_step_async = async_twin(optim_step)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> LocalFuture[types.SaveWeightsResponse]:
        """Save weights and optimiser under ``weights/<name>`` in this client's folder.

        The folder is ``state_dir/client-<number>``, taken at the first save, or with ``one_run`` the ``state_dir``.

        Args:
            name: Letters, digits, ``_``, ``-`` and ``.``.
            ttl_seconds: Ignored; a local checkpoint stays until you delete it.
            overwrite: Replace this client's checkpoint of this name.
            user_metadata: Stored with it.

        Returns:
            The ``path`` to load from.

        Raises:
            ValueError: The name is not one, or the service has no ``state_dir``.
        """
        path = self._checkpoint_path("weights", name)
        return self._core.operations.call(
            lambda: types.SaveWeightsResponse(
                path=self._write(path, user_metadata, optimizer=True, overwrite=overwrite)
            )
        )

    save_state_async = async_twin(save_state)

    def load_state(self, path: str) -> LocalFuture[types.LoadWeightsResponse]:
        """Take over saved weights; the optimiser starts afresh and the accumulated gradient is dropped."""
        return self._load(path, optimizer=False)

    load_state_async = async_twin(load_state)

    def load_state_with_optimizer(self, path: str) -> LocalFuture[types.LoadWeightsResponse]:
        """Take over saved weights and optimiser; the accumulated gradient is dropped."""
        return self._load(path, optimizer=True)

    load_state_with_optimizer_async = async_twin(load_state_with_optimizer)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> LocalFuture[types.SaveWeightsForSamplerResponse]:
        """Save weights for sampling under ``sampler_weights/<name>`` in this client's folder, over one of this name.

        With LoRA the folder is an adapter as ``peft`` reads it, else a model as ``transformers`` reads it.

        Returns:
            The ``path`` to create a sampling client from.

        Raises:
            ValueError: The name is not one, or the service has no ``state_dir``.
        """
        path = self._checkpoint_path("sampler_weights", name)
        return self._core.operations.call(
            lambda: types.SaveWeightsForSamplerResponse(
                path=self._write(path, user_metadata, optimizer=False, overwrite=True)
            )
        )

    save_weights_for_sampler_async = async_twin(save_weights_for_sampler)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> LocalSamplingClient:
        """A sampling client for the weights after all operations called so far.

        ``name`` has no effect, as in the SDK.
        """
        return self._sampling_client(self._policy.snapshot)

    save_weights_and_get_sampling_client_async = awaited_twin(save_weights_and_get_sampling_client)

    def begin_average(self) -> LocalFuture[None]:
        """Begin an exponential moving average of what is trained, in float32, at the present weights.

        `save_state` saves it with the optimiser, and whoever loads both goes on with it, to the bit.
        """
        return self._core.operations.call(self._policy.begin_average)

    def update_average(self, decay: float) -> LocalFuture[None]:
        """Move the average to ``decay`` of itself and ``1 - decay`` of the present weights.

        Raises:
            ValueError: The decay is not above 0 and below 1; when it is carried out, no average was begun.
        """
        if not 0 < decay < 1:
            raise ValueError(f"decay must be above 0 and below 1, for example 0.9; got {decay}.")
        return self._core.operations.call(lambda: self._policy.move_average(decay))

    def save_average_and_get_sampling_client(self) -> LocalSamplingClient:
        """A sampling client for the average after all operations called so far.

        With LoRA it is the average of the adapter's two matrices, not of their product. Fails if no average was begun.
        """
        return self._sampling_client(self._policy.average_snapshot)

    def create_sampling_client(self, model_path: str) -> LocalSamplingClient:
        """A sampling client for saved weights. See `LocalServiceClient.create_sampling_client`."""
        return open_sampling_client(self._core, model_path, None)

    create_sampling_client_async = async_twin(create_sampling_client)

    def get_telemetry(self) -> None:
        """``None``: the engine reports nothing to anybody."""

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._policy.base.tokenizer

    def get_info(self) -> types.GetInfoResponse:
        """The model that is trained."""
        base, settings = self._policy.base, self._policy.settings
        return types.GetInfoResponse(
            model_data=types.ModelData(
                arch=type(base.module).__name__, model_name=base.name, tokenizer_id=base.name
            ),
            model_id=self.model_id,
            is_lora=settings.rank > 0,
            lora_rank=settings.rank or None,
            model_name=base.name,
        )

    get_info_async = async_twin(get_info)

    def _sampling_client(self, snapshot: Callable[[], Snapshot]) -> LocalSamplingClient:
        source = self._core.operations.call(lambda: self._core.new_source(snapshot()))
        return LocalSamplingClient(
            self._core, self._policy.base, source, f"{self.model_id}-{self._core.count(self.model_id)}"
        )

    def _examples(self, data: Sequence[tinker.Datum], loss: Loss, name: str) -> list[DatumArrays]:
        base = self._policy.base
        return make_examples(data, loss, name, base.vocab_size, base.context_length)

    def _run(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        backward: bool,
    ) -> LocalFuture[tinker.ForwardBackwardOutput]:
        loss = find_loss(loss_fn)
        config = loss.settings(loss_fn, loss_fn_config)
        examples = self._examples(data, loss, loss_fn)

        def operation() -> Operation[tinker.ForwardBackwardOutput]:
            return _output(examples, (yield from self._policy.run(examples, loss, config, backward=backward)))

        return self._core.operations.submit(operation())

    def _custom(
        self, data: list[tinker.Datum], examples: list[DatumArrays], loss: Loss, loss_fn: CustomLoss
    ) -> Operation[tinker.ForwardBackwardOutput]:
        with self._policy.whole_gradient():
            seen = yield from self._policy.run(examples, loss, {}, backward=False)
            with torch.inference_mode(False), torch.enable_grad():
                leaves = [torch.from_numpy(values).requires_grad_(True) for values in seen.logprobs]
                value, metrics = loss_fn(data, leaves)
                value.backward()
            weighted: list[DatumArrays] = []
            for index, (example, leaf) in enumerate(zip(examples, leaves, strict=True)):
                if leaf.grad is None:
                    raise ValueError(f"The custom loss does not depend on the logprobs of datum {index}.")
                # cross entropy of weight -g has gradient g
                inputs = {"weights": -leaf.grad.numpy()}
                weighted.append(replace(example, inputs=inputs, active=loss.active(inputs)))
            result = _output(examples, (yield from self._policy.run(weighted, loss, {}, backward=True)))
        surrogate = result.metrics["loss:sum"]
        result.metrics.update(metrics)
        result.metrics.update({"loss:sum": float(value.detach().sum()), "surrogate_loss:sum": surrogate})
        return result

    def _load(self, path: str, *, optimizer: bool) -> LocalFuture[types.LoadWeightsResponse]:
        def load() -> types.LoadWeightsResponse:
            state = read_state(path)
            check_base_of(state, self._policy.base.name, self._policy.base.digests)
            self._policy.load(state.folder, num_steps=state.num_steps if optimizer else None)
            return types.LoadWeightsResponse(path=path, model_id=self.model_id)

        return self._core.operations.call(load)

    def _checkpoint_path(self, kind: str, name: str) -> Path:
        """The place of a checkpoint in this client's own folder, which is taken when it is first needed.

        Raises:
            ValueError: The name is not one or another client's, there is no folder for it, or a link leads out of it.
        """
        check_name(name)
        if self._folder is None:
            self._folder = self._core.claim_folder()
        path = self._folder / kind / name
        self._core.check_own(path)
        self._core.claim_name(path, self.model_id)
        return path

    def _write(
        self, path: Path, user_metadata: Mapping[str, str] | None, *, optimizer: bool, overwrite: bool
    ) -> str:
        description = self._policy.description(self._user_metadata | dict(user_metadata or {}))
        save = partial(self._policy.save, optimizer=optimizer)
        write_checkpoint(path, description, save, overwrite=overwrite)
        return str(path)


def _output(examples: Sequence[DatumArrays], result: LossResult) -> tinker.ForwardBackwardOutput:
    outputs = [
        {"logprobs": tinker.TensorData.from_numpy(a), "elementwise_loss": tinker.TensorData.from_numpy(b)}
        for a, b in zip(result.logprobs, result.losses, strict=True)
    ]
    # an exact sum, so that the order of the data does not show
    total = math.fsum(float(np.sum(values, dtype=np.float64)) for values in result.losses)
    num_given = sum(len(example.tokens) for example in examples)
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type="TorchLossReturn",
        loss_fn_outputs=outputs,
        metrics={"loss:sum": total, "tree_token_ratio": result.num_computed / num_given},
    )
