"""The same work done plainly, behind the interface of the engine's clients: what a straightforward script would do.

``transformers`` generates one reply after another from its whole prompt, through the unmerged adapter. Training pads
rows and computes all logits. Nothing is shared and nothing is kept.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import tinker
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from work import LEARNING_RATE, LORA_ALPHA, LORA_RANK

from viva.sdk import make_response, make_sequence

__all__ = ["PlainClient"]

ROWS = 4
"""Rows in one training micro-batch."""


def done(value: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


class PlainClient:
    """Samples and trains one model."""

    def __init__(self, folder: str, precision: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))
        adapter = LoraConfig(
            r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", lora_dropout=0.0
        )
        self.model = get_peft_model(base, adapter)
        self.model.generation_config.eos_token_id = None
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)

    @torch.inference_mode()
    def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> asyncio.Future[tinker.SampleResponse]:
        assert num_samples == 1
        ids = torch.tensor([prompt.to_ints()])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=sampling_params.max_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, ids.shape[1] :]
        logprobs = torch.stack(out.logits)[:, 0].float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        sequence = make_sequence(
            stop_reason="length",
            sequence_id="0",
            tokens=tokens.tolist(),
            logprobs=logprobs.tolist(),
            topk=None,
        )
        return done(make_response([sequence], {}))

    def forward_backward(
        self, data: Sequence[tinker.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> asyncio.Future[tinker.ForwardBackwardOutput]:
        assert loss_fn == "importance_sampling"
        records: list[dict[str, tinker.TensorData]] = []
        for start in range(0, len(data), ROWS):
            records += self._train(data[start : start + ROWS])
        output = tinker.ForwardBackwardOutput(
            loss_fn_output_type="array", loss_fn_outputs=records, metrics={"loss:sum": 0.0}
        )
        return done(output)

    def optim_step(self, adam_params: tinker.AdamParams) -> asyncio.Future[tinker.OptimStepResponse]:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return done(tinker.OptimStepResponse(metrics={}))

    def _train(self, data: Sequence[tinker.Datum]) -> list[dict[str, tinker.TensorData]]:
        def padded(rows: list[Any]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        def column(name: str) -> torch.Tensor:
            return padded([torch.as_tensor(datum.loss_fn_inputs[name].to_numpy()) for datum in data])

        tokens = [torch.tensor(datum.model_input.to_ints()) for datum in data]
        mask = padded([torch.ones_like(row) for row in tokens])
        logits = self.model(input_ids=padded(tokens), attention_mask=mask).logits.float()
        logprobs = logits.log_softmax(-1).gather(2, column("target_tokens").long()[..., None])[..., 0]
        ratio = (logprobs - column("logprobs")).exp()
        (-(ratio * column("advantages"))).sum().backward()
        return [
            {"logprobs": tinker.TensorData.from_numpy(line[: len(row)].detach().numpy())}
            for line, row in zip(logprobs, tokens, strict=True)
        ]
