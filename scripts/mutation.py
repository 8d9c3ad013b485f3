"""Mutation score by area: how many small faults, put into the code one at a time, do the tests notice?

    python scripts/mutation.py                      # every area
    python scripts/mutation.py credit estimators    # some
    python scripts/mutation.py credit --again       # only what survived the last time, or was not drawn then

The faults are made and tried by mutmut (dependency group ``mutation``), in a copy of the repository under
``build/mutation/AREA``, so the sources stay as they are. Where an area has more than ``--most`` mutants, a sample is
drawn with ``--seed``. What counts:

- Killed: a test fails. A mutant that takes ten times as long as its tests, and forty seconds more, counts as
  killed, too.
- Wording is not mutated: lines that hold nothing but text, and ``raise`` lines. What a message must say is tested
  elsewhere.
- Equivalent: ``scripts/equivalent_mutants.json`` names changes that nothing can tell from the original, each with
  its reason; they are left out of the score and counted. An entry that no survivor needs any more is an error.

mutmut leaves decorated functions (properties), class bodies and module level alone. The score of an area is killed /
(mutants - equivalent). With ``--ledger``, results go into ``benchmarks/reliability/findings.jsonl``.
"""

import argparse
import contextlib
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutation"
LEDGER = ROOT / "benchmarks" / "reliability" / "findings.jsonl"
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.json"
RECIPE = "12 mutation"
LIMIT_FACTOR, LIMIT_SECONDS = 10.0, 4.0
_READ_BY_TESTS = ("benchmarks", "docs", "scripts", "examples")
"""Folders beside the sources that some tests read."""

QUICK = """
import json
from pathlib import Path

from hypothesis import HealthCheck, settings


def pytest_collection_modifyitems(items):
    stats = Path("mutmut-stats.json")
    seconds = json.loads(stats.read_text())["duration_by_test"] if stats.exists() else {}
    items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))
    for item in items:
        test = getattr(item.obj, "__func__", item.obj)
        own = getattr(test, "_hypothesis_internal_use_settings", None) or settings()
        if hasattr(test, "hypothesis"):
            # "differing executors": the same process runs a test several times, on several instances of its class
            test._hypothesis_internal_use_settings = settings(
                own, max_examples=min(own.max_examples, 15), suppress_health_check=list(HealthCheck)
            )
"""
"""A plugin of pytest that every mutant runs under: quick tests first, and few examples of each property."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """What is mutated, and which tests have to notice."""

    sources: tuple[str, ...]
    """Below ``src/viva``."""
    tests: tuple[str, ...]
    """Below ``tests``; of these, every mutant meets those that reach its function."""


AREAS = {
    "ballots and Bradley-Terry": Area(
        sources=(
            "judging/ballots.py",
            "judging/bradley_terry.py",
            "judging/comparison.py",
            "judging/ranking.py",
        ),
        tests=(
            "judging",
            "selfplay/test_label_votes.py",
            "training/test_signs.py",
            "run/test_alarms.py",
        ),
    ),
    "rewards": Area(
        sources=("rewards/*.py",),
        tests=(
            "rewards",
            "judging/test_consensus.py",
            "selfplay/test_critique_credit.py",
            "selfplay/test_critique_record.py",
            "selfplay/test_label_votes.py",
            "selfplay/test_round_robin.py",
            "selfplay/test_truth.py",
            "training/test_credit.py",
            "view/test_rescore.py",
            "view/test_rescore_judges.py",
        ),
    ),
    "estimators": Area(
        sources=("experts/estimators.py", "experts/estimation.py"),
        tests=(
            "experts/test_estimators.py",
            "experts/test_cut_weights.py",
            "experts/test_baselines.py",
            "experts/test_enumeration.py",
        ),
    ),
    "context swap": Area(
        sources=("training/samples.py", "training/data_processing.py", "experts/samples.py"),
        tests=(
            "training/test_batch.py",
            "training/test_credit.py",
            "training/test_data_processing.py",
            "training/test_rl_data_processing.py",
            "training/test_samples.py",
            "experts",
        ),
    ),
    "coordinator": Area(
        sources=("conversation/coordinator.py",),
        tests=(
            "conversation/test_coordinator.py",
            "conversation/test_coordinator_records.py",
            "conversation/test_lanes.py",
            "selfplay/test_conversation_env.py",
            "selfplay/test_round_robin.py",
            "eval/test_evaluators.py",
        ),
    ),
    "tree packing": Area(
        sources=("engine/trees.py", "engine/packing.py"),
        tests=(
            "engine/test_trees.py",
            "engine/test_packing.py",
            "engine/test_averages.py",
            "engine/test_training_client.py",
            "engine/test_tree_kernels.py",
            "engine/test_tree_training.py",
        ),
    ),
    "checkpoints": Area(
        sources=("engine/checkpoint.py", "model_files.py", "run/checkpoints.py", "run/log.py"),
        tests=(
            "engine/test_checkpoint.py",
            "engine/test_checkpoint_on_disk.py",
            "engine/test_model_files.py",
            "engine/test_service.py",
            "engine/test_base_models.py",
            "run/test_checkpoints.py",
            "run/test_run_folder.py",
            "training/test_followers.py",
            "training/test_members.py",
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A mutant, as a reader sees it."""

    function: str
    """With its module."""
    before: str
    after: str


def main() -> int:
    """Run the areas that were asked for; 1 if one is below the wanted score."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("areas", nargs="*", metavar="area", help=f"of: {', '.join(AREAS)}")
    parser.add_argument("--most", type=int, default=150, help="mutants tried per area")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--wanted", type=float, default=0.8, help="score below which the command fails")
    parser.add_argument("--again", action="store_true", help="leave out what was killed the last time")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for the copies")
    parser.add_argument("--ledger", action="store_true", help=f"write results to {LEDGER.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := set(options.areas) - set(AREAS):
        parser.error(f"unknown areas {sorted(unknown)}; there are: {', '.join(AREAS)}")
    is_low = False
    for name in options.areas or AREAS:
        began = time.monotonic()
        folder = _prepared(name, options.work.resolve())
        drawn = _draw(folder, options.most, options.seed)
        before = json.loads((folder / "sample.json").read_text())["seconds"] if options.again else 0.0
        (folder / "sample.json").write_text(json.dumps(drawn))
        if tried := _survivors(folder) if options.again else drawn["sample"]:
            _mutmut(folder, "run", "--max-children", "1", *tried)
        drawn["seconds"] = before + time.monotonic() - began
        (folder / "sample.json").write_text(json.dumps(drawn))
        is_low |= _report(name, folder, drawn, options) < options.wanted
    return int(is_low)


def _prepared(name: str, work: Path) -> Path:
    """A copy of the repository whose settings name the area's sources and tests."""
    folder = work / name.replace(" ", "-")
    area = AREAS[name]
    for part in ("src", "tests", *_READ_BY_TESTS):
        shutil.rmtree(folder / part, ignore_errors=True)
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "mutants" / "tests", ignore_errors=True)
    (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)  # which tests reach what
    tests = [f"tests/{path}" for path in area.tests]
    settings = {
        "source_paths": ["src"],
        "only_mutate": [f"src/viva/{path}" for path in area.sources],
        # a line that is only text, with or without what closes or divides it; and what is raised
        "do_not_mutate_patterns": [r"""^\s*f?(".*"|'.*')[,)]*$""", r"^\s*raise "],
        "also_copy": [*_READ_BY_TESTS],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": [
            *("-p", "no:cacheprovider", "-p", "quick_tests"),
            *("-k", "not linear_time and not its_square"),  # what takes long, and may fail for a busy machine
        ],
        "timeout_multiplier": LIMIT_FACTOR,
        "timeout_constant": LIMIT_SECONDS,
        "track_dependencies": False,
        "use_git_change_detection": False,
        "on_dependency_change": "ignore",
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text() + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    (folder / "pyproject.toml").write_text(text)
    # a path that is not there when Python starts is never looked into
    (folder / "mutants" / "src").mkdir(parents=True, exist_ok=True)
    (folder / "plugin").mkdir(exist_ok=True)  # mutmut hides the folder itself from imports
    (folder / "plugin" / "quick_tests.py").write_text(QUICK)
    return folder


def _mutmut(folder: Path, *arguments: str) -> None:
    """One command of mutmut there; subprocesses of tests find the mutants, too."""
    path = os.pathsep.join([str(folder / "mutants" / "src"), str(folder / "plugin")])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", *arguments],
            cwd=folder,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"mutmut failed; the end of {folder / 'log.txt'}:\n" + _tail(folder / "log.txt"))


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").replace("\r", "\n").splitlines()[-40:])


def _draw(folder: Path, most: int, seed: int) -> dict[str, Any]:
    """The mutants to try: all, or a sample in the order of the code."""
    from mutmut.configuration import reset_config
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.file_utils import walk_mutatable_files
    from mutmut.utils.format_utils import get_mutant_name

    with contextlib.chdir(folder):
        reset_config()
        names = [
            get_mutant_name(path, name)
            for path in sorted(walk_mutatable_files())
            for name in mutate_file_contents(str(path), path.read_text()).mutant_names
        ]
    places = list(range(len(names)))
    random.Random(seed).shuffle(places)  # so that a larger sample holds every smaller one
    sample = [names[place] for place in sorted(places[:most])]
    return {"mutants": len(names), "sample": sample, "seed": seed, "seconds": 0.0}


def _results(folder: Path) -> dict[str, int | None]:
    """Exit codes of the sampled mutants' tests."""
    codes: dict[str, int | None] = {}
    for meta in (folder / "mutants" / "src").rglob("*.meta"):
        codes |= json.loads(meta.read_text())["exit_code_by_key"]
    sample = json.loads((folder / "sample.json").read_text())["sample"]
    return {name: codes.get(name) for name in sample}


def _verdict(code: int | None) -> str:
    """What an exit code of pytest or a signal says."""
    if code in (1, 2, 3, -11):  # a test failed, a test file did not load, pytest itself failed, a crash
        return "killed"
    if code in (36, 24, -24, 152, 255, -9):
        return "timed out"
    if code in (5, 33):
        return "no tests"
    return "survived" if code == 0 else "not tried"


def _survivors(folder: Path) -> list[str]:
    return [name for name, code in _results(folder).items() if _verdict(code) not in ("killed", "timed out")]


def _change(folder: Path, name: str) -> Change:
    """The lines that a mutant changes."""
    from mutmut.mutation.data import MutantLineSpans

    module, _, mangled = name.rpartition(".")
    function = mangled.partition("__mutmut_")[0]
    with contextlib.chdir(folder):
        source = Path("src", *module.split(".")).with_suffix(".py")
        if not source.exists():
            source = Path("src", *module.split("."), "__init__.py")
        spans = MutantLineSpans.load(source)
        assert spans is not None, f"no mutants of {source}"
        sources = spans.read_function_sources([f"{function}__mutmut_orig", mangled])
    one, other = (text.replace(f"{function}__mutmut_orig", "it").replace(mangled, "it") for text in sources)
    lines = list(difflib.ndiff(one.splitlines(), other.splitlines()))
    before = "\n".join(line[2:].strip() for line in lines if line.startswith("- "))
    after = "\n".join(line[2:].strip() for line in lines if line.startswith("+ "))
    shown = function.removeprefix("x_").removeprefix("x\u01c1").replace("\u01c1", ".")
    return Change(function=f"{module.removeprefix('viva.')}.{shown}", before=before, after=after)


def _report(name: str, folder: Path, drawn: dict[str, Any], options: argparse.Namespace) -> float:
    """Print the area's score and survivors; the score."""
    verdicts = {mutant: _verdict(code) for mutant, code in _results(folder).items()}
    counts = Counter(verdicts.values())
    reasons = {
        Change(function=entry["function"], before=entry["before"], after=entry["after"]): entry["reason"]
        for entry in json.loads(EQUIVALENT.read_text())
    }
    survivors = _survivors(folder)
    changes = {mutant: _change(folder, mutant) for mutant in verdicts}
    alive = {mutant: changes[mutant] for mutant in survivors if changes[mutant] not in reasons}
    equivalent = len(survivors) - len(alive)
    for mutant, change in changes.items():
        if change in reasons and mutant not in survivors:
            raise SystemExit(
                f"{mutant} is in {EQUIVALENT.name}, but a test tells it from the original: {change}"
            )
    killed = counts["killed"] + counts["timed out"]
    score = killed / max(len(verdicts) - equivalent, 1)
    for mutant, change in alive.items():
        _say(f"\n{verdicts[mutant]}: {mutant}\n  {change.function}")
        _say("\n".join(f"  - {line}" for line in change.before.splitlines()))
        _say("\n".join(f"  + {line}" for line in change.after.splitlines()))
    every, seconds = drawn["mutants"], drawn["seconds"]
    figures = (
        f"{len(verdicts)} of {every} mutants, {killed} killed ({counts['timed out']} by their limit), "
        f"{len(alive)} survived, {equivalent} equivalent: {score:.1%}"
    )
    _say(f"\n{name}: {figures} ({seconds:.0f} s)")
    if options.ledger:
        seed = drawn["seed"] if len(verdicts) < every else None
        _record(f"{name}: tests notice at least 80 % of small faults", len(verdicts), seed, figures, seconds)
    return score


def _record(claim: str, trials: int, seed: int | None, figures: str, seconds: float) -> None:
    """One row of the ledger, in the place of the last one on this claim; see tests/reliability/conftest.py."""
    rows = [json.loads(line) for line in LEDGER.read_text().splitlines()] if LEDGER.exists() else []
    row = {"recipe": RECIPE, "claim": claim, "trials": trials, "seed": seed, "figures": figures}
    others = [other for other in rows if (other["recipe"], other["claim"]) != (RECIPE, claim)]
    rows = sorted([*others, {**row, "seconds": round(seconds, 1)}], key=lambda each: each["recipe"])
    LEDGER.write_text("".join(json.dumps(each) + "\n" for each in rows))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
