"""What a run trained on a server is exported with the very logprobs that the server gives."""

import asyncio

import numpy as np
import pytest
import torch
from skyrl_updates import CONFIG, datums, leave
from transformers import AutoModelForCausalLM

from viva.recipes.export import ExportOptions, export_run
from viva.run.folder import prepare_run_folder
from viva.sdk import settled
from viva.training import update
from viva.training.service import EngineConfig, make_service


def logprobs(model, datum):
    tokens = torch.tensor([datum.model_input.to_ints()])
    targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].to_numpy())
    with torch.no_grad():
        return model(tokens).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()


async def test_a_run_on_a_server_is_exported_with_the_servers_logprobs(server, tmp_path):
    peft = pytest.importorskip("peft")
    engine = EngineConfig(engine="remote", base_url=server.address)
    options = {"recipe": "x", "model_name": str(server.model), "engine": "remote", "base_url": server.address}
    run = prepare_run_folder(tmp_path / "run", behavior="raise", config=options | {"lora_rank": 4}).open()
    service = make_service(engine, state_dir=tmp_path)
    client = await settled(service.create_lora_training_client(str(server.model), rank=4, seed=0))
    for step in range(3):
        await update.update_policy(client, datums(step), CONFIG)
    run.log.write_step(0, {"optim/lr": CONFIG.learning_rate})
    await run.checkpoints.save(client, next_step=3, log_sizes=run.log.sizes(), final=True)
    probe = datums(3)
    output = await client.forward(update.for_engine(client, probe), "importance_sampling")
    leave(server.address, client)
    adapter, merged = await asyncio.to_thread(export_run, run.path, ExportOptions())
    base = AutoModelForCausalLM.from_pretrained(server.model)
    before = logprobs(base, probe[0])
    models = [AutoModelForCausalLM.from_pretrained(merged), peft.PeftModel.from_pretrained(base, adapter)]
    for datum, record in zip(probe, output.loss_fn_outputs, strict=True):
        for model in models:
            np.testing.assert_allclose(logprobs(model, datum), record["logprobs"].to_numpy(), atol=1e-4)
    assert np.abs(before - output.loss_fn_outputs[0]["logprobs"].to_numpy()).max() > 1e-2
