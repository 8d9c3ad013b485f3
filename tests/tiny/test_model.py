import importlib.util
import json
from pathlib import Path

import pytest

from viva.tiny import model_path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "builtin_policy.py"


async def test_the_built_in_policy_starts_mediocre_and_speaks_the_protocol() -> None:
    spec = importlib.util.spec_from_file_location("builtin_policy", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    shares = await benchmark.measure(120)
    assert 0.3 <= shares["direct accuracy"] <= 0.62
    assert 0.65 <= shares["judge right, one order"] <= 0.85
    assert shares["replies parsed, round robin"] > 0.95
    assert shares["replies parsed, critique"] > 0.95
    assert shares["votes true, verdict"] > 0.7
    assert shares["right after critique"] > shares["right before critique"]


def test_the_built_in_policy_is_small_and_has_the_architecture_it_says() -> None:
    files = list(model_path().iterdir())
    assert sum(file.stat().st_size for file in files) < 8e6
    assert json.loads((model_path() / "config.json").read_text())["model_type"] == "qwen3"


def test_a_missing_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("viva.tiny.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match=r"python -m build_tiny\.build"):
        model_path()
