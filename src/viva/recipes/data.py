"""Sources of prompts: a list, a JSONL file or a generator, a Hugging Face data set, or several of them together.

Everything is read once at the start, to find mistakes, but nothing is kept: prompts are read again when their turn
comes, from the file or from the memory-mapped data set.
"""

import hashlib
import json
import math
import os
import textwrap
from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast, overload

from viva.conversation.messages import did_you_mean
from viva.hub import hub_access, hub_problem, pinned
from viva.judging.reasoning_gym import find_family, is_generated
from viva.recipes.config import DataOptions
from viva.recipes.generated import generated_item, held_out_source, load_generated_test
from viva.training.data import PromptItem, PromptsChangedError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LazyPrompts(Sequence[PromptItem]):
    """Several sources one after another: for each its length, and what reads the item at a place."""

    def __init__(self, parts: Sequence[tuple[int, Callable[[int], PromptItem]]]) -> None:
        self._readers = [read for _, read in parts]
        self._ends = list(accumulate(length for length, _ in parts))

    def __len__(self) -> int:
        """Number of prompts."""
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> PromptItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[PromptItem]: ...

    def __getitem__(self, index: int | slice) -> PromptItem | list[PromptItem]:
        """One prompt, read now, or several."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        part = bisect_right(self._ends, place)
        return self._readers[part](place - (self._ends[part - 1] if part else 0))


def item_digest(item: PromptItem) -> int:
    """Eight bytes of a digest of a prompt and its answer."""
    text = repr((item.question, item.answer)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def unchanged(read: Callable[[int], PromptItem], digests: Sequence[int], source: str) -> LazyPrompts:
    """The items of a file or data set, which raise `PromptsChangedError` where one is no longer what it was.

    Args:
        read: Reads the item at a place.
        digests: `item_digest` of every item.
        source: For the message.
    """

    def checked(place: int) -> PromptItem:
        told = (
            f"{source} was changed while the run reads from it: prompt {place + 1} is no longer what it was when the "
            "run began. Put the data back as they were, or give a copy of the new ones to a new run."
        )
        try:
            item = read(place)
        except (ValueError, OSError) as error:
            raise PromptsChangedError(told) from error
        if item_digest(item) != digests[place]:
            raise PromptsChangedError(told)
        return item

    return LazyPrompts([(len(digests), checked)])


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
_SAVED_MARKERS = ("dataset_dict.json", "state.json")  # written by `datasets` when it saves to a folder
_LONGEST_LIST = 300
_MOST_FILES = 20_000
"""In a local folder of data."""
_FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


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
        _check_text(prompt, f"train_prompts[{index}]")


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
    listed = [PromptItem(question=prompt) for prompt in options.train_prompts or ()][:limit]
    room = None if limit is None else limit - len(listed)
    if path is None or room == 0:
        return [listed]
    return [listed, load_prompts_path(path, limit=room)]


def _own_test(options: DataOptions, train: Sequence[Sequence[PromptItem]]) -> list[PromptItem]:
    """Test prompts of the file or generator; generated ones are none of those to train on."""
    path = held_out_source(options)
    if path is None:
        return []
    check_prompts_path("test_prompts_path", path)
    if is_generated(path):
        return load_generated_test(options, path, (item.question for part in train for item in part))
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
        return generated_item(family.problem(place))

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
    record = cast(dict[str, Any], value)
    key = next((key for key in _KEYS if key in record), None)
    if key is None:
        raise ValueError(f"{place}: needs one of the keys {', '.join(_KEYS)}; got {_listed(record)}")
    return _item(record[key], record.get("answer"), key, place)


def _item(question: object, answer: object, key: str, place: str) -> PromptItem:
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{place}: {key!r} must be text that is not empty; got {question!r:.80}")
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, (str, int, float))):
        raise ValueError(f"{place}: the answer must be text or a number; got {answer!r:.80}")
    if (isinstance(answer, float) and not math.isfinite(answer)) or (
        isinstance(answer, str) and not answer.strip()
    ):
        raise ValueError(
            f"{place}: the answer must be text that is not empty or a finite number; got {answer!r:.80}. Leave it out "
            "where none is known"
        )
    _check_text(question, f"{place}: {key!r}")
    _check_text(str(answer), f"{place}: the answer")
    return PromptItem(question=question, answer=None if answer is None else str(answer))


def _check_text(text: str, place: str) -> None:
    """Refuse what no UTF-8 file can hold and no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds half of a surrogate pair, {text[error.start]!r} at character {error.start}; write the "
            "whole character, or leave it out"
        ) from error


def _listed(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(names), _LONGEST_LIST, placeholder=" ...") or "none"


def load_hub(
    options: DataOptions, *, max_train: int | None = None, max_test: int | None = None
) -> tuple[Sequence[PromptItem], list[PromptItem]]:
    """Training and test prompts of a Hugging Face data set; rows beyond the limits are not read.

    Raises:
        ValueError: If the data set, a split or a column cannot be found; the message lists what there is.
    """
    name = options.hf_dataset_name or ""
    if options.hf_dataset_revision is not None and Path(name).expanduser().exists():
        raise ValueError(
            f"hf_dataset_revision={options.hf_dataset_revision} is that of a data set on the hub, but "
            f"hf_dataset_name={name} is a local path; leave hf_dataset_revision out"
        )
    splits = _load_splits(name, options)
    train = LazyPrompts([]) if max_train == 0 else _rows(options, splits, options.hf_train_split, max_train)
    test_split = options.hf_test_split or ("test" if "test" in splits else None)
    test = list(_rows(options, splits, test_split, max_test)) if test_split else []
    return train, test


def _load_splits(name: str, options: DataOptions) -> Mapping[str, Any]:
    import datasets
    from datasets.exceptions import DatasetsError
    from yaml import YAMLError

    path, streaming = Path(name).expanduser(), options.hf_streaming
    try:
        if any((path / marker).is_file() for marker in _SAVED_MARKERS):
            loaded: Any = datasets.load_from_disk(str(path))
        elif path.is_file() and path.suffix in _FILE_FORMATS:
            with _uncounted():
                loaded = datasets.load_dataset(
                    _FILE_FORMATS[path.suffix], data_files=str(path), streaming=streaming
                )
        elif path.is_file():
            raise ValueError(f"it is a file that ends in {path.suffix or path.name!r}")
        else:
            _check_folder(path)
            with hub_access(str(path)):
                loaded = datasets.load_dataset(
                    str(path) if path.exists() else name,
                    options.hf_dataset_name_config,
                    revision=options.hf_dataset_revision,
                    streaming=streaming,
                )
    # StopIteration: a JSON file without a line
    # RuntimeError: a folder with a script, which is not run; YAMLError: a description of something else than data
    except (OSError, ValueError, RuntimeError, YAMLError, DatasetsError, StopIteration) as error:
        raise _unreadable(options, error) from error
    return loaded if isinstance(loaded, Mapping) else {options.hf_train_split: loaded}


def _check_folder(path: Path) -> None:
    """Refuse a folder like ``/``, through all of which `datasets` would look for data."""
    count = 0
    for _, folders, files in os.walk(path):
        count += len(folders) + len(files)
        if count > _MOST_FILES:
            raise ValueError(
                f"the folder holds more than {_MOST_FILES:,} files; name the one of the data set"
            )


@contextmanager
def _uncounted() -> Generator[None]:
    """Read a local file without a message to the hub's counter of downloads."""
    from datasets import config

    before = config.HF_UPDATE_DOWNLOAD_COUNTS
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


def _unreadable(options: DataOptions, error: Exception) -> ValueError:
    given = options.hf_dataset_name or ""
    name, is_local = pinned(given, options.hf_dataset_revision), Path(given).expanduser().exists()
    problem = None if is_local else hub_problem(error, name=name, option="hf_dataset_name")
    return ValueError(
        problem
        or f"hf_dataset_name={name} (config {options.hf_dataset_name_config}) could not be loaded: {_reason(error)}. "
        "Give a name of the hub, or the path of a folder or file with .parquet, .json, .jsonl or .csv data."
    )


def _reason(error: Exception) -> str:
    """The cause that `datasets` hides behind an error of its own."""
    found: BaseException = error
    while found.__cause__ is not None and str(found.__cause__).strip():
        found = found.__cause__
    if isinstance(found, StopIteration) or not str(found).strip():
        return "it holds no rows"
    return str(found).strip().rstrip(".").replace("\n", " ")


def _fetched(options: DataOptions, rows: Any, limit: int | None) -> list[dict[str, Any]]:
    """The first rows of a stream."""
    from datasets.exceptions import DatasetsError

    try:
        return list(islice(rows, limit))
    except (OSError, ValueError, DatasetsError) as error:
        raise _unreadable(options, error) from error


def _rows(options: DataOptions, splits: Mapping[str, Any], split: str, limit: int | None) -> LazyPrompts:
    name = options.hf_dataset_name or ""
    if split not in splits:
        raise ValueError(
            f"data set {name} has no split {split!r}; it has {_listed(splits)}. "
            "Set hf_train_split or hf_test_split."
        )
    rows = splits[split]
    columns: list[str] = list(rows.column_names or ())
    if not hasattr(rows, "__len__"):  # a stream; tables that `datasets` saved are none
        rows = _fetched(options, rows, limit)
        columns = columns or list(rows[0] if rows else ())  # of some kinds of files
    asked, known = options.hf_prompt_column, options.hf_answer_column
    for option, column in (("hf_prompt_column", asked), ("hf_answer_column", known)):
        if column is not None and column not in columns:
            raise ValueError(
                f"data set {name} has no column {column!r}; it has {_listed(columns)}."
                f"{did_you_mean(column, columns)} Set {option}."
            )

    def item(index: int, row: Mapping[str, Any]) -> PromptItem:
        return _item(row[asked], row[known] if known else None, asked, f"{name} {split}[{index}]")

    digests = array("Q", (item_digest(item(index, row)) for index, row in enumerate(islice(rows, limit))))
    return unchanged(lambda index: item(index, rows[index]), digests, name)
