"""Does a model that others trained learn what is in its reach? SmolLM2-135M-Instruct, asked 40 times, then trained.

    python benchmarks/in_reach.py [folder=runs/in_reach] [key=value ...]

All 300 problems of the bed ``sums`` (`evidence.beds`) are asked 40 times at temperature 0.8. Those that it solves in 20
to 80 % of the tries are trained on with true answers, as in ``make demo`` but for 60 steps, and asked again: this
tells whether the machinery learns, not whether anything is learnt about other problems. Prints accuracy before and
after at temperatures 0 and 1; further options are those of ``viva train math_efficiency``. Needs ``make models``.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from _intervals import wilson
from evidence.beds import bed_named, write_problems
from evidence.cell import measure

import viva
from viva.training.data import PromptItem

TRIES, LEAST, MOST = 40, 0.2, 0.8


def in_reach(model: str, folder: Path) -> Path:
    """File of the problems in reach, made where it is not there yet."""
    path = folder / "in_reach.jsonl"
    if not path.exists():
        bed = bed_named("sums")
        problems = [*bed.problems("train"), *bed.problems("test")]
        write_problems(folder / "all.jsonl", problems)
        found = viva.screen(
            model,
            folder / "all.jsonl",
            num_problems=len(problems),
            num_samples=TRIES,
            temperature=0.8,
            max_tokens=bed.max_tokens,
            num_pairs=0,
            output=str(folder / "screen.json"),
        )
        shares = [sum(one.answer.right for one in each.tries_N) / TRIES for each in found.problems]
        pairs = zip(problems, shares, strict=True)
        write_problems(path, [problem for problem, share in pairs if LEAST <= share <= MOST])
    return path


def told(model: str, items: list[PromptItem], max_tokens: int) -> str:
    """Accuracy as text."""
    found = measure(model, items, max_tokens=max_tokens)
    right = found["greedy"].count(100)
    low, high = wilson(right, len(items))
    sampled = sum(found["sampled"]) / len(items)
    return f"temperature 0 {right / len(items):.1%} ({low:.1%} to {high:.1%}), temperature 1 {sampled:.1f} %"


def main(argv: list[str]) -> None:
    """Find the problems, train, and tell."""
    given = dict(argument.split("=", 1) for argument in argv)
    folder, seed = Path(given.pop("folder", "runs/in_reach")), int(given.pop("seed", "0"))
    folder.mkdir(parents=True, exist_ok=True)
    bed = bed_named("sums")
    path = in_reach(bed.model, folder)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    items = [PromptItem(question=row["query"], answer=row["answer"]) for row in rows]
    print(f"{len(items)} problems in reach; before: {told(bed.model, items, bed.max_tokens)}", flush=True)
    options = {**bed.arm("answers").options, "learning_rate": 2e-4, "max_steps": 60, "trackers": ["console"]}
    run = viva.train(
        "math_efficiency",
        model=bed.model,
        prompts=path,
        seed=seed,
        log_path=str(folder / f"run-{seed}"),
        config=options | {name: json.loads(value) for name, value in given.items()},
    )
    print(f"after {len(run.metrics)} steps: {told(str(run.path), items, bed.max_tokens)}")


if __name__ == "__main__":
    main(sys.argv[1:])
