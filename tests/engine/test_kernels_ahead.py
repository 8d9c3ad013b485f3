"""All kernels are compiled at one point before the first number, and torch takes their place where they cannot be."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import with_kernels

from viva.engine.kernels.matrices import has_matrices

HELPERS = Path(__file__).parents[1] / "helpers"
STEP = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tiny_engine import ints, params, supervised
from viva.engine import LocalServiceClient

def step():
    "Logprobs of trained and of sampled tokens: prompts of several lengths, data with a shared beginning."
    trainer = LocalServiceClient(device="cpu").create_lora_training_client(sys.argv[2], rank=4, seed=0)
    data = [supervised([*range(40, 60), *end]) for end in ([1, 2, 3], [1, 2, 4, 5], [9, 8])]
    result = trainer.forward_backward([*data, supervised([7, 8, 9, 10])], "cross_entropy").result()
    found = [number for output in result.loss_fn_outputs for number in output["logprobs"].data]
    sampler = trainer.save_weights_and_get_sampling_client()
    greedy = params(max_tokens=6, temperature=0)
    for prompt in ([1, 2, 3], list(range(30))):
        drawn = sampler.sample(ints(prompt), num_samples=2, sampling_params=greedy).result()
        found += [number for sequence in drawn.sequences for number in sequence.logprobs]
    return found
"""
WITHOUT_COMPILER = """
import llvmlite.binding
import viva.engine.kernels  # whose import asks numba for this processor's features
def refuse(*given):
    raise RuntimeError("no memory can be made executable")
llvmlite.binding.parse_assembly = refuse
"""


def run(code: str, *arguments: str, **variables: str) -> tuple[Any, str]:
    """What a process of its own prints as JSON, and what it tells on the error stream."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(HELPERS), *arguments],
        env=os.environ | variables,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout), done.stderr


@with_kernels
def test_what_is_compiled_ahead_is_all_that_a_step_uses(model_dir: Callable[[str], str]) -> None:
    code = (
        STEP
        + """
from viva.engine.kernels import compile_all, compiler

def compiled():
    "Types that each kernel is compiled for."
    return {
        kernel._alone.__name__: sorted(map(str, [*kernel._alone.signatures, *kernel._in_threads.signatures]))
        for kernel in compiler._kernels
    }

compile_all()
ahead = compiled()
step()
print(json.dumps([ahead, compiled()]))
"""
    )
    (ahead, used), told = run(code, model_dir("qwen3"))
    assert used == ahead
    several = {name: len(kinds) for name, kinds in ahead.items() if len(kinds) != 1}
    expected = {"_multiply_alone": 2}  # weights are float32, or bfloat16 ones
    if has_matrices():  # attention in bfloat16 takes longest to compile where there are two forms of it
        expected |= dict.fromkeys(("_attend_one_alone", "_attend_many_alone", "_add_shared_alone"), 2)
    assert several == expected
    assert "compiled for this processor" not in told


@with_kernels
def test_a_compiler_that_fails_leaves_torch_in_the_kernels_place_and_says_so_once(
    model_dir: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["", str(HELPERS), model_dir("llama")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: dict[str, Any] = {}
    exec(STEP, names)
    expected = names["step"]()  # by this process' kernels
    code = f"{WITHOUT_COMPILER}{STEP}\nstep()\nprint(json.dumps(step()))"
    found, told = run(code, model_dir("llama"), NUMBA_CACHE_DIR=str(tmp_path))
    assert told.count("cannot be compiled here (RuntimeError: no memory can be made executable)") == 1
    assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-4


def test_a_compilation_that_is_ended_ends_at_once_and_leaves_whole_code(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "viva.engine.kernels"]
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None and not list(tmp_path.rglob("*.nbc")):
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=60) == -signal.SIGTERM
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.nbc")}
    code = (
        "import json, torch\n"
        "from viva.engine.kernels import compiler, gate\n"
        "before = compiler.is_code_kept()\n"
        "print(json.dumps([before, float(gate(torch.zeros(1, 2)).sum())]))\n"
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1")[0] == [False, 0]
    assert all(path.read_bytes() == data for path, data in kept.items())
