"""Runs with weights that moved, and what plain ``transformers`` computes of exported ones."""

import asyncio
import json
from pathlib import Path

import tinker
import torch
from transformers import AutoModelForCausalLM

from viva.engine import LocalServiceClient
from viva.run.folder import prepare_run_folder

TOKENS = [1, 5, 9, 2, 7, 7, 3, 250, 12]


def trained_run(folder: Path, model: Path, *, rank: int = 4) -> Path:
    """A run whose weights moved, with checkpoints after 3 and 4 steps and the engine's logprobs at each."""
    options = {
        "recipe": "critique_self_play",
        "model_name": str(model),
        "log_path": str(folder),
        "train_prompts": ["a", "b"],
        "test_prompts_path": "/home/me/secret-folder/test.jsonl",
        "lora_rank": rank,
        "seed": None,
    }
    run = prepare_run_folder(folder, behavior="raise", config=options).open()
    client = LocalServiceClient(state_dir=run.state_dir, one_run=True).create_lora_training_client(
        str(model), rank=rank, seed=0
    )

    async def move() -> None:
        for step in range(5):
            if step % 2 == 0:
                measured = {"test/direct_accuracy": 0.1 * step, "test/direct_accuracy_stderr": 0.05}
                run.log.write_step(step, {**measured, "test/direct_questions": 40.0})
            if step >= 3:
                await run.checkpoints.save(client, next_step=step, log_sizes=run.log.sizes())
                sampler = client.save_weights_and_get_sampling_client()
                logprobs = await sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS))
                (folder / f"expected-{step}.json").write_text(json.dumps(logprobs[1:]))
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData(data=TOKENS[1:], dtype="int64"),
                    "weights": tinker.TensorData(data=[1.0] * (len(TOKENS) - 1), dtype="float32"),
                },
            )
            await client.forward_backward([datum], "cross_entropy")
            await client.optim_step(tinker.AdamParams(learning_rate=0.02))

    asyncio.run(move())
    return folder


def logprobs_of(model) -> list[float]:
    with torch.no_grad():
        rows = model(torch.tensor([TOKENS])).logits[0, :-1].float().log_softmax(dim=-1)
    return rows[range(len(TOKENS) - 1), TOKENS[1:]].tolist()


def expected(run: Path, step: int = 4) -> list[float]:
    return json.loads((run / f"expected-{step}.json").read_text())


def plain(folder: Path, dtype: str = "auto"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
