"""Architectures whose configurations and modules have other names than Llama's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import transformers
from tiny_engine import ints, make_tokenizer, supervised

from viva.engine import LocalServiceClient, policy

TEXTS = [[*range(1, 12), 20 + number, 3] for number in range(4)]
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=260, n_positions=64, eos_token_id=256
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        vocab_size=260,
        max_position_embeddings=64,
    ),
}


@pytest.mark.parametrize(("kind", "rank"), [("gpt2", 0), ("opt", 0), ("opt", 4)])
@pytest.mark.parametrize("free", [2**40, 0])
def test_what_is_trained_is_what_is_sampled(
    kind: str, rank: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(policy, "free_bytes", lambda device: free)  # 0: layers are computed again
    client = LocalServiceClient(device="cpu").create_lora_training_client(str(tmp_path), rank=rank, seed=0)
    data = [supervised(text) for text in TEXTS]
    losses: list[float] = []
    for _ in range(3):
        losses.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    assert losses == sorted(losses, reverse=True)
    seen = client.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampler = client.save_weights_and_get_sampling_client()
    np.testing.assert_allclose(sampler.compute_logprobs(ints(TEXTS[0])).result()[1:], seen, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_models_with_recurrent_layers_are_refused_with_what_is_supported(
    family: str, model_dir: Callable[[str], str]
) -> None:
    pattern = r"layers of the kind 'linear_attention'.*Supported are .*Llama, .*Qwen3 .*engine=remote"
    with pytest.raises(ValueError, match=pattern):
        LocalServiceClient(device="cpu").create_sampling_client(base_model=model_dir(family))
