"""Which families of reasoning-gym are in reach of SmolLM2-135M-Instruct? One line of JSON per family, then a table.

    PYTHONHASHSEED=0 python benchmarks/screen_families.py [MODEL] [file=FILE.jsonl] [tries=8] [table] [FAMILY ...]

Every family is asked in its easiest settings: the first level of its curriculum, but for numbers that are higher there
than by default. 20 problems of seed 0, each once greedily and ``tries`` times at temperature 0.8, replies of at most 48
tokens, behind every question "Give only the final answer.". Questions of more than 1,500 characters are not asked.
Families that are in the file (by default the one beside this script) are not repeated; ``table`` only prints. MODEL is
by default what ``make models`` fetched.
"""

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from viva.eval.direct import DirectSampler
from viva.eval.screening import Screener
from viva.eval.screening_figures import screening_figures
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.judging.reasoning_gym import PREFIX, families, find_family
from viva.recipes.demo import model_path
from viva.recipes.evaluation.target import find_target, open_policy
from viva.threads import prepare_threads
from viva.training.data import PromptItem
from viva.training.sampling import Sampling
from viva.training.service import EngineConfig, Engines

PROBLEMS, TRIES, TEMPERATURE, MAX_TOKENS, LONGEST = 20, 8, 0.8, 48, 1500
BEHIND = "Give only the final answer."
SHOWN = ("accuracy/greedy", "accuracy/sampled", "accuracy/maj@8", "accuracy/sampled_lenient")
SHOWN += ("solved/in_20_to_80_percent", "replies/finished", "replies/answer_found", "correlation/majority")


def easiest(family: str) -> dict[str, Any]:
    """Options of the first level of a family's curriculum that make it easier; none where they are refused."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    if family not in CURRICULA:
        return {}
    curriculum = CURRICULA[family]()
    for attribute in curriculum.attributes:
        curriculum.set_attr_level(attribute, 0)
    config, default = curriculum.generate_configuration(), DATASETS[family][1]()
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        is_harder = isinstance(value, int | float) and isinstance(usual, int | float) and value > usual
        if value != usual and not is_harder:
            found[field.name] = value
    return found


def source(family: str) -> str:
    """The name of a family's problems."""
    options = [
        f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in easiest(family).items()
    ]
    name = ",".join([f"{PREFIX}{family}", *options])
    try:
        return find_family(name, size=PROBLEMS).name
    except ValueError:  # the level is none that the family takes
        return find_family(f"{PREFIX}{family}", size=PROBLEMS).name


async def screened(family: str, opened: Any, tries: int) -> dict[str, Any]:
    """The line of a family."""
    began, name = time.perf_counter(), source(family)
    problems = [find_family(name).problem(index) for index in range(PROBLEMS)]
    line: dict[str, Any] = {"family": family, "source": name}
    longest = max(len(problem.question) for problem in problems)
    if longest > LONGEST:
        return line | {"not_asked": f"questions of up to {longest} characters"}
    screener = Screener(
        direct=DirectSampler(
            renderer=opened.renderer,
            sampling=Sampling(
                seed=0, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, context_window=opened.context_window
            ),
        ),
        num_samples=tries,
        judge=PolicySelfComparisonJudge(PolicyRef(sampling_client=opened.client), opened.renderer),
        num_pairs=0,
    )
    items = [PromptItem(question=f"{each.question}\n{BEHIND}", answer=each.known_answer) for each in problems]
    from viva.rewards import majority

    asked = await screener.ask(opened.client, items)
    figures = screening_figures(asked, {"majority": majority()}, resamples=200, seed=0)
    return line | {
        "figures": {key: figures[key].value for key in SHOWN},
        "tries": tries,
        "tries_right": [sum(one.answer.right for one in each.tries_N) for each in asked],
        "first": {"answer": problems[0].answer, "replies": [one.answer.text for one in asked[0].tries_N[:3]]},
        "seconds": round(time.perf_counter() - began, 1),
    }


async def screen_all(model: str, path: Path, wanted: list[str], tries: int) -> None:
    """Screen what the file has not."""
    done = {line["family"] for line in lines(path)}
    target = find_target(model)
    engine = EngineConfig(engine="local")
    opened = await open_policy(target, engine, renderer_name=None, service=Engines().service(engine))
    path.parent.mkdir(parents=True, exist_ok=True)
    for family in wanted or families():
        if family not in done:
            line = await screened(family, opened, tries)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(family, line.get("figures", line.get("not_asked")), flush=True)


def lines(path: Path) -> list[dict[str, Any]]:
    """What was screened."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    )


def table(path: Path) -> str:
    """The families as a table, the best first, and those that were not asked or never right below it."""
    asked = [line for line in lines(path) if "figures" in line]
    asked.sort(key=lambda line: (-line["figures"]["accuracy/sampled"], line["family"]))
    rows = [
        "| family | greedy | sampled | maj@8 | named | in reach | finished | answer found | mixed | settings |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = [name for name in SHOWN if name != "correlation/majority"]
    for line in asked:
        if any(line["tries_right"]) or line["figures"]["accuracy/greedy"]:
            cells = [f"{100 * line['figures'][name]:.0f}" for name in names]
            options = [
                each for each in line["source"].split(",")[1:] if not each.startswith(("seed=", "size="))
            ]
            mixed = sum(0 < right < line.get("tries", TRIES) for right in line["tries_right"]) / PROBLEMS
            cells.append(f"{100 * mixed:.0f}")
            rows.append(f"| `{line['family']}` | {' | '.join(cells)} | {', '.join(options)} |")
    never = sorted(
        line["family"]
        for line in asked
        if not any(line["tries_right"]) and not line["figures"]["accuracy/greedy"]
    )
    skipped = sorted(line["family"] for line in lines(path) if "not_asked" in line)
    reach = sum(line["figures"]["solved/in_20_to_80_percent"] >= 0.2 for line in asked)
    return "\n".join(
        [
            *rows,
            "",
            f"{len(asked)} families asked; {reach} have at least a fifth of their problems in reach. Never right: "
            f"{', '.join(never) or 'none'}. Not asked (questions of more than {LONGEST:,} characters): "
            f"{', '.join(skipped) or 'none'}.",
        ]
    )


def main(arguments: list[str]) -> None:
    """See the module."""
    prepare_threads()
    named = dict(argument.split("=", 1) for argument in arguments if argument.startswith(("file=", "tries=")))
    rest = [argument for argument in arguments if not argument.startswith(("file=", "tries="))]
    path = Path(named.get("file", Path(__file__).with_suffix(".jsonl")))
    if rest == ["table"]:
        print(table(path))
        return
    model = rest.pop(0) if rest and ("/" in rest[0] or rest[0].endswith(".gguf")) else str(model_path())
    asyncio.run(screen_all(model, path, rest, int(named.get("tries", TRIES))))
    print(table(path))


if __name__ == "__main__":
    main(sys.argv[1:])
