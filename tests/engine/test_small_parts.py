"""Stop rules, prefixes, threads and the package's front."""

import logging
import os
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import make_tokenizer

import viva.engine
from viva import threads, tiny
from viva.engine.linear import can_pack
from viva.engine.model import read_base_model
from viva.engine.requests import BLOCK, StopSequences, block_digests
from viva.engine.sequences import PrefixCache

TOKENIZER = make_tokenizer()


def rule(*strings: str) -> StopSequences:
    return StopSequences(ids=frozenset(), strings=strings, tokenizer=TOKENIZER, text_of={})


@given(
    st.text(alphabet="ab {}\n€😀", max_size=20),
    st.lists(st.text(alphabet="ab {}\n€😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_ends_a_text_at_its_first_whole_occurrence(text: str, strings: list[str]) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    stop = rule(*strings)
    ends = [length for length in range(1, len(tokens) + 1) if stop.ends(tokens[:length])]
    wanted = [
        length
        for length in range(1, len(tokens) + 1)
        if any(s in TOKENIZER.decode(tokens[:length]) for s in strings)
    ]
    assert ends[:1] == wanted[:1]


def test_looking_for_stop_strings_decodes_only_where_one_can_end() -> None:
    class Counting:
        calls = 0

        def decode(self, tokens: list[int], **settings: Any) -> str:
            self.calls += 1
            return TOKENIZER.decode(tokens, **settings)

    counting = Counting()
    stop = StopSequences(ids=frozenset(), strings=("}",), tokenizer=counting, text_of={})
    tokens = TOKENIZER.encode("a long text without the end " * 20, add_special_tokens=False)
    for length in range(1, len(tokens) + 1):
        assert not stop.ends(tokens[:length])
    assert counting.calls == len(set(tokens))


tokens_of = st.lists(st.integers(0, 2), min_size=1, max_size=80).map(np.array)


def store(cache: PrefixCache, tokens: np.ndarray) -> None:
    """Store a sequence whose keys and values are its tokens, 4 bytes each."""
    whole = torch.from_numpy(tokens).to(torch.int16).expand(2, 1, -1)[..., None]
    cache.add(block_digests(tokens), lambda first, last: [whole[:, :, first:last].clone()])


@given(st.lists(tokens_of, min_size=1, max_size=8), tokens_of, st.integers(0, 800))
def test_the_longest_shared_beginning_is_found_and_is_what_was_stored(
    stored: list[np.ndarray], asked: np.ndarray, max_bytes: int
) -> None:
    cache, roomy = PrefixCache(max_bytes), PrefixCache(10**6)
    for tokens in stored:
        store(cache, tokens)
        store(roomy, tokens)
        assert cache.num_bytes == sum(node.num_bytes for node in cache._nodes.values()) <= max_bytes

    def shared(tokens: np.ndarray) -> int:
        whole = min(len(tokens), len(asked)) // BLOCK
        return next(
            n for n in range(whole, -1, -1) if np.array_equal(tokens[: n * BLOCK], asked[: n * BLOCK])
        )

    digests = block_digests(asked)
    longest = max(shared(tokens) for tokens in stored)
    assert roomy.find(digests)[0] == longest >= cache.find(digests)[0]
    for blocks, node in (roomy.find(digests), cache.find(digests)):
        if node is not None:
            (states,) = node.states_up_to(blocks)
            assert states[1, 0, :, 0].tolist() == asked[: blocks * BLOCK].tolist()
    beginnings = {digest for tokens in stored for digest in block_digests(tokens)}
    assert roomy.num_bytes == len(beginnings) * BLOCK * 4


def test_the_least_recently_used_ends_are_forgotten_first() -> None:
    cache = PrefixCache(4 * BLOCK * 4)
    prefix = np.zeros(2 * BLOCK, dtype=np.int64)
    texts = [np.concatenate([prefix, np.full(BLOCK, value)]) for value in range(1, 4)]
    for text in texts[:2]:
        store(cache, text)
    assert cache.find(block_digests(texts[0]))[0] == 3
    store(cache, texts[2])
    # the first text brought the prefix along, so that it stays whole; of the others, the older end went
    assert [cache.find(block_digests(text))[0] for text in texts] == [3, 2, 3]
    store(cache, np.arange(10 * BLOCK) % 7)
    assert cache.find(block_digests(np.arange(10 * BLOCK) % 7)) == (0, None)


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, viva.engine, viva.threads; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_offers_its_names_and_no_others() -> None:
    for name in viva.engine.__all__:
        assert getattr(viva.engine, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'RemoteServiceClient'"):
        _ = viva.engine.RemoteServiceClient


def test_threads_follow_cores_and_quota_but_never_the_users_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    threading = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "GOMP_SPINCOUNT")
    for name in (*threading, "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_CGROUP_V2", quota)
    monkeypatch.setattr(threads, "_CGROUP_V1", tmp_path)
    assert threads.usable_cores() == 8
    for text, cores in (("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("nonsense", 8)):
        quota.write_text(text)
        assert threads.usable_cores() == cores
    quota.write_text("250000 100000")
    assert threads.prepare_threads() == 3
    assert (threads.os.environ["OMP_NUM_THREADS"], threads.os.environ["OMP_WAIT_POLICY"]) == ("3", "passive")
    assert "GOMP_SPINCOUNT" not in threads.os.environ  # spinning would use up the quota
    assert threads.os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == threads.os.environ["LRU_CACHE_CAPACITY"]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert threads.prepare_threads() == 2
    assert threads.os.environ["OMP_WAIT_POLICY"] == "active"
    quota.unlink()
    (tmp_path / "cpu.cfs_quota_us").write_text("150000")
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert threads.usable_cores() == 2
    (tmp_path / "cpu.cfs_quota_us").write_text("-1")
    assert threads.usable_cores() == 8
    for policy, told in (("active", None), ("passive", threads.SPINS)):
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        assert threads.prepare_threads() == 8
        assert threads.os.environ.get("GOMP_SPINCOUNT") == told


def test_once_torch_is_loaded_threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "256")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert threads.prepare_threads() == threads.usable_cores()
    assert "OMP_WAIT_POLICY" not in threads.os.environ


MANY_SHAPES = """
import sys
from pathlib import Path

import torch
from viva.threads import prepare_threads

if sys.argv[1] == "bounded":
    prepare_threads()
torch.set_num_threads(1)
product, rows = torch.ops.mkldnn._linear_pointwise.default, torch.randn(400, 256)
weights = [torch.randn(256 + 16 * place, 256) for place in range(4)]
pages = []
for stop in (20, 400):
    for number in range(1, stop):
        for weight in weights:
            product(rows[:number], weight, None, "none", [], "")
    pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
print(pages[1] - pages[0])
"""


@pytest.mark.skipif(not can_pack(torch.ones(1)), reason="torch is built without the products of oneDNN")
@pytest.mark.skipif(platform.system() != "Linux", reason="memory is read as Linux tells it")
def test_kernels_that_are_kept_are_bounded_for_a_torch_that_was_imported_before() -> None:
    """A product of every number of rows keeps a kernel; without a bound a long run holds gigabytes of them."""
    kept = [
        name for name in os.environ if name not in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    ]
    grown = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", MANY_SHAPES, how],
                env={name: os.environ[name] for name in kept},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for how in ("bounded", "as it is")
    }
    assert grown["bounded"] < 0.6 * grown["as it is"]


REUSE = """
import resource, sys
from viva.threads import prepare_threads

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

prepare_threads()
print(faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
@pytest.mark.parametrize(
    ("tuned", "again"),
    [
        ({}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, True),
    ],
)
def test_freed_memory_is_used_again_unless_the_user_tunes_it(tuned: dict[str, str], again: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", REUSE], env=env | tuned, capture_output=True, text=True, check=True
    )
    first, second = map(int, done.stdout.split())
    assert (second > first / 2) == again


def test_a_long_text_is_not_said_to_break_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses prompts that are too long; ``transformers`` would speak of indexing errors to come."""
    base = read_base_model(str(tiny.model_path()), torch.device("cpu"), torch.float32)
    said: list[str] = []
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "warning", lambda text, *_: said.append(text))
    assert len(base.tokenizer("many words " * 3000)["input_ids"]) > base.tokenizer.model_max_length
    assert said == []
    base.tokenizer.deprecation_warnings.clear()
    base.tokenizer("many words " * 3000)
    assert len(said) == 1  # which it does say
