"""The same work done plainly, behind the interface of the engine's clients: what a straightforward script would do.

``transformers`` generates one reply after another from its whole prompt, through the unmerged adapter. Training pads
rows and computes all logits. Nothing is shared and nothing is kept. `VllmClient` has replies from vLLM instead.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from work import LEARNING_RATE, LORA_ALPHA, LORA_RANK

from viva.sdk import make_response, make_sequence

HERE = Path(__file__).parent


def done(value: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


class PlainClient:
    """Samples and trains one model, `micro_batch` rows at once."""

    def __init__(self, folder: str, precision: str, micro_batch: int) -> None:
        self._rows = micro_batch
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))
        adapter = LoraConfig(
            r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", lora_dropout=0.0
        )
        self.model = get_peft_model(base, adapter)
        self.model.generation_config.eos_token_id = None
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)

    def save_weights_and_get_sampling_client(self) -> asyncio.Future[Any]:
        return done(self)

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
        for start in range(0, len(data), self._rows):
            records += self._train(data[start : start + self._rows])
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


class VllmClient(PlainClient):
    """Samples by vLLM in a process of its own, which reads the weights anew before each step, and trains plainly.

    The weights that it reads are those of the start: they take as long to read as trained ones, and nothing is merged.
    """

    def __init__(self, folder: str, precision: str, micro_batch: int) -> None:
        super().__init__(folder, precision, micro_batch)
        python = HERE.parent.parent / ".venv-engines" / "bin" / "python"
        settings = json.dumps({"work": "requests", "model": folder, "precision": precision})
        self._process = subprocess.Popen(
            [str(python), str(HERE / "side_vllm.py"), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        assert self._process.stdout
        assert json.loads(self._process.stdout.readline())["ready"]
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._count = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def save_weights_and_get_sampling_client(self) -> asyncio.Future[Any]:
        async def refreshed() -> VllmClient:
            await self._ask({"refresh": True})
            return self

        return asyncio.ensure_future(refreshed())

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        topk_sample_logprobs: int = 0,
    ) -> asyncio.Future[tinker.SampleResponse]:
        assert num_samples == 1
        request = {
            "prompt": prompt.to_ints(),
            "max_tokens": sampling_params.max_tokens,
            "logprobs": topk_sample_logprobs,
        }

        async def answered() -> tinker.SampleResponse:
            answer = await self._ask(request)
            best = np.array([list(map(int, row)) for row in answer["alternatives"]])
            logprobs = np.array([list(row.values()) for row in answer["alternatives"]])
            sequence = make_sequence(
                stop_reason="length",
                sequence_id="0",
                tokens=answer["tokens"],
                logprobs=answer["logprobs"],
                topk=(best, logprobs) if topk_sample_logprobs else None,
            )
            return make_response([sequence], {})

        return asyncio.ensure_future(answered())

    def _ask(self, request: Mapping[str, Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        self._count += 1
        self._waiting[self._count] = loop, loop.create_future()
        assert self._process.stdin
        self._process.stdin.write(json.dumps({**request, "id": self._count}) + "\n")
        self._process.stdin.flush()
        return self._waiting[self._count][1]

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            answer = json.loads(line)
            loop, future = self._waiting.pop(answer["id"])
            loop.call_soon_threadsafe(future.set_result, answer)
        ended = RuntimeError(f"vLLM ended with {self._process.wait()}, see above")
        for loop, future in list(self._waiting.values()):  # others may still ask
            loop.call_soon_threadsafe(future.set_exception, ended)
