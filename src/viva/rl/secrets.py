"""Nothing that a run writes or says holds a key or a password."""

import base64
import json
import os
import re
import sys
import traceback
from types import TracebackType
from urllib.parse import quote, unquote

__all__ = ["KEY_VARIABLE", "guard_tracebacks", "split_address", "without_secrets"]

KEY_VARIABLE = "TINKER_API_KEY"
"""Where the key of hosted Tinker is."""

_USER_INFO = re.compile(r"(?<=://)[^/\s?#\"'<>]*@")
_PARAMETER = re.compile(r"([?&][\w-]*(?:key|token|secret|password|signature)=)[^&\s\"'<>]+", re.IGNORECASE)
_HEADER = re.compile(
    r"((?:x-api-key|api-key|authorization|cookie)[\"']?\s*[:=,]\s*b?[\"']?(?:bearer |basic )?)[^\s\"',]{8,}",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_HIDDEN = "***"
_SHORTEST_KEY = 8
"""Shorter ones are no keys, and stand in harmless text."""


def without_secrets(text: str) -> str:
    """The text without what must not be told.

    Hidden are the values of environment variables that are named like keys, tokens, secrets or passwords; user names
    and passwords in addresses, and keys in their parameters; and keys in headers.
    """
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):
        if len(value) >= _SHORTEST_KEY and _SECRET_NAME.search(name):
            for spelling in {value, json.dumps(value)[1:-1], quote(value, safe="")}:
                text = text.replace(spelling, _HIDDEN)
    text = _USER_INFO.sub(f"{_HIDDEN}@", text)
    text = _PARAMETER.sub(rf"\1{_HIDDEN}", text)
    return _HEADER.sub(rf"\1{_HIDDEN}", text)


def split_address(address: str) -> tuple[str, dict[str, str]]:
    """An address without user name and password, which HTTP clients put into errors and logs, and a header for them."""
    found = _USER_INFO.search(address)
    if found is None:
        return address, {}
    user_info = unquote(found.group().removesuffix("@"))
    plain = address[: found.start()] + address[found.end() :]
    return plain, {"Authorization": f"Basic {base64.b64encode(user_info.encode()).decode()}"}


def guard_tracebacks() -> None:
    """Let the traceback of an error that ends the process tell no secrets; programs call it when they start."""
    sys.excepthook = _told


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(without_secrets("".join(traceback.format_exception(kind, error, trace))))
