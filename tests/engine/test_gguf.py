"""GGUF files: weights, tokenizer and template are those of the model that was written."""

import hashlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import regex
import torch
from gguf_files import LLAMA_3_ROPE, PIECES, TEMPLATE, small_model, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from viva.engine import LocalServiceClient
from viva.engine.gguf import gguf_folder, is_gguf
from viva.engine.gguf_file import PRE_TOKENIZERS
from viva.engine.gguf_tokenizer import read_tokenizer
from viva.model_files import model_digests
from viva.recipes.common import resolve_model

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path / "cache"))


def check_unpacked(folder: Path, model: Any) -> None:
    pair: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    unpacked, told = pair
    tokens = torch.arange(40)[None] * 5 % 260
    with torch.no_grad():
        assert torch.allclose(unpacked(tokens).logits, model(tokens).logits, atol=1e-5)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert unpacked.config.tie_word_embeddings is model.config.tie_word_embeddings
    assert unpacked.config.eos_token_id == 257


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen2", "qwen3"])
def test_an_unpacked_model_computes_what_the_written_one_computes(
    tmp_path: Path, family: str, tied: bool
) -> None:
    model = small_model(family, tied=tied)
    check_unpacked(gguf_folder(write_gguf(tmp_path / "small.gguf", model)), model)


def test_biases_of_a_llama_are_kept(tmp_path: Path) -> None:
    settings = small_model().config
    settings.attention_bias = settings.mlp_bias = True
    model = AutoModelForCausalLM.from_config(settings)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    check_unpacked(gguf_folder(write_gguf(tmp_path / "small.gguf", model)), model)


def test_layers_of_gemma_that_see_a_window_are_listed_or_five_in_six(tmp_path: Path) -> None:
    found: list[list[str]] = []
    for pattern in ([False, True], None):
        file = write_gguf(tmp_path / "small.gguf", small_model("gemma3"), window_pattern=pattern)
        found.append(json.loads((gguf_folder(file) / "config.json").read_text())["layer_types"])
    assert found == [["full_attention", "sliding_attention"], ["sliding_attention"] * 2]


def test_rotary_frequencies_are_scaled_as_the_file_says(tmp_path: Path) -> None:
    model = small_model(rope=LLAMA_3_ROPE)
    size = model.config.head_dim
    factors = 77000.0 ** -(np.arange(0, size, 2) / size) / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > factors.min()
    rope = {"rope_freqs.weight": factors.astype(np.float32)}
    check_unpacked(gguf_folder(write_gguf(tmp_path / "small.gguf", model, more=rope)), model)
    with pytest.raises(ValueError, match=r"other\.gguf.*not the scaling of Llama 3"):
        gguf_folder(
            write_gguf(
                tmp_path / "other.gguf", model, more={name: array * 2 + 1 for name, array in rope.items()}
            )
        )


def test_a_tensor_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    more = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(ValueError, match=r"small\.gguf.*'blk\.0\.attn_sinks\.weight'"):
        gguf_folder(write_gguf(tmp_path / "small.gguf", small_model(), more=more))


async def test_the_engine_samples_from_a_gguf_file_and_saves_its_folder_as_the_base(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model())
    service = LocalServiceClient(device="cpu", state_dir=tmp_path / "state")
    client = await service.create_lora_training_client(str(file), rank=2)
    assert client.get_tokenizer().decode([258]) == "he"
    path = (await client.save_state("one")).path
    adapter = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["base_model_name_or_path"] == str(gguf_folder(file)) == resolve_model(str(file))


def test_the_tokenizer_and_the_template_are_those_of_the_file(tmp_path: Path) -> None:
    folder = gguf_folder(write_gguf(tmp_path / "small.gguf", small_model()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # smollm cuts digits one by one before merges: "12" is never one token there
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hehe 12")) == ["he", "he", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_start|>") == [256]
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    other = AutoTokenizer.from_pretrained(
        gguf_folder(write_gguf(tmp_path / "other.gguf", small_model(), pre="gpt-2", bos=True))
    )
    assert other.convert_ids_to_tokens(other.encode("he12")) == ["<|im_start|>", "he", "12"]


def oracle(pre: str, text: str) -> list[str]:
    """Pieces that merges cannot cross, by another library for regular expressions."""
    pieces = [text]
    for rule in (*PRE_TOKENIZERS[pre].cuts, *(() if pre in ("llama-bpe", "qwen2") else (GPT_2,))):
        found: list[str] = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(rule, piece):
                found += [piece[end : match.start()], match.group()]
                end = match.end()
            found.append(piece[end:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@given(
    text=st.text(
        alphabet=st.one_of(
            st.sampled_from("aB'sdll 12\n\t.é中²"), st.characters(exclude_categories=("Cn", "Co", "Cs"))
        ),
        max_size=30,
    )
)
def test_text_is_cut_as_the_pre_tokenizer_says(pre: str, text: str) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in ("llama-bpe", "qwen2"))
    cuts = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in PRE_TOKENIZERS[pre].cuts]
    cut = pre_tokenizers.Sequence([*cuts, byte_level]).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == oracle(pre, text)


def merged_by_score(text: str) -> list[str]:
    """SentencePiece's merges, one after the other: of all pairs the best scored one, of these the leftmost."""
    symbols = list(text)
    while True:
        pairs = ["".join(pair) for pair in itertools.pairwise(symbols)]
        known = [pair for pair in pairs if pair in PIECES]
        if not known:
            break
        place = pairs.index(min(known, key=PIECES.index))
        symbols[place : place + 2] = [pairs[place]]
    bytes_of = {symbol: [f"<0x{byte:02X}>" for byte in symbol.encode()] for symbol in symbols}
    return [part for symbol in symbols for part in ([symbol] if symbol in PIECES else bytes_of[symbol])]


@pytest.mark.parametrize("space_prefix", [False, True])
def test_pieces_of_sentencepiece_are_merged_by_score(tmp_path: Path, space_prefix: bool) -> None:
    # "he" is a piece whose letters are none: its merge is left out, as such a vocabulary does not come about
    file = write_gguf(
        tmp_path / "s.gguf", small_model("gemma3"), pre="sentencepiece", space_prefix=space_prefix
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(file))
    start = "▁" if space_prefix else ""

    @given(text=st.text(alphabet="abc 1é🙂", min_size=1, max_size=12))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == merged_by_score(start + text.replace(" ", "▁"))
        assert tokenizer.decode(ids) == text

    check()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<|im_start|>\n\n")) == ["<|im_start|>", "\n\n"]


def test_tokens_without_types_are_plain_and_pieces_without_scores_are_refused() -> None:
    fields: dict[str, Any] = {"tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}
    stored: Any = SimpleNamespace(fields=fields)
    assert read_tokenizer(stored).encode("abb") == [2, 1]
    fields["tokenizer.ggml.model"] = "llama"
    with pytest.raises(ValueError, match="3 pieces and 0 scores"):
        read_tokenizer(stored)


def test_a_file_is_unpacked_once_and_another_one_of_its_name_anew(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model())
    first = gguf_folder(file)
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert gguf_folder(file) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert json.loads((first / "gguf.json").read_text())["file"] == "small.gguf"
    assert model_digests(str(first))["gguf"] == digest
    assert len({path.stat().st_mode for path in first.iterdir()}) == 1
    write_gguf(file, small_model(tied=True))
    assert gguf_folder(file) != first
    assert not [path for path in first.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"architecture": "bloom"}, "architecture 'bloom'"), ({"pre": "tekken"}, "pre-tokenizer 'tekken'")],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_folder(write_gguf(tmp_path / "small.gguf", small_model(), **change))


def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model())
    whole = file.read_bytes()
    for size in (0, 3, 24, 400, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"small\.gguf"):
            gguf_folder(file)
    file.write_bytes(b"GGUF" + b"\xff" * 400)
    with pytest.raises(ValueError, match=r"small\.gguf"):
        gguf_folder(file)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not is_gguf(str(tmp_path / "gone.gguf"))


def test_a_path_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a folder, nor a GGUF file"):
        resolve_model("/gone/model.gguf")
