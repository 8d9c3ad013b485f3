"""Stop rules, prefixes, threads and the package's front."""

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
from viva.engine import threads
from viva.engine.prefixes import BLOCK, Prefix, PrefixCache, block_digests
from viva.engine.stopping import StopRule

TOKENIZER = make_tokenizer()


def rule(*strings: str) -> StopRule:
    return StopRule(ids=frozenset(), strings=strings, tokenizer=TOKENIZER, text_of={})


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
    stop = StopRule(ids=frozenset(), strings=("}",), tokenizer=counting, text_of={})
    tokens = TOKENIZER.encode("a long text without the end " * 20, add_special_tokens=False)
    for length in range(1, len(tokens) + 1):
        assert not stop.ends(tokens[:length])
    assert counting.calls == len(set(tokens))


tokens_of = st.lists(st.integers(0, 2), min_size=1, max_size=80).map(np.array)


@given(st.lists(tokens_of, min_size=1, max_size=8), tokens_of)
def test_the_longest_shared_beginning_is_found(stored: list[np.ndarray], asked: np.ndarray) -> None:
    cache = PrefixCache(10**6)
    for row, tokens in enumerate(stored):
        cache.add(Prefix(digests=block_digests(tokens), row=row))
    blocks, prefix = cache.find(block_digests(asked))

    def shared(tokens: np.ndarray) -> int:
        whole = min(len(tokens), len(asked)) // BLOCK
        return next(
            n for n in range(whole, -1, -1) if np.array_equal(tokens[: n * BLOCK], asked[: n * BLOCK])
        )

    assert blocks == max(shared(tokens) for tokens in stored)
    assert (prefix is None) == (blocks == 0)
    if prefix is not None and prefix.row is not None:
        assert shared(stored[prefix.row]) == blocks


def test_the_least_recently_used_states_are_forgotten_first() -> None:
    cache = PrefixCache(2 * 400)
    keys = [block_digests(np.full(BLOCK, value)) for value in range(3)]
    for key in keys[:2]:
        cache.add(Prefix(digests=key, states=[torch.zeros(100)]))
    assert cache.find(keys[0])[0] == 1
    cache.add(Prefix(digests=keys[2], states=[torch.zeros(100)]))
    assert [cache.find(key)[0] for key in keys] == [1, 0, 1]
    cache.add(Prefix(digests=keys[1], states=[torch.zeros(1000)]))
    assert cache.find(keys[1]) == (0, None)


def test_removing_a_row_keeps_what_others_hold_under_the_same_beginning() -> None:
    cache = PrefixCache(1000)
    tokens = np.arange(2 * BLOCK)
    first, second = (
        Prefix(digests=block_digests(tokens), row=0),
        Prefix(digests=block_digests(tokens[:BLOCK]), row=1),
    )
    cache.add(first)
    cache.add(second)
    cache.remove(first)
    assert cache.find(block_digests(tokens)) == (1, second)


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, viva.engine, viva.engine.threads; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_offers_its_names_and_no_others() -> None:
    for name in viva.engine.__all__:
        assert getattr(viva.engine, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'RemoteServiceClient'"):
        _ = viva.engine.RemoteServiceClient


def test_threads_follow_cores_and_quota_but_never_the_users_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
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


def test_once_torch_is_loaded_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert threads.prepare_threads() == threads.usable_cores()
    assert "OMP_WAIT_POLICY" not in threads.os.environ
