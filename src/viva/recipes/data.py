"""Where prompts come from: a list, a JSONL file, a Hugging Face data set, or several of them together.

Everything is read once at the start, to find mistakes, but nothing is kept: prompts are read again when their turn
comes, from the file or from the memory-mapped data set.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, cast

from viva.engine.hub import hub_problem
from viva.recipes.lazy_prompts import LazyPrompts, file_lines, indexed_lines
from viva.rl.prompts import PromptItem

__all__ = [
    "NO_SOURCE_MESSAGE",
    "HubSource",
    "PromptSources",
    "load_hub",
    "load_jsonl",
    "load_prompts",
    "load_test_prompts",
]

NO_SOURCE_MESSAGE = """\
Must provide either train_prompts, train_prompts_path, or hf_dataset_name, for example:
  train_prompts_path=/path/to/data.jsonl
  hf_dataset_name=openai/gsm8k
  'train_prompts=["prompt1", "prompt2"]'"""

_KEYS = ("query", "prompt", "text", "question")
_SAVED_MARKERS = ("dataset_dict.json", "state.json")  # written by `datasets` when it saves to a folder
_FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A Hugging Face data set: its hub name, or the path of a folder or file."""

    name: str
    config: str | None = None
    prompt_column: str = "query"
    answer_column: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    """``None`` takes the split called ``test`` if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSources:
    """All sources of a run. Training prompts are joined in the order list, file, data set."""

    train_prompts: Sequence[str] | None = None
    train_prompts_path: str | None = None
    test_prompts_path: str | None = None
    hub: HubSource | None = None
    max_train_samples: int | None = None
    """Use only the first so many training prompts of all sources together."""
    max_test_samples: int | None = 100

    def __post_init__(self) -> None:
        """Reject sources that cannot work, before anything is loaded."""
        if not self.train_prompts and self.train_prompts_path is None and self.hub is None:
            raise ValueError(NO_SOURCE_MESSAGE)
        for name in ("train_prompts_path", "test_prompts_path"):
            path = getattr(self, name)
            if path is not None and not Path(path).expanduser().is_file():
                raise ValueError(f"{name}={path} is not a file; give the path of a JSONL file")
        for name in ("max_train_samples", "max_test_samples"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be 1 or more, or left out for all; got {limit}")
        for index, prompt in enumerate(self.train_prompts or ()):
            if not prompt.strip():
                raise ValueError(f"train_prompts[{index}] is empty; every prompt needs text")


def load_prompts(sources: PromptSources) -> tuple[Sequence[PromptItem], list[PromptItem]]:
    """Training and test prompts of all sources, cut to their limits. Training prompts are read when they are asked for.

    Raises:
        ValueError: For anything that cannot be read; the message names file and line, or data set and column.
    """
    limit = sources.max_train_samples
    listed = [PromptItem(question=prompt) for prompt in sources.train_prompts or ()][:limit]
    train: list[Sequence[PromptItem]] = [listed]

    def room() -> int | None:
        return None if limit is None else limit - sum(map(len, train))

    if sources.train_prompts_path is not None and room() != 0:
        train.append(load_jsonl(sources.train_prompts_path, limit=room()))
    test = load_test_prompts(sources.test_prompts_path, None, sources.max_test_samples)
    if sources.hub is not None:
        hub_train, hub_test = load_hub(sources.hub, max_train=room(), max_test=sources.max_test_samples)
        train.append(hub_train)
        test = [*test, *hub_test][: sources.max_test_samples]
    return LazyPrompts([(len(part), part.__getitem__) for part in train]), test


def load_test_prompts(path: str | None, hub: HubSource | None, limit: int | None) -> list[PromptItem]:
    """Test prompts alone, of a JSONL file and the test split of a data set, the first `limit` of them.

    Raises:
        ValueError: For anything that cannot be read.
    """
    items = [] if path is None else list(load_jsonl(path, limit=limit))
    if hub is not None:
        items += load_hub(hub, max_train=0, max_test=limit)[1]
    return items[:limit]


def load_jsonl(path: str | Path, *, limit: int | None = None) -> LazyPrompts:
    """Prompts of a JSONL file: objects with ``query``, ``prompt``, ``text`` or ``question``, and optionally ``answer``.

    Args:
        path: The file. It must stay as it is while prompts are read.
        limit: Read only the first so many.

    Raises:
        ValueError: If a line is not such an object (the message starts with ``file:line``), the file is not UTF-8
            text, or it holds no prompt.
    """
    path = Path(path).expanduser()
    starts = array("Q")
    try:
        for number, start, line in islice(file_lines(path), limit):
            _parse_line(line, f"{path}:{number}")
            starts.append(start)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; save the file as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not starts:
        raise ValueError(f'{path} holds no prompts; write one object per line, like {{"query": "..."}}')
    read = indexed_lines(path, starts)
    return LazyPrompts([(len(starts), lambda place: _parse_line(read(place), f"{path}, prompt {place + 1}"))])


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
        raise ValueError(
            f"{place}: needs one of the keys {', '.join(_KEYS)}; got {', '.join(record) or 'none'}"
        )
    return _item(record[key], record.get("answer"), key, place)


def _item(question: object, answer: object, key: str, place: str) -> PromptItem:
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{place}: {key!r} must be text that is not empty; got {question!r:.80}")
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, (str, int, float))):
        raise ValueError(f"{place}: the answer must be text or a number; got {answer!r:.80}")
    return PromptItem(question=question, answer=None if answer is None else str(answer))


def load_hub(
    source: HubSource, *, max_train: int | None = None, max_test: int | None = None
) -> tuple[Sequence[PromptItem], list[PromptItem]]:
    """Training and test prompts of a Hugging Face data set; rows beyond the limits are not read.

    Raises:
        ValueError: If the data set, a split or a column cannot be found; the message lists what there is.
    """
    splits = _load_splits(source)
    train = _rows(source, splits, source.train_split, max_train)
    test_split = source.test_split or ("test" if "test" in splits else None)
    test = list(_rows(source, splits, test_split, max_test)) if test_split else []
    return train, test


def _load_splits(source: HubSource) -> Mapping[str, Any]:
    import datasets
    from datasets.exceptions import DatasetsError

    path = Path(source.name).expanduser()
    try:
        if any((path / marker).is_file() for marker in _SAVED_MARKERS):
            loaded: Any = datasets.load_from_disk(str(path))
        elif path.is_file() and path.suffix in _FILE_FORMATS:
            loaded = datasets.load_dataset(_FILE_FORMATS[path.suffix], data_files=str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.exists() else source.name, source.config)
    except (OSError, ValueError, DatasetsError) as error:
        problem = None if path.exists() else hub_problem(error, name=source.name, option="hf_dataset_name")
        raise ValueError(
            problem
            or f"hf_dataset_name={source.name} (config {source.config}) could not be loaded: {error}. "
            "Give a name of the hub, or the path of a folder or file with .parquet, .json, .jsonl or .csv data."
        ) from error
    return loaded if isinstance(loaded, Mapping) else {source.train_split: loaded}


def _rows(source: HubSource, splits: Mapping[str, Any], split: str, limit: int | None) -> LazyPrompts:
    if split not in splits:
        raise ValueError(
            f"data set {source.name} has no split {split!r}; it has {', '.join(splits)}. "
            "Set hf_train_split or hf_test_split."
        )
    rows = splits[split]
    columns: list[str] = list(rows.column_names)
    for option, column in (
        ("hf_prompt_column", source.prompt_column),
        ("hf_answer_column", source.answer_column),
    ):
        if column is not None and column not in columns:
            close = get_close_matches(column, columns, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"data set {source.name} has no column {column!r}; it has {', '.join(columns)}.{hint} Set {option}."
            )
    count = len(rows) if limit is None else min(limit, len(rows))

    def item(index: int, row: Mapping[str, Any]) -> PromptItem:
        answer = row[source.answer_column] if source.answer_column else None
        return _item(
            row[source.prompt_column], answer, source.prompt_column, f"{source.name} {split}[{index}]"
        )

    for index, row in enumerate(islice(rows, count)):
        item(index, row)
    return LazyPrompts([(count, lambda index: item(index, rows[index]))])
