"""Prompts of a data set on the Hugging Face hub, or of one in a local folder."""

import os
from array import array
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from viva.conversation.messages import did_you_mean, listed
from viva.hub import hub_access, hub_problem, pinned
from viva.recipes.config import DataOptions
from viva.training.data import LazyPrompts, PromptItem, item_digest, prompt_item, unchanged

_SAVED_MARKERS = ("dataset_dict.json", "state.json")  # written by `datasets` when it saves to a folder
_MOST_FILES = 20_000
"""In a local folder of data."""
_FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


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
            f"data set {name} has no split {split!r}; it has {listed(splits)}. "
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
                f"data set {name} has no column {column!r}; it has {listed(columns)}."
                f"{did_you_mean(column, columns)} Set {option}."
            )

    def item(index: int, row: Mapping[str, Any]) -> PromptItem:
        return prompt_item(row[asked], row[known] if known else None, asked, f"{name} {split}[{index}]")

    digests = array("Q", (item_digest(item(index, row)) for index, row in enumerate(islice(rows, limit))))
    return unchanged(lambda index: item(index, rows[index]), digests, name)
