"""What does conversation add? Every reward on every bed, at equal total tokens, against voting, truth and chance.

    make evidence                                                  # what is missing of the plan, cell after cell,
                                                                   # and the runs of benchmarks/alarms.py
    python benchmarks/evidence/run.py [beds=steps,trap-70] [arms=majority,r_sol] [seeds=10] [cells=20]
    python benchmarks/evidence/run.py seeds=named [beds=...]       # one more cell an arm, for the column of replies
                                          # that name the answer, which cells of the first sessions lack
    python benchmarks/evidence/run.py rates=other [beds=...]   # the same cells at the learning rate that was not chosen
    python benchmarks/evidence/run.py tables                       # into both README.md, nothing is run
    python benchmarks/evidence/run.py problems trap-50 FOLDER      # test problems as files, those of each group apart
    python benchmarks/evidence/run.py audit sums-warm [RUN]        # what critics and voters see before the warm-up and
                                                                   # after it, or of a run
    python benchmarks/evidence/run.py transcripts FILE             # the same of a run's own conversations, such as
                                          # runs/evidence/words-warm-r_sol_steps-0-0.0002.transcripts.jsonl
    python benchmarks/evidence/run.py scores FILE [FILE ...]       # what V know, by how far they are apart, in
                                                                   # transcripts.jsonl of runs with known answers
    python benchmarks/evidence/run.py contrast critics-70 serl judged [0.002]   # one arm less another, not corrected
                                                                   # by Holm, at one learning rate if it is given
    python benchmarks/evidence/run.py shortcuts FILE   # by step, how many groups of plain samples agree on a shortcut

A cell is one run of an arm (`arms`) on a bed (`beds`) with a seed: training, then every test problem greedily and
eight times at temperature 1; of seeds 10 to 12 also test conversations, where the arm has any. Without beds, arms and
seeds it is the whole bench (`plan`), of the beds whose model is there; at the end the tables are written. A finished
cell is one line of ``benchmarks/evidence/cells.jsonl`` and is never run again; one that was cut off is run anew.
Several of these commands may work at once. Learning rates come first: each arm tries those of `arms.LEARNING_RATES`
with a seed that is thrown away, on problems to train on, and the best mean of temperatures 0 and 1 is kept. A cell
takes two to four minutes of one core, of a model that others trained four to eight.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.append(str(Path(__file__).parents[1]))

import numpy as np

from evidence.arms import ARMS, NAMED, THROWN_AWAY
from evidence.beds import BEDS, LARGE_MODEL, Bed, LargeBed, RealBed, WarmBed, bed_named, write_problems
from evidence.plan import (
    CONTRASTS,
    LONG_ARMS,
    MAIN_ARMS,
    MAIN_BEDS,
    PLAN,
    RARE_ARMS,
    RARE_CONTRASTS,
    WARM_CONTRASTS,
    Part,
    Place,
    wanted,
)
from evidence.tables import (
    FRONT_ARMS,
    Cell,
    arm_table,
    at_rate,
    contrast_table,
    conversation_table,
    group_table,
    long_table,
    rate_table,
    results_table,
    signal_table,
)
from evidence.transcripts import scores_table, shortcut_table

LEDGER = Path(__file__).parent / "cells.jsonl"
PAGE = Path(__file__).parent / "README.md"
FRONT_PAGE = Path(__file__).parents[2] / "README.md"
_FRONT_TABLE = re.compile(r"\| trained on \|.*?\n(?=\n)", re.DOTALL)
FRONT_BEDS = ("words", "sums", "steps", "trap-70", "critics-70")
_TABLES = "## Tables"
_GAINS = "### Points gained over the untrained policy, side by side"
UNTRAINED = "untrained"


def read_ledger() -> Sequence[Cell]:
    """All finished cells."""
    if not LEDGER.exists():
        return ()
    state = LEDGER.stat()
    return _cells_in(LEDGER, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1)
def _cells_in(ledger: Path, *state: int) -> tuple[Cell, ...]:
    """The ledger's lines; read again only when the file's size or time is another one."""
    return tuple(json.loads(line) for line in ledger.read_text().splitlines())


def cells_of(bed: Bed) -> list[Cell]:
    """The finished cells of a bed, after a warm-up those that start from the one that is here."""
    own = bed.name, bed.start_digest
    return [each for each in read_ledger() if (each["bed"], start_of(each)) == own]


def counted(cells: Iterable[Cell]) -> list[Cell]:
    """Those that tables are about: of seeds that count, at the learning rate that was chosen for the arm."""
    return [each for each in of_any_rate(cells) if not each.get("other_rate")]


def of_any_rate(cells: Iterable[Cell]) -> list[Cell]:
    """Those of seeds that count."""
    return [each for each in cells if each["seed"] not in (NAMED, THROWN_AWAY)]


def start_of(cell: Cell) -> str:
    """The digest of a cell's start; warm-ups of the first cells have none."""
    return str(cell.get("start", ""))


def rate_of(cells: Sequence[Cell], bed: Bed, arm: str) -> float | None:
    """The learning rate of an arm on a bed; ``None`` while one is still to be tried."""
    if ARMS[arm].learning_rate is not None:
        return ARMS[arm].learning_rate
    if len(bed.learning_rates) == 1:
        return bed.learning_rates[0]
    tried = [
        each for each in cells if (each["bed"], each["arm"], each["seed"]) == (bed.name, arm, THROWN_AWAY)
    ]
    scores = {
        each["learning_rate"]: np.mean(each["problems"]["greedy"]) + np.mean(each["problems"]["sampled"])
        for each in tried
    }
    if scores.keys() != set(bed.learning_rates):
        return None
    return max(scores, key=lambda rate: (scores[rate], -rate))


def run_one(bed: Bed, arm: str, seed: int, folder: Path, *, is_other: bool = False) -> bool:
    """Run one cell, or what its learning rate still lacks; whether anything was run.

    Args:
        bed: Its problems and policy.
        arm: What trains.
        seed: Of the run.
        folder: For the run's own files.
        is_other: At the learning rate that was not chosen, on beds and for arms with a choice.
    """
    cells = cells_of(bed)
    tuned = ARMS[arm].prolongs or ARMS[arm].rate_of or arm
    rate = rate_of(cells, bed, tuned)
    if rate is not None and is_other:
        others = [each for each in bed.learning_rates if each != rate]
        has_choice = ARMS[arm].learning_rate is None
        return has_choice and any(_run(bed, arm, seed, each, folder, is_other=True) for each in others)
    if rate is not None:
        at_rate = [each for each in cells if not each.get("other_rate")]
        is_done = any((each["arm"], each["seed"]) == (arm, seed) for each in at_rate)
        return not is_done and _run(bed, arm, seed, rate, folder)
    key = (tuned, THROWN_AWAY)
    tried = {each["learning_rate"] for each in cells if (each["arm"], each["seed"]) == key}
    return any(
        _run(bed, tuned, THROWN_AWAY, each, folder) for each in bed.learning_rates if each not in tried
    )


def _run(bed: Bed, arm: str, seed: int, rate: float, folder: Path, *, is_other: bool = False) -> bool:
    from evidence.cell import Settings, cell, steps_within

    place = folder / f"{bed.name}-{arm}-{seed}-{rate:g}"
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{place}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return False  # another process is at it
    with lock:
        on_bed = cells_of(bed)
        if any(
            (each["arm"], each["seed"], each.get("learning_rate")) == (arm, seed, rate) for each in on_bed
        ):
            return False
        known = [each["steps"] for each in on_bed if each["arm"] in (arm, ARMS[arm].steps_of)]
        steps = known[0] if known else steps_within(bed, arm, place, seed=THROWN_AWAY)
        settings = Settings(learning_rate=rate, steps=steps)
        line = cell(bed, arm, seed, settings, place, validation=seed == THROWN_AWAY)
        if is_other:
            line |= {"other_rate": True}
        _keep(line, bed)
    return True


def _keep(line: dict[str, object], bed: Bed) -> None:
    """Add a cell to the ledger, with its start."""
    if digest := bed.start_digest:
        line |= {"start": digest}
    with LEDGER.open("a") as file:
        file.write(f"{json.dumps(line, separators=(',', ':'))}\n")


def run_untrained(bed: Bed, folder: Path) -> None:
    """Measure the policy of a bed before training, once: asked, and in both kinds of conversation."""
    from evidence.cell import measure_untrained
    from evidence.warm import warm_up

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{bed.name}-{UNTRAINED}.lock"):
        if isinstance(bed, WarmBed):
            warm_up(bed)
        if any(each["arm"] == UNTRAINED for each in cells_of(bed)):
            return
        line = {"bed": bed.name, "arm": UNTRAINED, "seed": 0} | measure_untrained(bed, folder)
        _keep(line, bed)


def audit_bed(bed: WarmBed, runs: Sequence[str]) -> None:
    """Print what critics and voters see, of a run if there is one, or of the model before and after its warm-up."""
    from evidence.warm import audit_table, warm_up

    if not runs:
        warm_up(bed)
    policies = {run: run for run in runs} or {"before": bed.model, "after": bed.untrained}
    sys.stdout.write(f"{audit_table(policies, bed)}\n")


def tables(beds: Sequence[str]) -> str:
    """All tables of the ledger, as Markdown."""
    parts, ledger = [], read_ledger()
    for name in beds:
        own = [each for each in ledger if each["bed"] == name]
        for start in dict.fromkeys(map(start_of, own)):
            parts += _bed_tables(bed_named(name), start, [each for each in own if start_of(each) == start])
    return "\n\n".join(part for part in parts if part)


def _bed_tables(bed: Bed, start: str, own: Sequence[Cell]) -> list[str]:
    """The tables of a bed's cells, which all begin with one policy."""
    untrained = next((each for each in own if each["arm"] == UNTRAINED), None)
    cells = counted(each for each in own if each["arm"] in ARMS)
    if not cells and untrained is None:
        return []
    problems = bed.problems("test")
    texts = {arm: ARMS[arm].text for arm in ARMS if arm not in LONG_ARMS}
    contrasts = RARE_CONTRASTS if bed.level is not None else CONTRASTS
    which = f", from the warm-up {start}" if start else ""
    parts = [
        f"### `{bed.name}`: {len(problems)} test problems{which}",
        arm_table(cells, untrained, texts, named=[each for each in own if each["seed"] == NAMED]),
        contrast_table(cells, WARM_CONTRASTS if isinstance(bed, WarmBed) else contrasts),
        rate_table(of_any_rate(own), contrasts),
    ]
    if bed.level is not None:
        parts.append(signal_table(cells, RARE_ARMS, RARE_CONTRASTS))
    groups = [bed.group_of(each) for each in problems]
    if any(groups):
        parts.append(group_table(cells, untrained, groups, list(texts)))
    parts.append(conversation_table(cells, untrained, list(texts), ("critique", "conversation")))
    followed = of_any_rate(each for each in own if each["arm"] in LONG_ARMS)
    parts.append(long_table(followed, {arm: ARMS[arm].text for arm in LONG_ARMS}))
    return parts


def write_groups(bed: Bed, folder: Path) -> None:
    """Write the test problems of a bed, and those of each group, as files for ``viva screen`` and ``viva eval``."""
    problems = bed.problems("test")
    write_problems(folder / f"{bed.name}.jsonl", problems)
    for name in {bed.group_of(each) for each in problems} - {""}:
        write_problems(folder / f"{name}.jsonl", [each for each in problems if bed.group_of(each) == name])


def page() -> str:
    """The page with the tables of the ledger."""
    text = PAGE.read_text(encoding="utf-8")
    cells = counted(read_ledger())
    beside = f"{_GAINS}\n\n{results_table(cells, FRONT_BEDS, as_gains=True)}"
    return f"{text.partition(_TABLES)[0].rstrip()}\n\n{_TABLES}\n\n{beside}\n\n{tables(BEDS)}\n"


def front_page() -> str:
    """The repository's README with the results of the ledger."""
    cells = counted(read_ledger())
    table = results_table(cells, FRONT_BEDS, arms=FRONT_ARMS)
    return _FRONT_TABLE.sub(lambda _: f"{table}\n", FRONT_PAGE.read_text(encoding="utf-8"))


def write_pages() -> None:
    """Write the tables into both pages."""
    PAGE.write_text(page(), encoding="utf-8")
    FRONT_PAGE.write_text(front_page(), encoding="utf-8")


def did_another_thing(argv: Sequence[str]) -> bool:
    """Do what the first word asks for, if it is one of those that run no cell."""
    if list(argv) == ["tables"]:
        write_pages()
        return True
    if argv[:1] == ["problems"] and len(argv) == 3:
        write_groups(bed_named(argv[1]), Path(argv[2]))
        return True
    if argv[:1] == ["audit"] and len(argv) in (2, 3) and isinstance(bed := bed_named(argv[1]), WarmBed):
        audit_bed(bed, argv[2:])
        return True
    if argv[:1] == ["transcripts"] and len(argv) == 2:
        from evidence.warm import transcript_table

        sys.stdout.write(f"{transcript_table(Path(argv[1]))}\n")
        return True
    if argv[:1] == ["scores"] and len(argv) > 1:
        sys.stdout.write(f"{scores_table(map(Path, argv[1:]))}\n")
        return True
    if argv[:1] == ["contrast"] and len(argv) in (4, 5):
        own = cells_of(bed_named(argv[1]))
        own = at_rate(of_any_rate(own), float(argv[4])) if argv[4:] else counted(own)
        sys.stdout.write(f"{contrast_table(own, [(argv[2], argv[3])])}\n")
        return True
    if argv[:1] == ["shortcuts"] and len(argv) == 2:
        sys.stdout.write(f"{shortcut_table(Path(argv[1]))}\n")
        return True
    return False


def plan_of(given: dict[str, str]) -> Sequence[Sequence[Part]]:
    """The parts that the command line gives, taken from it, else those of `PLAN`."""
    plan = PLAN
    is_other = given.get("rates") == "other"
    if (rates := given.pop("rates", "chosen")) not in ("chosen", "other"):
        sys.exit(f"rates is {rates!r}; allowed: chosen, other")
    if is_other or given.keys() & {"beds", "arms", "seeds"}:
        beds = given.pop("beds", ",".join(MAIN_BEDS)).split(",")
        arms = given.pop("arms", ",".join(MAIN_ARMS)).split(",")
        count = given.pop("seeds", "10")
        plan = [[Part(beds, arms, (NAMED,) if count == "named" else range(int(count)), is_other)]]
    places = list(wanted(plan))
    for kind, known, names in (
        ("bed", BEDS, {place.bed for place in places}),
        ("arm", ARMS, {place.arm for place in places}),
    ):
        if unknown := sorted(names - set(known)):
            sys.exit(f"unknown {kind} {unknown[0]!r}; allowed: {', '.join(known)}")
    return plan


def lacking(bed: Bed) -> str | None:
    """Why a bed cannot be run here, and what to do; ``None`` if it can."""
    if bed.model == "tiny" or Path(bed.model).exists():
        return None
    if isinstance(bed, RealBed):
        command = (
            f"python scripts/fetch_models.py {LARGE_MODEL}" if isinstance(bed, LargeBed) else "make models"
        )
        return f"{bed.model} is not there; `{command}` fetches it"
    policy = Path(bed.model).name.removesuffix("_policy")
    return (
        f"the bed {bed.name} has no policy yet: {bed.model} is not there; make it with "
        f"python benchmarks/evidence/raise_policy.py {policy} output={bed.model}"
    )


def main(argv: Sequence[str]) -> None:
    """Run what is missing and write the tables."""
    if did_another_thing(argv):
        return
    given = dict(argument.split("=", 1) for argument in argv)
    plan = plan_of(given)
    most, folder = int(given.pop("cells", "1000000")), Path(given.pop("folder", "runs/evidence"))
    if given:
        sys.exit(
            f"unknown option {next(iter(given))!r}; allowed: beds, arms, seeds, rates, cells, folder, or one of the "
            "words tables, problems, audit, transcripts, scores, contrast and shortcuts"
        )
    beds = {place.bed: bed_named(place.bed) for place in wanted(plan)}
    reasons = {name: why for name, bed in beds.items() if (why := lacking(bed)) is not None}
    if reasons and plan is not PLAN:
        sys.exit(next(iter(reasons.values())))
    places = [place for place in wanted(plan) if place.bed not in reasons]
    ready: set[str] = set()

    def run_at(place: Place) -> bool:
        bed = beds[place.bed]
        if bed.name not in ready:
            run_untrained(bed, folder)
            ready.add(bed.name)
        return run_one(bed, place.arm, place.seed, folder, is_other=place.is_other)

    done = 0
    while done < most and any(map(run_at, places)):
        done += 1
    write_pages()
    sys.stdout.write("".join(f"left out: {why}\n" for why in dict.fromkeys(reasons.values())))
    sys.stdout.write(f"tables: {PAGE}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
