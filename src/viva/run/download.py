"""The weights of a run on a remote engine, fetched as an adapter in PEFT's format.

Servers give away what was saved for sampling, as an archive. So a state is opened, saved for sampling under a name of
its own, and its archive is read. No name in an archive is used: two files are looked for, and all else is passed over.
"""

import asyncio
import http.client
import tarfile
import tempfile
import urllib.request
import zlib
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from uuid import uuid4

import tinker

from viva.run.clients import ServiceClient, settled
from viva.run.secrets import without_secrets

__all__ = ["fetch_adapter"]

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_LIFETIME_S = 3600
"""Of what is saved for the download, where the server looks at it."""
_ANSWER_S = 300.0
_BLOCK = 1 << 20


async def fetch_adapter(
    service: ServiceClient, state_path: str, folder: Path, *, base_url: str | None
) -> Path:
    """Download the adapter of a saved state.

    Args:
        service: Of the engine that has it.
        state_path: ``tinker://...``, from ``save_state``.
        folder: Gets the adapter's two files.
        base_url: Where the engine is; ``None`` for hosted Tinker.

    Returns:
        The folder.

    Raises:
        ValueError: If the engine does not give its weights away; says what else there is to do.
        TinkerError: If the engine cannot be reached or knows no such state.
    """
    engine: Any = service
    find = getattr(engine.create_rest_client(), "get_checkpoint_archive_url_async", None)
    if find is None:  # newer SDKs know no archives
        return await asyncio.to_thread(_by_cookbook, state_path, folder, base_url)
    client: Any = await settled(service.create_training_client_from_state(state_path))
    saved: Any = await client.save_weights_for_sampler(f"export-{uuid4().hex[:12]}", ttl_seconds=_LIFETIME_S)
    run, _, name = str(saved.path).removeprefix("tinker://").partition("/")
    try:
        # SkyRL leaves the kind out of its paths and its names; Tinker's names have it
        answer: Any = await find(run, name)
    except tinker.APIStatusError as error:
        raise ValueError(_no_archive(state_path, base_url, error)) from error
    url = str(answer.url)
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(
            f"the engine says that the archive is at {without_secrets(url)}, which is no web address"
        )
    try:
        await asyncio.to_thread(_read_archive, url, folder)
    except (OSError, http.client.HTTPException, EOFError, zlib.error, tarfile.TarError) as error:
        told = without_secrets(f"the archive of {state_path} could not be read: {error}. Export again.")
        raise ValueError(told) from error
    return folder


def _read_archive(url: str, folder: Path) -> None:
    """Take the adapter's two files out of an archive, whatever else is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as file:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            _copy(answer, file)
        file.seek(0)
        found: set[str] = set()
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                name = member.name.replace("\\", "/").rpartition("/")[2]
                if name not in (_CONFIG, _TENSORS) or not member.isreg():
                    continue
                if name in found:
                    raise tarfile.ReadError(f"it holds {name} twice")
                content = archive.extractfile(member)
                assert content is not None  # a regular file
                with (folder / name).open("xb") as target:
                    _copy(content, target)
                found.add(name)
    if len(found) < 2:
        raise tarfile.ReadError(f"it holds no {' and '.join(sorted({_CONFIG, _TENSORS} - found))}")


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while block := source.read(_BLOCK):
        target.write(block)


def _by_cookbook(state_path: str, folder: Path, base_url: str | None) -> Path:
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import WeightsDownloadError

    try:
        weights.download(tinker_path=state_path, output_dir=str(folder), base_url=base_url)
    except WeightsDownloadError as error:
        raise ValueError(_no_archive(state_path, base_url, error)) from error
    missing = [name for name in (_CONFIG, _TENSORS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"what was downloaded of {state_path} holds no {' and '.join(missing)}")
    return folder


def _no_archive(state_path: str, base_url: str | None, error: Exception) -> str:
    where = (
        "see your runs on its web page"
        if base_url is None
        else "copy them from where it keeps its checkpoints (a SkyRL server: --checkpoints-base), or try the SDK that "
        "it was made for"
    )
    return without_secrets(f"the engine does not give the weights of {state_path} away ({error}); {where}.")
