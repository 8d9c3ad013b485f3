"""Golden runs: metrics of every recipe at seed 0, which a change of the code's form must leave equal to the bit.

    python scripts/golden.py save golden.json       # with the code before
    python scripts/golden.py compare golden.json    # with the code after; exit code 1 where a number differs

Five runs of three steps on the built-in policy: critique self-play, conversation preference RL, and expert iteration
with plain samples, with a mixture, and with conversations. The first command keeps their problems, too. Whichever
`viva` comes first on the path is run, so PYTHONPATH chooses the code. Figures of time and memory are left out,
and so are metrics that the code before did not have.
Different processors and versions of torch round differently: save and compare on one machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMON = [
    "model_name=tiny",
    "max_steps=3",
    "max_tokens=60",
    "lora_rank=8",
    "eval_every=2",
    "seed=0",
    "trackers=[]",
    "num_test_conversations=2",
    "max_test_samples=16",
    "behavior_if_exists=delete",
    "learning_rate=2e-3",
]
MIXTURE = 'strategies=["iid","prompt_augmentation","feedback","best_of"]'
WEIGHTS = 'reward_weights={"r_sol": 1, "r_meta": 1, "r_diag": 2}'
RUNS = {
    "critique": ["critique_self_play", "num_agents=3", "batch_size=12", WEIGHTS],
    "round_robin": ["conversation_preference_rl", "num_agents=3", "batch_size=12", "max_rounds=2"],
    "iid": ["math_efficiency", 'strategies=["iid"]', "batch_size=16", "estimator=importance_sampling"],
    "mixture": ["math_efficiency", MIXTURE, "batch_size=32", "feedback=generated"],
    "conversation": ["math_efficiency", 'strategies=["iid","conversation"]', "batch_size=28", "num_agents=3"],
}
NOT_COMPARED = ("time/", "memory", "per_second", "seconds", "tokens_per_s")


def problems() -> dict[str, str]:
    """Contents of the files of problems, by option."""
    from viva.tiny.tasks import problems as drawn

    def lines(split: Any, count: int) -> str:
        rows = ({"query": each.question, "answer": str(each.answer)} for each in drawn(split, count, seed=0))
        return "".join(f"{json.dumps(row)}\n" for row in rows)

    return {"train_prompts_path": lines("train", 64), "test_prompts_path": lines("test", 16)}


def metrics(name: str, files: dict[str, str]) -> list[dict[str, float]]:
    """Metrics of every step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"log_path={folder}/run"]
        for option, text in files.items():
            path = Path(folder) / f"{option}.jsonl"
            path.write_text(text, encoding="utf-8")
            options.append(f"{option}={path}")
        command = [sys.executable, "-m", "viva.cli", "train", *RUNS[name], *COMMON, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stderr[-3000:]}")
        rows = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [json.loads(row) for row in rows]
    return [{key: row[key] for key in row if not any(word in key for word in NOT_COMPARED)} for row in kept]


def differences(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[str]:
    """What differs between two runs' metrics, one line each; metrics that there were not before are none."""
    if len(before) != len(after):
        return [f"{len(before)} lines before, {len(after)} after"]
    return [
        f"line {line}, {key}: {old.get(key)!r} before, {new.get(key)!r} after"
        for line, (old, new) in enumerate(zip(before, after, strict=True))
        for key in sorted(old)
        if repr(old.get(key)) != repr(new.get(key))
    ]


def main(argv: list[str]) -> int:
    """Save or compare; the process's exit code."""
    if len(argv) < 2 or argv[0] not in ("save", "compare"):
        sys.stderr.write("usage: golden.py save|compare FILE [RUN ...]\n")
        return 2
    path, names = Path(argv[1]), argv[2:] or list(RUNS)
    if argv[0] == "save":
        files = problems()
        saved = {"problems": files, "runs": {name: metrics(name, files) for name in names}}
        path.write_text(json.dumps(saved, indent=1), encoding="utf-8")
        return 0
    saved = json.loads(path.read_text(encoding="utf-8"))
    wrong = 0
    for name in names:
        found = differences(saved["runs"][name], metrics(name, saved["problems"]))
        wrong += bool(found)
        told = f"{len(found)} numbers differ" if found else "equal to the bit"
        sys.stdout.write(f"{name}: {told}\n{''.join(f'  {line}' + chr(10) for line in found[:12])}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
