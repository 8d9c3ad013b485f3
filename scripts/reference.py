"""The reference of the public names, made of their docstrings: writes docs/reference.md, or checks that it is current.

python scripts/reference.py            # writes
python scripts/reference.py --check    # exit code 1 if the page is not what the docstrings say
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
HEAD = """# Reference

The names of `import viva` and `viva.rewards`, from their docstrings (`python scripts/reference.py` writes this page).
They stay as they are; all else may change.
"""


def reference() -> str:
    """The page."""
    import viva

    parts = [HEAD]
    for name in viva.__all__:
        if name not in ("__version__", "rewards"):
            parts += entry(f"viva.{name}", getattr(viva, name))
    parts.append("# viva.rewards\n")
    for name in viva.rewards.__all__:
        found = getattr(viva.rewards, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            parts += entry(f"viva.rewards.{name}", found)
    return "\n".join(parts)


def entry(name: str, value: Any, level: int = 2) -> list[str]:
    """A name with its signature and docstring, and the public members of a class."""
    parts = [f"{'#' * level} {name}\n"]
    is_declared = inspect.isclass(value) and (
        dataclasses.is_dataclass(value) or issubclass(value, BaseException)
    )
    if callable(value) and not is_declared:
        parts.append(f"```python\n{name.rpartition('.')[2]}{signature(value)}\n```\n")
    parts.append(f"```text\n{inspect.getdoc(value)}\n```\n")
    if inspect.isclass(value):
        if dataclasses.is_dataclass(value):
            fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(value))
            parts.append(f"Fields: {fields}\n")
        for member, found in vars(value).items():
            if not member.startswith("_") and (isinstance(found, property) or inspect.isfunction(found)):
                parts += entry(f"{name.rpartition('.')[2]}.{member}", found, 3)
    return parts


def signature(value: Any) -> str:
    """The parameters, one to a line where they do not fit."""
    given = [
        each for each in inspect.signature(value).parameters.values() if each.name not in ("self", "cls")
    ]
    parameters, kinds = [str(each) for each in given], [each.kind for each in given]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"({', '.join(parameters)})"
    return line if len(line) < 90 else "(\n" + "".join(f"    {each},\n" for each in parameters) + ")"


def main(argv: list[str]) -> int:
    """Write or check; the process's exit code."""
    page = reference()
    if "--check" in argv:
        return int(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
