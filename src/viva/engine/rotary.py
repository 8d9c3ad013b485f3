"""Rotary settings in a model's ``config.json``, as ``transformers`` 5 and 4 spell them.

Version 5 keeps them in ``rope_parameters``. Version 4 does not know that key, and takes its own defaults for
``rope_theta`` and ``rope_scaling`` where these are missing, without a word.
"""

import json
from pathlib import Path
from typing import Any

__all__ = ["spell_rotary_twice"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_APART = ("rope_theta", "partial_rotary_factor")
"""Settings that version 4 keeps beside ``rope_scaling``."""


def spell_rotary_twice(folder: Path) -> None:
    """Add the spelling of version 4 to the ``config.json`` that version 5 has written."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    parameters: dict[str, Any] = config.get("rope_parameters") or {}
    # Gemma 3 has other settings in sliding layers, which version 4 knows by a name of their own
    full: dict[str, Any] = parameters.get(_FULL) or parameters
    if _SLIDING in parameters:
        config["rope_local_base_freq"] = parameters[_SLIDING].get("rope_theta")
    if "rope_theta" not in full:
        return
    scaling = {key: value for key, value in full.items() if key not in _APART}
    config["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    config |= {key: full[key] for key in _APART if key in full}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
