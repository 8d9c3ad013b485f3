"""Files of models and runs: safe names, folders written whole, JSON objects with a checksum, a model's contents.

A sealed object holds the SHA-256 of all its other keys, so that no change to it goes unnoticed. It protects against
failing disks and slips of the hand, not against somebody who computes the digest anew. A model's files may ask for no
code, no pickles and no files elsewhere; they have digests, and rotary settings in both spellings.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from viva.hub import split_revision

SEAL = "sha256"
"""The key of the digest."""

GGUF_SOURCE = "gguf.json"
"""In the folder that a GGUF file was unpacked into: the file's name, its digest, and how it cuts text."""
_DIGEST_LENGTH = 64

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LONGEST_NAME = 128
"""Characters; writing needs some more beside it, and file systems take 255 bytes."""
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.I)
"""Names that mean a device on some systems, whatever their ending."""


class MismatchError(ValueError):
    """Something undamaged that belongs to another model or run."""


def check_name(name: str) -> str:
    """Return a checkpoint's name; `ValueError` if it could leave its folder or is not portable."""
    if (
        not _NAME.fullmatch(name)
        or len(name) > _LONGEST_NAME
        or ".." in name
        or name.startswith(".")
        or name.endswith(".")
        or _DEVICES.fullmatch(name)
    ):
        raise ValueError(
            f"{name[: _LONGEST_NAME + 1]!r} is not a checkpoint name. Use letters, digits, '_', '-' and '.', at most "
            f"{_LONGEST_NAME}, without '..', not starting or ending with '.', and no device name such as 'con'."
        )
    return name


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, all links followed, lies in a folder; neither has to exist."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError):  # a NUL, or links that lead in a circle
        return False


@contextmanager
def written_beside(place: Path) -> Generator[Path]:
    """A new folder that takes the place of what is there once it is complete, and forced to the disk."""
    undo_replacing(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    for leftover in place.parent.glob(f".{place.name}~*"):  # of a writer that was killed
        shutil.rmtree(leftover)
    staging = Path(tempfile.mkdtemp(prefix=f".{place.name}~", dir=place.parent))
    try:
        yield staging
        staging.chmod(0o755)  # temporary folders are private; what they become is not
        replace_folder(staging, place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(new: Path, place: Path) -> None:
    """Put a complete folder where another one may be, which then is gone; half a folder is never there."""
    for path in (*new.rglob("*"), new):
        force_to_disk(path)
    try:
        if place.is_symlink():
            place.unlink()
        elif place.exists():
            os.rename(place, _replaced(place))
        os.rename(new, place)
    finally:
        undo_replacing(place)
    force_to_disk(place.parent)
    shutil.rmtree(_replaced(place), ignore_errors=True)


def replace_file(new: Path, place: Path) -> None:
    """Put a complete file where another one may be; half a file is never there."""
    force_to_disk(new)
    os.replace(new, place)
    force_to_disk(place.parent)


def undo_replacing(place: Path) -> None:
    """Put back a folder whose replacement was cut short."""
    if not place.exists() and _replaced(place).exists():
        os.rename(_replaced(place), place)


def _replaced(place: Path) -> Path:
    """The place of a folder until the one that replaces it is in place."""
    return place.parent / f".{place.name}~replaced"


def force_to_disk(path: Path) -> None:
    """Force a file to the disk, or what was made, renamed or removed in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sealed(content: Mapping[str, object]) -> dict[str, object]:
    """A JSON object with its digest as the last key."""
    plain = {key: value for key, value in content.items() if key != SEAL}
    return plain | {SEAL: _seal(plain)}


def unsealed(content: Mapping[str, object], where: str) -> dict[str, Any]:
    """The object without its digest, after comparing (`ValueError`); one that was never sealed is taken as it is."""
    plain = {key: value for key, value in content.items() if key != SEAL}
    if content[SEAL] != _seal(plain) if SEAL in content else _has_seal(plain):
        raise ValueError(
            f"{where} is damaged or was changed: its content is not what its {SEAL} was taken of. Put it back from a "
            f"copy; if you changed it on purpose, remove the entry {SEAL!r}"
        )
    return plain


def _has_seal(content: Mapping[str, object]) -> bool:
    """Whether the seal stands there under another name: its own was damaged."""
    return any(
        isinstance(value, str)
        and len(value) == _DIGEST_LENGTH
        and value == _seal({name: other for name, other in content.items() if name != key})
        for key, value in content.items()
    )


def _seal(plain: Mapping[str, object]) -> str:
    # what JSON gives back is what will be compared: tuples are lists there, and keys are texts
    known: object = json.loads(json.dumps(plain))
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


LOADING = {
    "trust_remote_code": False,
    "use_safetensors": True,
    "attn_implementation": "eager",
}
"""Options with which weights are loaded: no code of the repository, no pickles, and no attention that the
configuration chooses (it may name one to be fetched). Which attention is used is decided afterwards."""

BASE_FILE = "base_model.json"
"""Beside an exported adapter: the digests of its base model."""

_PARTS = {
    "weights": ("model.safetensors", "model.safetensors.index.json"),
    "config": ("config.json", "generation_config.json"),
    "tokenizer": (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.jinja", "chat_template.json"),
    ),
}
_SLOW_TOKENIZERS = (
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)
"""Files of a tokenizer that has no ``tokenizer.json``."""
_NUM_READERS = 4
_known: dict[tuple[str, int, int], str] = {}
"""SHA-256 of files by path, size and time of change."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_model_folder(folder: Path) -> None:
    """Refuse a local folder that is no model, or that would have files read elsewhere.

    Links in it are followed: models are often spread over disks that way.

    Raises:
        ValueError: It has no configuration, its weights are pickles, it is an adapter, or takes weights from elsewhere.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} is a folder without config.json. Give the folder that save_pretrained wrote."
        )
    if (folder / "adapter_config.json").exists():
        # transformers would load the model that the adapter names, wherever that is
        raise ValueError(
            f"{str(folder)!r} holds adapter_config.json besides a model. Give a folder that has the model alone: the "
            "adapter's base model, or the merged one."
        )
    weights = [path for path in folder.iterdir() if path.name.endswith(".safetensors")]
    if not weights and any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ValueError(
            f"{str(folder)!r} has its weights as pickles, which can run code and are not read. Load it where you trust "
            "it, and save it again with transformers' save_pretrained: that writes safetensors."
        )
    for path in folder.glob("*.index.json"):
        shards = read_object(path).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{str(path)!r} has no weight_map; fetch or save the model anew")
        for shard in cast(dict[str, object], shards).values():
            _check_plain(path, shard)
    weights = read_object(folder / "config.json").get("transformers_weights")
    if weights is not None:
        _check_plain(folder / "config.json", weights)
    settings = folder / "tokenizer_config.json"
    for key, value in (read_object(settings) if settings.is_file() else {}).items():
        # names of files at their author's place are common there; what does not exist here is not read
        if (
            key.endswith("_file")
            and isinstance(value, str)
            and "\0" not in value
            and (folder / value).is_file()
        ):
            _check_plain(settings, value)


def model_digests(name: str, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of a model's weights, configuration and tokenizer, which tell it from all others of its shapes.

    Of a name on the hub, which may stand for a known `revision`, the cache is read.

    Returns:
        By part, ``weights``, ``config`` and ``tokenizer``; for a model of the hub its ``commit``, and for one that was
        unpacked from a GGUF file that file's, ``gguf``. Empty where its files are not on this machine. A file is read
        once per process, as long as it stays as it is.
    """
    folder, commit = _folder_of(name, revision)
    if folder is None:
        return {}
    files = {part: _files(folder, part) for part in _PARTS}
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        everything = [file for part in files.values() for file in part]
        digest_by_file = dict(zip(everything, readers.map(_known_digest, everything), strict=True))
    digests = {
        part: hashlib.sha256(
            "".join(f"{digest_by_file[file]}  {file.name}\n" for file in own).encode()
        ).hexdigest()
        for part, own in files.items()
    }
    if commit is not None:
        digests["commit"] = commit
    source = folder / GGUF_SOURCE
    if source.is_file() and (digest := read_object(source).get("sha256")):
        digests["gguf"] = str(digest)
    return digests


def check_base(
    what: str, recorded: Mapping[str, str], name: str, found: Mapping[str, str], *, was: str
) -> bool:
    """Compare a base model's digests with those that were recorded of what belongs to one, known as `was`.

    Returns:
        Whether they could be compared.

    Raises:
        MismatchError: They differ; `what` (a checkpoint, a run or an adapter) belongs to another one.
    """
    common = [part for part in _PARTS if part in recorded and part in found]
    differing = [
        f"{part} (SHA-256 {recorded[part][:12]} there, {found[part][:12]} here)"
        for part in common
        if recorded[part] != found[part]
    ]
    if differing:
        raise MismatchError(
            f"{what} belongs to another base model than {name!r}, which differs in its {' and '.join(differing)}. "
            f"Give the model that it was trained on, which was {was!r}, or put that model's files back."
        )
    return bool(common)


def _folder_of(name: str, revision: str | None) -> tuple[Path | None, str | None]:
    """The folder of a model's files, and its commit."""
    if os.path.isdir(name):
        return Path(name), None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, named = split_revision(name)
    try:
        config = try_to_load_from_cache(repository, "config.json", revision=revision or named)
    except HFValidationError:  # neither a folder nor a name
        return None, None
    if not isinstance(config, str):
        return None, None
    return Path(config).parent, Path(config).parent.name


def _files(folder: Path, part: str) -> list[Path]:
    """Files of a part, by name."""
    names = set(_PARTS[part])
    if part == "weights" and not (folder / "model.safetensors").is_file():
        names |= {path.name for path in folder.glob("*.safetensors")}
    if part == "tokenizer" and not (folder / "tokenizer.json").is_file():
        names |= set(_SLOW_TOKENIZERS)
    return [folder / name for name in sorted(names) if (folder / name).is_file()]


def _known_digest(file: Path) -> str:
    stat = file.stat()
    key = os.path.realpath(file), stat.st_size, stat.st_mtime_ns
    if key not in _known:
        _known[key] = file_digest(file)
    return _known[key]


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_object(file: Path, remedy: str = "fetch or save the model anew") -> dict[str, Any]:
    """The JSON object that a file holds; a `ValueError` names the file and the remedy."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}; {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: it must hold an object; {remedy}")
    return content


def _check_plain(file: Path, name: object) -> None:
    """Refuse anything but the name of a file beside the one that names it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or os.path.basename(name) != name:
        raise ValueError(
            f"{str(file)!r} would have {name!r} read; it may name files beside it only. Fetch or save the model anew."
        )


_FULL, _SLIDING = "full_attention", "sliding_attention"
_APART = ("rope_theta", "partial_rotary_factor")
"""Settings that version 4 keeps beside ``rope_scaling``."""


def spell_rotary_twice(folder: Path) -> None:
    """Add the spelling of version 4 to the ``config.json`` that version 5 has written."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    parameters = config.get("rope_parameters") or {}
    # Gemma 3 has other settings in sliding layers, which version 4 knows by a name of their own
    full = parameters.get(_FULL) or parameters
    if _SLIDING in parameters:
        config["rope_local_base_freq"] = parameters[_SLIDING].get("rope_theta")
    if "rope_theta" not in full:
        return
    scaling = {key: value for key, value in full.items() if key not in _APART}
    config["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    config |= {key: full[key] for key in _APART if key in full}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
