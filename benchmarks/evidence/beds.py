"""The test beds: a policy each, problems to train on, and problems to test on that share no step with them.

``steps``: the built-in policy on its five kinds of problem. Nothing is planted but what ``scripts/build_tiny`` says:
its most frequent answer is right on most problems, so voting can only help it.

``trap-D`` with D = 50, 60, 70 or 80: the policy of ``raise_policy.py``, whose most frequent answer is wrong on
half of the problems (those of two steps: it forgets the second one), while as critic or judge it sees the fault on D %
of these: where the forgotten number is large. The dial lies in the problems; the policy is the same. Its judge and its
votes see, its critiques hardly do.

``critics-D``: the same problems for a policy that was raised on from that one, and whose critiques see, too.

``rare-P`` with P = 1, 5, 20 or 57: kinds of problem that a policy of ``raise_policy.py`` solves about P times of 100,
and half of the time behind the instruction `HINT`. The bed of the context swap.

``words`` and ``sums``: a model that others trained, SmolLM2-135M-Instruct (``make models``). ``words`` are the word
problems of ``make demo``, which it hardly solves, and its most frequent answer is mostly wrong. ``sums`` are the
families ``products`` and ``chain_sum`` of reasoning-gym with numbers of one digit, half of which it solves.
``words-warm`` and ``sums-warm``: the same after a warm-up of its critics and voters (`warm`).

``steps-large``: the kinds of problem of ``steps`` for a model of 1.5 billion parameters, Qwen2.5-Coder-1.5B-Instruct
(``python scripts/fetch_models.py qwen2.5-coder-1.5b-instruct``, 1.1 GB), which is asked for a number alone.

A step is one line of working (7+5 and 5+7 are one step). Steps are divided by a fixed hash: a problem to train on has
steps of one part only, one to test on of the other part only. The policies were *raised* on problems of both parts,
wrong solutions among them; the division is about what a run trains on.
"""

import itertools
import json
import random
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml

import viva
from evidence.arms import (
    ARMS,
    COMMON,
    LEARNING_RATES,
    RARE_TOKENS,
    REAL_RATES,
    REAL_TOKENS,
    TOTAL_TOKENS,
    Arm,
)
from evidence.worked import CRITIQUE_TEXTS
from viva.engine.gguf import cache_folder
from viva.recipes.demo import model_path, word_problems
from viva.tiny import tasks
from viva.tiny.tasks import Problem, Step

Part = Literal["warmup", "train", "test"]

TRAP_POLICY = Path(__file__).parent / "trap_policy"
"""Weights that ``raise_policy.py`` wrote."""
CRITICS_POLICY = Path(__file__).parent / "critics_policy"
TRAP_KINDS = ("add_sub", "mul_add", "mul_sub")
"""Kinds of problem on which the policy of the trap mostly forgets the second step."""
LARGEST_UNSEEN = 5
"""Up to this number in the second step it does not see, as critic or judge, that the step is forgotten."""
DIALS = (50, 60, 70, 80)
RARE_POLICY = Path(__file__).parent / "rare_policy"
LEVELS = {1: ("mul_add",), 5: ("mul_sub",), 20: ("add_sub",), 57: ("add", "sub")}
"""By per cent of success, the kinds of problem."""
_TRAPS = {"trap": TRAP_POLICY, "critics": CRITICS_POLICY}
REAL = ("words", "sums")
"""Beds of a model that others trained."""
WARM = tuple(f"{name}-warm" for name in REAL)
"""The same after a warm-up of its critics and voters (`warm`)."""
LARGE = "steps-large"
"""The bed of a model of 1.5 billion parameters."""
BEDS = (
    "steps",
    *(f"{trap}-{dial}" for trap in _TRAPS for dial in DIALS),
    *(f"rare-{level}" for level in LEVELS),
    *REAL,
    *WARM,
    LARGE,
)

_RANGES = {
    "add": (range(3, 20), range(2, 10)),
    "sub": (range(11, 26), range(2, 10)),
    "add_sub": (range(3, 17), range(2, 10), range(2, 5)),
    "mul_add": (range(2, 6), range(2, 6), range(2, 10)),
    "mul_sub": (range(2, 6), range(3, 6), range(2, 10)),
}
"""The numbers of every kind of problem that the built-in policy was raised on."""
_TRAP_RANGES = _RANGES | {"add_sub": (range(3, 17), range(2, 10), range(2, 10))}
"""Those of the trap's policy."""
_SALT, _TEST_STEPS = 339, 55
"""Chosen so that both parts hold enough problems of every kind; the second in per cent."""
_NUM_TRAIN = 2000
_NUM_VALIDATION = 200

DEBATE = viva.Protocol(
    rounds=[
        viva.Round("answer", "Give only the final number."),
        viva.Round("final", "Give only the final number that you now hold right.", ["answer"]),
    ],
    reward=viva.rewards.tournament(),
)
"""Its conversation in turns: all answer, see all answers, and answer again."""
REAL_OPTIONS = {"lora_rank": 32, "max_tokens": 40, "temperature": 0.8}
_EIGHT_TO_A_PROBLEM = {"group_size": 8, "batch_size": 64, "estimator": "shaped"}
_FOUR_TO_A_PROBLEM = {"group_size": 4, "batch_size": 24, "estimator": "shaped"}
"""Peer prediction reads every reply behind every other one, and a judge compares every pair in both orders."""
_HINTS = {
    "words": "Who buys more: add. Who gives away: subtract. So many boxes, so many things in each: multiply.",
    "sums": "For example, 9 - 6 = 3, 7 + 5 = 12 and 4 * 6 = 24.",
    "steps-large": "For example, 4 boxes with 5 things each and 3 more are 4 * 5 + 3 = 23 things.",
}
WARM_STEPS = 40
"""Of a warm-up, 16 examples each."""
_DEBATE_SIZES = {"num_agents": 3, "batch_size": 24}
_CRITIQUE_SIZES = {"batch_size": 12}
_FAMILIES = {"products": {"max_digits": 1}, "chain_sum": {"max_digits": 1, "max_terms": 2}}
"""Of reasoning-gym, as `viva screen` found them in reach."""
_BEHIND = "Give only the final answer."
_BARE = "Reply with a number alone, without words."
LARGE_MODEL = "qwen2.5-coder-1.5b-instruct"
_LARGE_FILE = f"{LARGE_MODEL}-q4_k_m.gguf"
_LARGE_MAX_TOKENS = 12
_LARGE_TEST_PER_KIND = 20
_NUM_DRAWN = 3000
"""Enough for all 300 problems to turn up."""
_NUM_SUMS_TO_TEST_ON = 100


@dataclass(frozen=True, kw_only=True)
class Question:
    """A problem of a model that others trained."""

    question: str
    answer: int


@dataclass(frozen=True, kw_only=True)
class Bed(ABC):
    """A policy and its problems."""

    name: str
    model: str
    """As ``model_name``."""
    dial: int | None = None
    """Per cent of the trap's problems on which checking can be right; ``None``: there is no trap."""
    level: int | None = None
    """Per cent of success before training, where problems of one level are asked."""
    max_tokens: int = COMMON["max_tokens"]
    """Of a reply, in training and at the test."""
    total_tokens: int = TOTAL_TOKENS
    """Of every arm."""
    learning_rates: tuple[float, ...] = LEARNING_RATES
    """Of which every arm takes the best; one alone is not tried."""

    @abstractmethod
    def problems(self, part: Part, *, seed: int = 0) -> Sequence[Problem | Question]:
        """Problems to train on (for a seed), or all that there are to test on, the same for every seed."""

    def group_of(self, problem: Problem | Question) -> str:
        """The name of the problem's group in tables; empty where a bed has one group."""
        return ""

    @property
    def untrained(self) -> str:
        """The policy before training: a model, or a run."""
        return self.model

    @property
    def start_digest(self) -> str:
        """Digest of the state that runs start from, where another processor makes another one; else empty."""
        return ""

    def validation(self) -> Sequence[Problem | Question]:
        """Problems of the training part, on which learning rates are chosen."""
        return self.problems("train", seed=10_000)[:_NUM_VALIDATION]

    def arm(self, name: str) -> Arm:
        """An arm with all its options on this bed."""
        return replace(ARMS[name], options={**COMMON, **ARMS[name].options})

    def write(self, folder: Path, seed: int) -> dict[str, str]:
        """Write problems to train on and to test on; options that name them and the policy."""
        rows = {"train": self.problems("train", seed=seed), "test": self.problems("test")}
        for part, problems in rows.items():
            write_problems(folder / f"{part}.jsonl", problems)
        return {
            "model_name": self.model,
            "train_prompts_path": str(folder / "train.jsonl"),
            "test_prompts_path": str(folder / "test.jsonl"),
        }


class TinyBed(Bed):
    """A bed of 3 million parameters."""

    def problems(self, part: Part, *, seed: int = 0) -> list[Problem]:
        """Those of the base class."""
        rng = random.Random(f"{self.name} {part} {seed}")
        pools = self._pools(part, rng)
        shares = [share for share, _ in pools]
        if part == "train":
            drawn = rng.choices([pool for _, pool in pools], shares, k=_NUM_TRAIN)
            return [_told(rng.choice(pool), rng) for pool in drawn]
        total = min(int(len(pool) / share) for share, pool in pools)
        kept = [each for share, pool in pools for each in rng.sample(pool, round(total * share))]
        rng.shuffle(kept)
        return kept

    def group_of(self, problem: Problem | Question) -> str:
        """``plain``; in a trap, ``seen`` by critics or ``unseen``."""
        if self.dial is None or not isinstance(problem, Problem):
            return ""
        return "unseen" if is_blind(problem) else "seen" if is_trap(problem) else "plain"

    def _pools(self, part: Part, rng: random.Random) -> list[tuple[float, list[Problem]]]:
        """All problems of a part in groups, each with its share."""
        ranges = _RANGES if self.model == "tiny" else _TRAP_RANGES
        found = [_told(each, rng) for kind in ranges for each in all_problems(kind, ranges[kind], part)]
        if self.level is not None:
            return [(1.0, [each for each in found if each.kind in LEVELS[self.level]])]
        if self.dial is None:
            return [(1.0, found)]
        seen = 0.5 * self.dial / 100
        return [
            (0.5, [each for each in found if not is_trap(each)]),
            (seen, [each for each in found if is_trap(each) and not is_blind(each)]),
            (0.5 - seen, [each for each in found if is_blind(each)]),
        ]


class RealBed(Bed):
    """A bed of a model that others trained. As critic and judge it votes by the probabilities of labels."""

    @property
    def source(self) -> str:
        """The bed whose problems these are."""
        return self.name

    def problems(self, part: Part, *, seed: int = 0) -> Sequence[Problem | Question]:
        """Those of the base class."""
        if self.source == "words":
            train, test = word_problems(seed=seed)
        else:
            train, test = _sums()
            random.Random(seed).shuffle(train)
        return [
            Question(question=text, answer=answer) for text, answer in (test if part == "test" else train)
        ]

    def group_of(self, problem: Problem | Question) -> str:
        """The family of reasoning-gym, on ``sums``."""
        if self.source != "sums":
            return ""
        return "products" if "*" in problem.question else "chain_sum"

    def arm(self, name: str) -> Arm:
        """An arm with all its options on this bed, those of ``make demo`` among them."""
        given = super().arm(name)
        if given.recipe == "conversation_preference_rl":
            protocol = DEBATE
            if given.options.get("judge_answers_first"):
                reward = viva.rewards.tournament(answers_first=True, max_tokens=self.max_tokens)
                protocol = replace(DEBATE, reward=reward)
            return replace(given, recipe=protocol, options={**COMMON, **REAL_OPTIONS, **_DEBATE_SIZES})
        options = {**COMMON, **REAL_OPTIONS, **ARMS[name].options}
        if isinstance(given.recipe, viva.Protocol):
            return replace(given, options=options)
        if given.recipe == "critique_self_play":
            options |= yaml.safe_load(CRITIQUE_TEXTS.read_text(encoding="utf-8")) | _CRITIQUE_SIZES
        elif given.in_fours:
            options |= _FOUR_TO_A_PROBLEM
        else:
            options |= _EIGHT_TO_A_PROBLEM | ({"hint": _HINTS[self.source]} if name == "hint" else {})
        return replace(given, options=options)


class LargeBed(RealBed):
    """The problems of ``steps`` for a model of 1.5 billion parameters, 20 of each kind to test on."""

    def problems(self, part: Part, *, seed: int = 0) -> list[Problem]:
        """Those of the base class."""
        rng = random.Random(f"{self.name} {part} {seed}")
        found: list[Problem] = []
        for kind, ranges in _RANGES.items():
            pool = [*all_problems(kind, ranges, part)]
            found += rng.sample(pool, _LARGE_TEST_PER_KIND if part == "test" else len(pool))
        rng.shuffle(found)
        told = [_told(each, rng) for each in found]
        return [replace(each, question=f"{each.question} {_BARE}") for each in told]

    def group_of(self, problem: Problem | Question) -> str:
        """The steps that it takes."""
        return problem.kind if isinstance(problem, Problem) else ""

    def arm(self, name: str) -> Arm:
        """An arm with all its options on this bed."""
        given = super().arm(name)
        if given.recipe == "critique_self_play":
            return given  # critiques need more than a number
        return replace(given, options={**given.options, "max_tokens": self.max_tokens})


class WarmBed(RealBed):
    """A bed of SmolLM2-135M-Instruct after a warm-up with known answers to half of the problems to train on."""

    @property
    def run(self) -> Path:
        """The run of the warm-up."""
        return Path(__file__).parents[2] / "runs" / self.name / "run"

    @property
    def start(self) -> Path:
        """Its weights, with which every arm starts."""
        return self.run / "state" / "weights" / f"{WARM_STEPS:06d}"

    @property
    def start_digest(self) -> str:
        """Digest of weights and optimiser after the warm-up, which must have been made."""
        files = sorted(self.start.rglob("*.safetensors"))
        return f"{zlib.crc32(b''.join(file.read_bytes() for file in files)):08x}"

    @property
    def untrained(self) -> str:
        """The policy after the warm-up."""
        return str(self.run)

    @property
    def source(self) -> str:
        """The bed whose problems these are."""
        return self.name.removesuffix("-warm")

    def problems(self, part: Part, *, seed: int = 0) -> list[Question]:
        """Those of the base class; those to train on are of one half, those of the warm-up of the other."""
        every = super().problems(part, seed=seed)
        return every if part == "test" else [each for each in every if _half(each) == part]

    def arm(self, name: str) -> Arm:
        """An arm with all its options on this bed."""
        given = super().arm(name)
        return replace(given, options={**given.options, "load_checkpoint_path": str(self.start)})


def _half(problem: Question) -> Part:
    """The half of the problems to train on that one belongs to, by its numbers in order of size."""
    numbers = tuple(sorted(map(int, re.findall(r"\d+", problem.question))))
    return "warmup" if zlib.crc32(f"{numbers}".encode()) % 2 else "train"


def _sums() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """All problems of two families with numbers of one digit, with their answers, to train and to test on.

    2 * 5 and 5 * 2 are one step, as are 2 + 5 and 5 + 2.
    """
    from reasoning_gym import create_dataset

    steps: dict[tuple[str, int, int], dict[str, int]] = {}
    for family, options in _FAMILIES.items():
        for row in create_dataset(family, seed=0, size=_NUM_DRAWN, **options):
            left, sign, right = re.search(r"(\d) ([-+*]) (\d)", row["question"]).groups()
            pair = (left, right) if sign == "-" else sorted((left, right))
            steps.setdefault((sign, *pair), {})[f"{row['question']} {_BEHIND}"] = int(row["answer"])
    names = sorted(steps)
    random.Random(0).shuffle(names)
    test: list[tuple[str, int]] = []
    while len(test) < _NUM_SUMS_TO_TEST_ON:
        test += sorted(steps[names.pop()].items())
    return [problem for name in names for problem in sorted(steps[name].items())], test


def bed_named(name: str) -> Bed:
    """A bed.

    Raises:
        ValueError: If there is none of that name.
    """
    if name == "steps":
        return TinyBed(name=name, model="tiny")
    for trap, policy in _TRAPS.items():
        for dial in DIALS:
            if name == f"{trap}-{dial}":
                return TinyBed(name=name, model=str(policy), dial=dial)
    for level in LEVELS:
        if name == f"rare-{level}":
            return TinyBed(name=name, model=str(RARE_POLICY), level=level, total_tokens=RARE_TOKENS)
    if name in REAL + WARM:
        return (RealBed if name in REAL else WarmBed)(
            name=name,
            model=str(model_path()),
            max_tokens=REAL_OPTIONS["max_tokens"],
            total_tokens=REAL_TOKENS,
            learning_rates=REAL_RATES,
        )
    if name == LARGE:
        return LargeBed(
            name=name,
            model=str(cache_folder() / "models" / _LARGE_FILE),
            max_tokens=_LARGE_MAX_TOKENS,
            total_tokens=REAL_TOKENS,
            learning_rates=REAL_RATES,
        )
    raise ValueError(f"unknown bed {name!r}; there are {', '.join(BEDS)}")


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """JSON lines with ``query`` and ``answer``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"query": each.question, "answer": str(each.answer)}) for each in problems)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def part_of(step: Step) -> Part:
    """The part that a step belongs to."""
    left, right = step.left, step.right
    if step.operator != "-":
        left, right = max(left, right), min(left, right)
    digest = zlib.crc32(f"{_SALT} {left}{step.operator}{right}".encode())
    return "test" if digest % 100 < _TEST_STEPS else "train"


def all_problems(kind: str, ranges: Sequence[range], part: Part | None = None) -> Iterator[Problem]:
    """All problems of a kind, of those whose steps are all of one part; told about the first name and thing."""
    for numbers in itertools.product(*ranges):
        problem = tasks.tell(kind, numbers, name=tasks.NAMES[0], item=tasks.ITEMS[0])
        if kind.endswith("_sub") and problem.answer < 1:
            continue
        if part is None or all(part_of(step) == part for step in problem.steps):
            yield problem


def _told(problem: Problem, rng: random.Random) -> Problem:
    """The problem about another person and other things."""
    return tasks.tell(
        problem.kind, problem.numbers, name=rng.choice(tasks.NAMES), item=rng.choice(tasks.ITEMS)
    )


def trap_problem(rng: random.Random) -> Problem:
    """A problem of the text that the trap's policy is raised on, half of them in the trap, of either part."""
    in_trap = rng.random() < 0.5
    kind = rng.choice([kind for kind in _TRAP_RANGES if (kind in TRAP_KINDS) == in_trap])
    while True:
        numbers = tuple(rng.choice(each) for each in _TRAP_RANGES[kind])
        problem = tasks.tell(kind, numbers, name=rng.choice(tasks.NAMES), item=rng.choice(tasks.ITEMS))
        if problem.answer >= 1:
            return problem


def trap_solution(problem: Problem) -> str:
    """The solution that stops after the first step."""
    return tasks.solution_text(problem.steps[:1])


def is_trap(problem: Problem) -> bool:
    """Whether most answers of the trap's policy are wrong."""
    return problem.kind in TRAP_KINDS


def is_blind(problem: Problem) -> bool:
    """Whether it does not see as a critic that they are."""
    return is_trap(problem) and problem.numbers[2] <= LARGEST_UNSEEN
