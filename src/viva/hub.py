"""Errors of the Hugging Face hub with their remedies, and names with a revision."""

import logging
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

TELL_AFTER_S = 5.0
"""Seconds of waiting before a warning says what is waited for."""
_ANSWER_S = 15.0
"""Seconds that the hub may take for its first answer."""


def pinned(name: str, revision: str | None) -> str:
    """A hub name as the engine takes it: ``NAME``, or ``NAME@REVISION`` for a branch, a tag or a commit."""
    return name if revision is None else f"{name}@{revision}"


def split_revision(name: str) -> tuple[str, str | None]:
    """The name and revision that `pinned` joined; a local folder has no revision, whatever its name."""
    if os.path.isdir(name):
        return name, None
    repository, at, revision = name.partition("@")
    return repository, revision if at else None


@contextmanager
def hub_errors(name: str, *, option: str) -> Generator[None, None, None]:
    """Turn errors of looking something up on the hub into a `ValueError`; all others pass through.

    The name is that of a model or a data set, `option` what the user gave it to, like ``model_name``.

    Raises:
        ValueError: It is gated, unknown or private, not in the cache while the hub must not be asked, or the hub
            cannot be reached.
    """
    try:
        with hub_access(name):
            yield
    except (OSError, ValueError) as error:
        message = hub_problem(error, name=name, option=option)
        if message is None:
            raise
        raise ValueError(message) from error


@contextmanager
def telling_wait(what: str, limit_s: float) -> Generator[None, None, None]:
    """Log a warning, which Python shows on the error stream, if waiting for this takes more than some seconds."""
    text = f"still waiting for {what}, for {limit_s:.0f} s at most"
    timer = threading.Timer(TELL_AFTER_S, logging.getLogger(__name__).warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def hub_access(name: str) -> Generator[None, None, None]:
    """Ask the hub for a model or a data set only if it can be reached; else the cache alone, at once.

    By themselves the libraries ask a hub that is not there again and again, for a minute, and wait without an end for
    one that takes a connection and says nothing. What lies in a local path needs no hub.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or not _is_hub_name(name) or _is_reached(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_hub_name(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)


_reached: set[str] = set()


def _is_reached(endpoint: str) -> bool:
    """Whether anybody answers there, whatever the answer is; asked until somebody did."""
    import httpx
    from huggingface_hub import get_session

    if endpoint in _reached:
        return True
    with telling_wait(f"an answer of the hub at {endpoint}", _ANSWER_S):
        try:
            get_session().head(endpoint, timeout=_ANSWER_S, follow_redirects=False)
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
    _reached.add(endpoint)
    return True


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it; ``transformers`` and ``datasets`` wrap the hub's own."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def hub_problem(error: BaseException, *, name: str, option: str) -> str | None:
    """A hub error in one sentence with its remedy, see `hub_errors`; ``None`` if it has to do with something else."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    errors = list(_chain(error))

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(error, kinds) for error in errors)

    what = f"{option}={name}"
    if among(hub.GatedRepoError):
        return (
            f"{what} is gated: its owners give access on request. Ask for it on the page of {name} on the hub, then "
            "log in with 'hf auth login' or set HF_TOKEN to a token of the account that was given access."
        )
    if among(hub.RevisionNotFoundError):
        return f"{what} has no such revision on the hub; its branches and tags are on its page there."
    if among(hub.RepositoryNotFoundError):
        return (
            f"{what} is not on the hub, or it is private. Check the spelling, give the path of a local folder, or, for "
            "a private one, log in with 'hf auth login' or set HF_TOKEN."
        )
    unreached = among(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError)
    if unreached and constants.HF_HUB_OFFLINE:
        return (
            f"{what} is not in the local cache, and HF_HUB_OFFLINE forbids to ask the hub. Fetch it once where there "
            "is a network, unset HF_HUB_OFFLINE, or give the path of a local folder."
        )
    if unreached or among(httpx.ConnectError, httpx.TimeoutException):
        return (
            f"{what} is not in the local cache, and the hub cannot be reached. Check the network to "
            f"{constants.ENDPOINT}, or give the path of a local folder."
        )
    return None
