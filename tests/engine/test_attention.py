import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import FAMILIES, make_config, make_tokenizer, with_kernels

from viva.engine import LocalServiceClient, attention, kernels
from viva.engine.attention import RaggedCache
from viva.engine.layers import fuse_layers
from viva.engine.model import BaseModel, head_logits, load_base_model
from viva.engine.step import SharedPrefix

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base_of(model_dir: Callable[[str], str]) -> Callable[[str], BaseModel]:
    loaded: dict[str, BaseModel] = {}

    def load(family: str) -> BaseModel:
        if family not in loaded:
            loaded[family] = load_base_model(model_dir(family), CPU, torch.float32)
        return loaded[family]

    return load


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of one token by the compiled kernels, or as where they are not for it."""
    if request.param == "torch":
        monkeypatch.setattr(attention, "can_compile", lambda query: False)


def fused_copy(base: BaseModel) -> Any:
    return fuse_layers(base.decode_copy())


def decode_in_pieces(
    base: BaseModel, texts: list[list[int]], cuts: list[list[int]], module: Any = None
) -> list[torch.Tensor]:
    """Logits of every position, each text fed in pieces of the given sizes, all texts together."""
    cache, module = RaggedCache(rows=1), module or base.decode_copy()
    past = [0] * len(texts)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    for sizes in zip(*cuts, strict=True):
        tokens = torch.zeros(len(texts), max(sizes), dtype=torch.int64)
        for line, text, done, size in zip(tokens, texts, past, sizes, strict=True):
            line[:size] = torch.tensor(text[done : done + size])
        with torch.inference_mode():
            hidden = cache.forward(module, tokens, past=past)
            for row, size in enumerate(sizes):
                logits[row].append(head_logits(base.module, hidden[row, :size]))
        past = [done + size for done, size in zip(past, sizes, strict=True)]
    return [torch.cat(rows) for rows in logits]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("make", [BaseModel.decode_copy, fused_copy])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_length_fed_in_any_pieces_get_the_models_logits(
    family: str,
    make: Callable[[BaseModel], Any],
    base_of: Callable[[str], BaseModel],
    plain_model: Callable[[str], Any],
) -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 256, (size,), generator=generator).tolist() for size in (13, 30, 22)]
    cuts = [[4, 3, 1, 1, 4], [11, 6, 1, 1, 11], [9, 1, 1, 1, 10]]
    pieces = decode_in_pieces(base_of(family), texts, cuts, module=make(base_of(family)))
    for text, logits in zip(texts, pieces, strict=True):
        with torch.no_grad():
            expected = plain_model(family)(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40))
@pytest.mark.usefixtures("way")
def test_many_rows_attend_in_groups_as_they_would_alone(
    base_of: Callable[[str], BaseModel], lengths: list[int]
) -> None:
    base = base_of("qwen3")
    generator = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(0, 256, (size + 1,), generator=generator).tolist() for size in lengths]
    together = decode_in_pieces(base, texts, [[size, 1] for size in lengths])
    for text, logits in list(zip(texts, together, strict=True))[::7]:
        alone = decode_in_pieces(base, [text], [[len(text) - 1, 1]])[0]
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("make", [BaseModel.decode_copy, fused_copy])
@pytest.mark.parametrize("whose", ["several", "one"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_trunks_get_the_models_logits(
    family: str,
    whose: str,
    make: Callable[[BaseModel], Any],
    base_of: Callable[[str], BaseModel],
    plain_model: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, generator = base_of(family), torch.Generator().manual_seed(2)
    module = make(base)
    long, short = (torch.randint(0, 256, (size,), generator=generator).tolist() for size in (29, 6))
    begins = [short, [], long, short, long[:11], long, long] if whose == "several" else [long] * 5
    texts = [begin + torch.randint(0, 256, (9,), generator=generator).tolist() for begin in begins]
    cache, store = RaggedCache(rows=1), RaggedCache(rows=1)
    with torch.inference_mode():
        store.forward(module, torch.tensor([long, short + [0] * 23]), past=[0, 0])
        prefixes = {
            len(begin): SharedPrefix(digest=b"", states=store.read_row(row, 0, len(begin)), length=len(begin))
            for row, begin in ((0, long), (0, long[:11]), (1, short))
        }
        of_rows = [prefixes.get(len(begin)) for begin in begins]
        for entries in (2**20, 200):  # all rows in one part, and in several
            monkeypatch.setattr("viva.engine.step._MOST_ENTRIES", entries)
            pieces: list[torch.Tensor] = []
            for first, last in ((0, 4), (4, 5), (5, 9)):
                tokens = torch.tensor([text[len(text) - 9 :][first:last] for text in texts])
                past = [first] * len(texts)
                ends = [row % (last - first) for row in range(len(texts))]
                ended = cache.forward(module, tokens, past=past, prefixes=of_rows, ends=ends)
                hidden = cache.forward(module, tokens, past=past, prefixes=of_rows)
                expected = hidden[torch.arange(len(texts)), ends][:, None]
                torch.testing.assert_close(ended, expected, atol=1e-5, rtol=1e-5)
                pieces.append(hidden)
            logits = head_logits(base.module, torch.cat(pieces, dim=1))
            for text, row in zip(texts, logits, strict=True):
                expected = plain_model(family)(torch.tensor([text])).logits[0, -9:]
                torch.testing.assert_close(row, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", FAMILIES)
@with_kernels
def test_ends_alone_are_the_ends_of_whole_rows(
    family: str, base_of: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, generator = base_of(family), torch.Generator().manual_seed(3)
    module, cache = fused_copy(base), RaggedCache(rows=1)
    computed: list[torch.Size] = []
    normalise = kernels.Norm.__call__

    def spy(norm: kernels.Norm, hidden: torch.Tensor) -> torch.Tensor:
        computed.append(hidden.shape)
        return normalise(norm, hidden)

    monkeypatch.setattr(kernels.Norm, "__call__", spy)
    tokens = torch.randint(0, 256, (4, 20), generator=generator)
    with torch.inference_mode():
        for first, last, past, ends in (
            (0, 12, [0] * 4, [11, 3, 0, 7]),
            (12, 20, [12, 4, 1, 8], [7, 0, 3, 6]),
        ):
            given: dict[str, Any] = {"past": past}
            hidden = cache.forward(module, tokens[:, first:last], **given)
            computed.clear()
            ended = cache.forward(module, tokens[:, first:last], ends=ends, **given)
            assert computed[-1:] == ([] if family.startswith("gemma") else [ended.shape])
            expected = hidden[torch.arange(4), ends][:, None]
            torch.testing.assert_close(ended, expected, atol=1e-5, rtol=1e-5)


def test_growing_and_moving_rows_keeps_what_is_stored(base_of: Callable[[str], BaseModel]) -> None:
    base = base_of("llama")
    cache, module = RaggedCache(rows=1), base.decode_copy()
    text = torch.arange(30)[None]
    with torch.inference_mode():
        cache.forward(module, text[:, :20], past=[0])
        saved = cache.read_row(0, 0, 16)
        cache.copy_row(0, 0, 20)
        cache.reserve(9, 200)
        cache.copy_row(0, 7, 20)
        cache.clear_row(0)
        moved = cache.forward(module, text[:, 20:].repeat(8, 1), past=[20] * 8)[7:]
        cache.write_row(3, saved)
        restored = cache.forward(module, text[:, 16:].repeat(4, 1), past=[16] * 4)[3:, 4:]
        whole = RaggedCache(rows=1).forward(module, text, past=[0])[:, 20:]
    torch.testing.assert_close(moved, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(restored, whole, atol=1e-5, rtol=1e-5)
    assert cache.rows >= 9


def test_memory_not_stored_yet_cannot_reach_a_result(
    base_of: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of("llama")
    cache, module = RaggedCache(rows=2), base.decode_copy()
    left_over = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args: left_over(*args).fill_(math.nan))
    with torch.inference_mode():
        cache.forward(module, torch.zeros(2, 30, dtype=torch.int64), past=[0, 0])
        first = cache.read_row(0, 0, 30)
        cache.reserve(4, 0)
        assert not any(saved.any() for row in (2, 3) for saved in cache.read_row(row, 0, 64))
        cache.reserve(1, 300)  # longer rows, of which the others are not kept
        cache.reserve(3, 0)
        assert not any(saved.any() for row in (1, 2) for saved in cache.read_row(row, 0, 300))
        for saved, known in zip(cache.read_row(0, 0, 300), first, strict=True):
            assert torch.equal(saved[:, :, :30], known)
            assert not saved[:, :, 30:].any()


@pytest.mark.parametrize(
    ("kind", "message"), [("Bloom", "BloomForCausalLM"), ("Mamba", "layers of the kind 'mamba'")]
)
def test_a_model_the_engine_cannot_decode_is_refused(kind: str, message: str, tmp_path: Any) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 260}
    with torch.random.fork_rng(devices=[]):
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_base_model(str(tmp_path), CPU, torch.float32)


def test_positions_that_depend_on_the_batch_are_refused(tmp_path: Any) -> None:
    config = make_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with torch.random.fork_rng(devices=[]):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="longest sequence"):
        load_base_model(str(tmp_path), CPU, torch.float32)


def test_layers_that_cannot_be_adapted_are_named(tmp_path: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=260, n_positions=64)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no linear layers for train_attn, train_mlp"):
        LocalServiceClient(device="cpu").create_lora_training_client(str(tmp_path), rank=2)


def test_a_folder_without_a_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"without config\.json"):
        load_base_model(str(tmp_path), CPU, torch.float32)


def test_end_of_text_tokens_come_from_model_and_tokenizer(base_of: Callable[[str], BaseModel]) -> None:
    base = base_of("qwen3")
    assert base.eos_ids == (256,)
    assert (base.context_length, base.vocab_size) == (256, 260)


def test_end_of_text_tokens_that_cannot_be_drawn_are_left_out(tmp_path: Any) -> None:
    config = make_config("llama")
    config.eos_token_id = [3, 260, 4000]
    with torch.random.fork_rng(devices=[]):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert load_base_model(str(tmp_path), CPU, torch.float32).eos_ids == (3, 256)


@pytest.mark.parametrize(("had", "asked"), [(1, 2), (3, 1)])
def test_room_that_cannot_be_made_leaves_the_rows_as_they_are(
    base_of: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch, had: int, asked: int
) -> None:
    base = base_of("llama")
    cache, module = RaggedCache(rows=1), base.decode_copy()
    text = torch.arange(90)[None]
    with torch.inference_mode():
        cache.forward(module, text[:, :20], past=[0])
        cache.reserve(had, 0)
        new_empty, calls = torch.Tensor.new_empty, iter(range(9))

        def failing(*args: Any) -> torch.Tensor:
            if next(calls) == 1:  # the second layer
                raise RuntimeError("out of memory")
            return new_empty(*args)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", failing)
            with pytest.raises(RuntimeError, match="out of memory"):
                cache.reserve(asked, 200)
        whole = RaggedCache(rows=1).forward(module, text, past=[0])[:, 20:]
        rest = cache.forward(module, text[:, 20:], past=[20])
        cache.forward(module, text[:, :20].repeat(3, 1), past=[0] * 3)
        later = cache.forward(module, text[:, 20:].repeat(3, 1), past=[20] * 3)[2:]
    torch.testing.assert_close(rest, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(later, whole, atol=1e-5, rtol=1e-5)
