"""What the pages, the notebook and the reference say runs, and is so."""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import reference
import viva

ROOT = Path(__file__).parents[1]
ROWS = [
    {
        "query": f"Tom has {n} apples and buys {n + 2} more. How many apples does Tom have?",
        "answer": 2 * n + 2,
    }
    for n in range(2, 6)
]


def cells() -> list[str]:
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


async def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for source in cells():
        # one conversation a step, of few words: what is tried is that the cells work together
        source = source.replace("batch_size=12", "batch_size=3").replace("max_tokens=40", "max_tokens=12")
        code = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(code, names)  # a coroutine where the cell awaits
        if inspect.iscoroutine(made):
            await made
    assert len(names["run"].metrics) >= 3
    assert (tmp_path / "runs" / "quickstart" / "adapter").is_dir()


@pytest.mark.parametrize("page", ["README.md", "docs/environments.md"])
def test_the_pages_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    source = re.findall(r"```python\n(import viva\n.*?)```", text, re.DOTALL)[0]
    source = source.replace("steps=20", "steps=1, batch_size=6").replace(
        "num_agents=3", "num_agents=3, max_tokens=24"
    )
    names: dict[str, Any] = {}
    exec(source, names)
    assert len(names["run"].conversations) >= 2


def test_the_reference_says_what_the_docstrings_say() -> None:
    assert reference.main(["--check"]) == 0, "run python scripts/reference.py"


def test_public_names_are_few_and_documented() -> None:
    assert len(viva.__all__) <= 16
    for name in viva.__all__:
        assert name == "__version__" or inspect.getdoc(getattr(viva, name))
    assert dir(viva) == sorted(viva.__all__)
    with pytest.raises(AttributeError, match="public names"):
        viva.Trainer  # noqa: B018
