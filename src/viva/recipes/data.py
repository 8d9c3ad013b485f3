"""Sources of prompts: a list, a JSONL file, problems of reasoning-gym, a Hugging Face data set, or several together.

Everything is read once at the start, to find mistakes, but nothing is kept: prompts are read again when their turn
comes, from the file or from the memory-mapped data set.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

from viva.conversation.messages import listed
from viva.judging.reasoning_gym import (
    PACKAGE_VERSION,
    TEST_SEED,
    Family,
    find_family,
    is_generated,
)
from viva.recipes.common import say
from viva.recipes.config import DataOptions
from viva.recipes.hub_data import load_hub
from viva.training.data import LazyPrompts, PromptItem, check_text, item_digest, prompt_item, unchanged

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _file_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Lines that are not blank: number from 1, the byte at which it begins, and text without a byte order mark."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            mark = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
            if line[mark:].strip():
                yield number, start + mark, line[mark:]
            start += len(line)


NO_SOURCE_MESSAGE = """\
Must provide either train_prompts, train_prompts_path, or hf_dataset_name, for example:
  train_prompts_path=/path/to/data.jsonl
  hf_dataset_name=openai/gsm8k
  'train_prompts=["prompt1", "prompt2"]'"""

_KEYS = ("query", "prompt", "text", "question")
_TRIES = 20
"""Test problems that are looked at for one that is used."""


def check_sources(options: DataOptions) -> None:
    """Refuse sources that cannot work, before anything is loaded."""
    if not options.train_prompts and options.train_prompts_path is None and options.hf_dataset_name is None:
        raise ValueError(NO_SOURCE_MESSAGE)
    for name in ("train_prompts_path", "test_prompts_path"):
        path = getattr(options, name)
        if path is not None:
            check_prompts_path(name, path)
    for name in ("max_train_samples", "max_test_samples"):
        limit = getattr(options, name)
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be 1 or more, or left out for all; got {limit}")
        if limit is None and options.hf_dataset_name is not None and options.hf_streaming:
            raise ValueError(
                f"hf_streaming=true fetches the first rows only: set {name} to how many, or leave hf_streaming out"
            )
    _check_template(options.question_template)
    for index, prompt in enumerate(options.train_prompts or ()):
        if not prompt.strip():
            raise ValueError(f"train_prompts[{index}] is empty; every prompt needs text")
        check_text(prompt, f"train_prompts[{index}]")


def _check_template(template: str | None) -> None:
    if template is not None and "{question}" not in template:
        raise ValueError(
            f"question_template must have the place of the prompt in it, as {{question}}; got {template!r:.80}"
        )


def as_asked(item: PromptItem, options: DataOptions) -> PromptItem:
    """The item as it is asked, by ``question_template``."""
    template = options.question_template
    return item if template is None else replace(item, question=template.replace("{question}", item.question))


def check_prompts_path(option: str, path: str) -> None:
    """Refuse a source that is no file, nor a family that can be made; the message begins with the option's name."""
    if is_generated(path):
        find_family(path)
    elif not Path(path).expanduser().is_file():
        raise ValueError(
            f"{option}={path} is not a file; give the path of a JSONL file, or reasoning_gym:FAMILY"
        )


def load_prompts(options: DataOptions) -> tuple[Sequence[PromptItem], list[PromptItem]]:
    """Training and test prompts of all sources, cut to their limits. Training prompts are read when they are asked for.

    Raises:
        ValueError: For anything that cannot be read; the message names file and line, or data set and column.
    """
    check_sources(options)
    train = _own_train(options)
    test = _own_test(options, train)
    limit = options.max_train_samples
    if options.hf_dataset_name is not None:
        room = None if limit is None else limit - sum(map(len, train))
        hub_train, hub_test = load_hub(options, max_train=room, max_test=options.max_test_samples)
        train.append(hub_train)
        test += hub_test

    def reader(part: Sequence[PromptItem]) -> Callable[[int], PromptItem]:
        return lambda index: as_asked(part[index], options)

    parts = [(len(part), reader(part)) for part in train]
    return LazyPrompts(parts), [as_asked(item, options) for item in test[: options.max_test_samples]]


def load_test_prompts(options: DataOptions) -> list[PromptItem]:
    """Test prompts alone, of the file or generator and the data set's test split, the first ``max_test_samples``."""
    _check_template(options.question_template)
    source = held_out_source(options)
    items = _own_test(options, _own_train(options) if source is not None and is_generated(source) else [])
    if options.hf_dataset_name is not None:
        items += load_hub(options, max_train=0, max_test=options.max_test_samples)[1]
    return [as_asked(item, options) for item in items[: options.max_test_samples]]


def _own_train(options: DataOptions) -> list[Sequence[PromptItem]]:
    """Training prompts of the list and of the file or generator."""
    limit, path = options.max_train_samples, options.train_prompts_path
    given = [PromptItem(question=prompt) for prompt in options.train_prompts or ()][:limit]
    room = None if limit is None else limit - len(given)
    if path is None or room == 0:
        return [given]
    return [given, load_prompts_path(path, limit=room)]


def _own_test(options: DataOptions, train: Sequence[Sequence[PromptItem]]) -> list[PromptItem]:
    """Test prompts of the file or generator; generated ones are none of those to train on."""
    path = held_out_source(options)
    if path is None:
        return []
    check_prompts_path("test_prompts_path", path)
    if is_generated(path):
        return _generated_test(options, path, (item.question for part in train for item in part))
    return list(load_jsonl(path, limit=options.max_test_samples))


def load_prompts_path(path: str, *, limit: int | None = None) -> LazyPrompts:
    """Prompts of a JSONL file, or of ``reasoning_gym:FAMILY,option=value,...``.

    Raises:
        ValueError: If there is no such file or family.
    """
    if not is_generated(path):
        return load_jsonl(path, limit=limit)
    family = find_family(path)
    count = len(family) if limit is None else min(limit, len(family))

    def read(place: int) -> PromptItem:
        problem = family.problem(place)
        return PromptItem(question=problem.question, answer=problem.known_answer)

    digests = array("Q", (item_digest(read(place)) for place in range(count)))
    return unchanged(read, digests, family.name)


def load_jsonl(path: str | Path, *, limit: int | None = None) -> LazyPrompts:
    """Prompts of a JSONL file: objects with ``query``, ``prompt``, ``text`` or ``question``, and optionally ``answer``.

    Only the first `limit` are read. The file must stay as it is: a prompt that was changed raises when it is asked for.

    Raises:
        ValueError: If a line is not such an object (the message starts with ``file:line``), the file is not UTF-8
            text, or it holds no prompt.
    """
    path = Path(path).expanduser()
    starts, digests = array("Q"), array("Q")
    try:
        for number, start, line in islice(_file_lines(path), limit):
            digests.append(item_digest(_parse_line(line, f"{path}:{number}")))
            starts.append(start)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; save the file as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not starts:
        raise ValueError(f'{path} holds no prompts; write one object per line, like {{"query": "..."}}')

    def read(place: int) -> PromptItem:
        with path.open("rb") as file:
            file.seek(starts[place])
            return _parse_line(file.readline(), f"{path}, prompt {place + 1}")

    return unchanged(read, digests, str(path))


def _parse_line(line: bytes, place: str) -> PromptItem:
    text = line.decode("utf-8")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON ({error}); write one object per line") from error
    if not isinstance(value, dict):
        raise ValueError(f'{place}: expected an object like {{"query": "..."}}; got {type(value).__name__}')
    record = cast(dict[str, object], value)
    key = next((key for key in _KEYS if key in record), None)
    if key is None:
        raise ValueError(f"{place}: needs one of the keys {', '.join(_KEYS)}; got {listed(record)}")
    return prompt_item(record[key], record.get("answer"), key, place)


def held_out_source(options: DataOptions) -> str | None:
    """The source of the test set but for data sets: the one that is named, else that of training if it is generated."""
    named, train = options.test_prompts_path, options.train_prompts_path
    return train if named is None and train is not None and is_generated(train) else named


def _held_out_family(options: DataOptions, source: str) -> Family:
    """The family of generated test problems: as named, with a seed and a size of its own where there is none."""
    if options.test_prompts_path is None:  # the training problems' options
        family, *rest = find_family(source).name.split(",")
        source = ",".join([family, *(each for each in rest if not each.startswith(("seed=", "size=")))])
    limit = options.max_test_samples
    return find_family(source, seed=TEST_SEED, size=None if limit is None else _TRIES * limit)


def _generated_test(options: DataOptions, source: str, trained: Iterable[str]) -> list[PromptItem]:
    """The first ``max_test_samples`` test problems whose questions differ from each other and from those of training.

    Raises:
        ValueError: If there is no such family, or nothing is left.
    """
    family, limit = _held_out_family(options, source), options.max_test_samples
    taken = {item_digest(PromptItem(question=question)) for question in trained}
    seen: set[int] = set()
    items: list[PromptItem] = []
    looked = repeated = 0
    while looked < len(family) and (limit is None or len(items) < limit):
        problem = family.problem(looked)
        looked += 1
        digest = item_digest(PromptItem(question=problem.question))
        repeated += digest in taken
        if digest not in taken and digest not in seen:
            items.append(PromptItem(question=problem.question, answer=problem.known_answer))
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


def generated_record(options: DataOptions) -> dict[str, object]:
    """Entries of ``config.json`` about generated prompts: the package's version, and sources with all options."""
    train, test = options.train_prompts_path, held_out_source(options)
    record: dict[str, object] = {}
    if train is not None and is_generated(train):
        record["train"] = find_family(train).name
    if test is not None and is_generated(test):
        record["test"] = _held_out_family(options, test).name
    return {"reasoning_gym": {"version": PACKAGE_VERSION, **record}} if record else {}
