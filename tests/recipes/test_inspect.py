"""tinker-cookbook's Inspect evaluators on the local engine. They need inspect-ai, none of Viva's own dependencies."""

import importlib.util
import json
import subprocess
import sys

import pytest
from random_models import make_model

EVALUATE = """
import asyncio, json, sys
from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import list_eval_logs, read_eval_log
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from tinker_cookbook.eval.inspect_evaluators import InspectEvaluatorBuilder

from viva.engine import LocalServiceClient

model, logs = sys.argv[1:]
client = LocalServiceClient().create_sampling_client(base_model=model)
samples = [Sample(input=f"{n} + 1?", target=str(n + 1)) for n in range(3)]
evaluate = InspectEvaluatorBuilder(
    tasks=Task(dataset=MemoryDataset(name="sums", samples=samples), solver=generate(), scorer=includes()),
    renderer_name="qwen3_instruct",
    model_name=model,
    max_tokens=6,
    seed=0,
    log_dir=logs,
)
metrics = asyncio.run(evaluate()(client))
(log,) = (read_eval_log(each) for each in list_eval_logs(logs))
tokens = [sample.output.usage.output_tokens for sample in log.samples]
print(json.dumps({"accuracy": metrics["sums/accuracy"], "status": log.status, "tokens": tokens}))
"""


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is None, reason="needs inspect-ai")
def test_an_inspect_task_is_sampled_from_the_local_engine(tmp_path):
    """In a process of its own: inspect-ai leaves event loops open, which would be held against later tests."""
    model = make_model(tmp_path / "model", "qwen3")
    command = [sys.executable, "-W", "ignore", "-c", EVALUATE, str(model), str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0.0 <= found["accuracy"] <= 1.0
    assert (found["status"], len(found["tokens"])) == ("success", 3)
    assert all(0 < tokens <= 6 for tokens in found["tokens"])
