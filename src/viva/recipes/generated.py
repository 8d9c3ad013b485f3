"""Prompts of reasoning-gym, `viva.judging.reasoning_gym`: to train on, and others to test on."""

import hashlib
from collections.abc import Iterable
from typing import Any

from viva.judging.reasoning_gym import (
    PACKAGE_VERSION,
    TEST_SEED,
    Family,
    Problem,
    find_family,
    is_generated,
)
from viva.recipes.common import say
from viva.recipes.config import DataOptions
from viva.training.data import PromptItem

_TRIES = 20
"""Test problems that are looked at for one that is used."""


def generated_item(problem: Problem) -> PromptItem:
    """A problem as a prompt, its answer with where it comes from."""
    return PromptItem(question=problem.question, answer=problem.known_answer)


def held_out_source(options: DataOptions) -> str | None:
    """The source of the test set but for data sets: the one that is named, else that of training if it is generated."""
    named, train = options.test_prompts_path, options.train_prompts_path
    return train if named is None and train is not None and is_generated(train) else named


def _question_digest(question: str) -> bytes:
    return hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _held_out_family(options: DataOptions, source: str) -> Family:
    """The family of generated test problems: as named, with a seed and a size of its own where there is none."""
    if options.test_prompts_path is None:  # the training problems' options
        family, *rest = find_family(source).name.split(",")
        source = ",".join([family, *(each for each in rest if not each.startswith(("seed=", "size=")))])
    limit = options.max_test_samples
    return find_family(source, seed=TEST_SEED, size=None if limit is None else _TRIES * limit)


def load_generated_test(options: DataOptions, source: str, trained: Iterable[str]) -> list[PromptItem]:
    """The first ``max_test_samples`` test problems whose questions differ from each other and from those of training.

    Raises:
        ValueError: If there is no such family, or nothing is left.
    """
    family, limit = _held_out_family(options, source), options.max_test_samples
    taken = {_question_digest(question) for question in trained}
    seen: set[bytes] = set()
    items: list[PromptItem] = []
    looked = repeated = 0
    while looked < len(family) and (limit is None or len(items) < limit):
        problem = family.problem(looked)
        looked += 1
        digest = _question_digest(problem.question)
        repeated += digest in taken
        if digest not in taken and digest not in seen:
            items.append(generated_item(problem))
            seen.add(digest)
    if not items:
        raise ValueError(
            f"all {looked} test problems of {family.name} are among the training problems; widen the family's options, "
            "or train on fewer of them (size=...)"
        )
    if dropped := looked - len(items):
        say(
            f"note: {dropped} of {looked} test problems of {family.name} left out: {repeated} are training problems, "
            f"{dropped - repeated} repeat another one; {len(items)} remain"
        )
    return items


def generated_record(options: DataOptions) -> dict[str, Any]:
    """Entries of ``config.json`` about generated prompts: the package's version, and sources with all options."""
    train, test = options.train_prompts_path, held_out_source(options)
    record: dict[str, Any] = {}
    if train is not None and is_generated(train):
        record["train"] = find_family(train).name
    if test is not None and is_generated(test):
        record["test"] = _held_out_family(options, test).name
    return {"reasoning_gym": {"version": PACKAGE_VERSION, **record}} if record else {}
