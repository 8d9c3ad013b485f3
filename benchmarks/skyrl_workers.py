"""One recipe on a SkyRL server with one worker and with two, and what is sent in a step.

    make .venv-skyrl/.viva-is-set-up .venv-tinker-0.22.7/.viva-is-set-up        # once; needs Python 3.12
    .venv-tinker-0.22.7/bin/python benchmarks/skyrl_workers.py [workers=1,2] [steps=4] [model=FOLDER] [key=value ...]

Starts a server of `scripts/make_skyrl_env.sh` with the JAX backend, with two workers as two processes that hold half of
the weights and of every batch each, and runs `viva train math_efficiency` on it (other options are the recipe's; the
model is by default a small Llama that says A or B at random). All the recipe sends goes through a proxy that counts
requests and bytes; what workers send one another is the rest of what passes through the loopback device meanwhile,
headers included, so nothing else may talk on it. The first two steps, which compile, are left out of the times.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

from lossy_proxy import Proxy
from random_models import make_hesitating_model
from skyrl_server import SkyrlServer

ENVIRONMENT = Path(__file__).parents[1] / ".venv-skyrl"
OPTIONS = {
    "strategies": "iid",
    "group_size": "4",
    "batch_size": "8",
    "max_tokens": "16",
    "lora_rank": "4",
    "learning_rate": "1e-3",
    "eval_every": "0",
    "save_every": "0",
    "behavior_if_exists": "delete",
}
VERBS = ("asample", "forward_backward", "optim_step", "save_weights_for_sampler", "retrieve_future")
COMPILING = 2
"""Steps at the start that compile for new shapes."""


def loopback_bytes() -> int:
    """All that was sent through the loopback device since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise RuntimeError("this machine has no loopback device")


def train(
    server: SkyrlServer, address: str, folder: Path, options: Mapping[str, str]
) -> list[dict[str, float]]:
    """Metrics of the run's steps."""
    given = {
        "model_name": str(server.model),
        "base_url": address,
        "train_prompts_path": str(folder / "problems.jsonl"),
        "log_path": str(folder / "run"),
    }
    arguments = [f"{name}={value}" for name, value in (OPTIONS | given | options).items()]
    subprocess.run([sys.executable, "-m", "viva.cli", "train", "math_efficiency", *arguments], check=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measured(workers: int, model: Path, folder: Path, options: Mapping[str, str]) -> dict[str, float]:
    """Figures of a run with so many workers, by step."""
    folder.mkdir()
    problems = [f'{{"query": "Which letter is {number}?", "answer": "A"}}\n' for number in range(64)]
    (folder / "problems.jsonl").write_text("".join(problems))
    server = SkyrlServer(ENVIRONMENT, model, folder, workers=workers)
    began = time.monotonic()
    server.start()
    try:
        started = time.monotonic() - began
        with Proxy(server.address, lambda verb: None) as proxy:
            before = loopback_bytes()
            steps = train(server, proxy.own_address, folder, options)
            passed = loopback_bytes() - before
    finally:
        server.kill()
    count = len(steps)
    carried = sum(proxy.sent.values()) + sum(proxy.received.values())
    tokens = sum(step["rollout/sampled_tokens"] for step in steps)
    figures = {
        "weights, kB": sum(each.stat().st_size for each in model.glob("*.safetensors")) / 1e3,
        "server started, s": started,
        "steps": count,
        "seconds a step": sum(step["time/step"] for step in steps[COMPILING:]) / max(1, count - COMPILING),
        "largest gap of log-probabilities": max(step["optim/logprob_gap_max"] for step in steps),
        "sampled tokens a step": tokens / count,
        "all tokens a step": sum(step["rollout/total_tokens"] for step in steps) / count,
        "kB a step, client and server": carried / count / 1e3,
        "kB a step, all else on loopback": (passed - 2 * carried) / count / 1e3,
    }
    for verb in VERBS:
        figures[f"{verb}: requests a step"] = proxy.seen[verb] / count
        figures[f"{verb}: kB sent a step"] = proxy.sent[verb] / count / 1e3
        figures[f"{verb}: kB received a step"] = proxy.received[verb] / count / 1e3
    return figures


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    given = dict(argument.split("=", 1) for argument in argv)
    numbers = [int(each) for each in given.pop("workers", "1,2").split(",")]
    options = {"max_steps": given.pop("steps", "4")}
    named = given.pop("model", None)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(named) if named else make_hesitating_model(Path(folder) / "model")
        found = [measured(each, model, Path(folder) / f"workers-{each}", options | given) for each in numbers]
    print(f"| | {' | '.join(f'{each} worker' + 's' * (each > 1) for each in numbers)} |")
    print("|---" * (len(numbers) + 1) + "|")
    for name in found[0]:
        print(f"| {name} | {' | '.join(f'{figures[name]:.4g}' for figures in found)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
