"""Nothing that a run writes or says holds a key."""

import os
import re

__all__ = ["KEY_VARIABLE", "without_secrets"]

KEY_VARIABLE = "TINKER_API_KEY"
"""Where the key of hosted Tinker is."""

_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_HIDDEN = "***"
_SHORTEST_KEY = 8
"""Shorter ones are no keys, and stand in harmless text."""


def without_secrets(text: str) -> str:
    """The text without the key in the environment and without user names and passwords in addresses."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) >= _SHORTEST_KEY:
        text = text.replace(key, _HIDDEN)
    return _USER_INFO.sub(f"{_HIDDEN}@", text)
