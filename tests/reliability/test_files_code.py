"""No file runs code: no pickle is opened, no code of a model's or a data set's folder is run, nothing is connected to.

The proof is what Python reports of itself while malicious files are loaded the way Viva loads such files; and the
sources, in which the calls that could do it do not stand.
"""

import ast
import asyncio
import os
import tomllib
from pathlib import Path

import pytest
import transformers
from malicious_files import cases
from malicious_parts import CODE, SHELL, Case, load_data, load_model, payloads, save_adapter
from packaging.requirements import Requirement
from packaging.version import Version
from random_models import make_model
from watched import MARK, KernelWatch, watching

from viva.engine import LocalServiceClient

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "viva"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """All cases, in a folder that has good ones of everything; what the libraries do once is done."""
    folder = tmp_path_factory.mktemp("world")
    model = make_model(folder / "model", "llama", names_labels=False)
    outside = make_model(folder / "outside", "llama", names_labels=False)
    (outside / "secret.json").write_text('{"secret": 1}')
    client = LocalServiceClient(state_dir=folder / "state", one_run=True).create_lora_training_client(
        str(model), rank=1, seed=0
    )

    async def save():
        return (await client.save_state("good")).path

    state = Path(asyncio.run(save()))
    save_adapter(folder / "adapter", model, state)
    good = folder / "good-data"
    good.mkdir()
    (good / "train.jsonl").write_text('{"prompt": "a"}\n')
    load_data(good)
    load_model(model)
    return folder, list(cases(model, state, folder / "adapter", outside))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder: what a payload leaves behind would lie here."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(f"datasets.config.{name}", tmp_path / "cache" / name)
    return tmp_path


REFUSALS = (ValueError, OSError)
"""What commands answer with a line; anything else is a traceback."""


def load(case: Case, folder: Path):
    """What was seen, and the error."""
    place = folder / "".join(letter if letter.isalnum() else "-" for letter in case.name)
    place.mkdir()
    case.make(place)
    with watching(folder) as seen:
        try:
            case.load(place)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
            return seen, error
    return seen, None


def test_no_malicious_file_runs_code(world, here, trials, ledger):
    folder, every = world
    number = trials(short=26, full=10**9)
    chosen = every[:: max(1, len(every) // number)]
    refused, ran, unlike, wandered = 0, [], [], []
    kernel = KernelWatch(folder / "outside")
    for case in chosen:
        seen, error = load(case, here)
        wandered += [(case.name, place) for place in kernel.opened()]
        if seen.runs:
            ran.append((case.name, seen.runs[:3]))
        if error is not None and not isinstance(error, REFUSALS):
            unlike.append((case.name, repr(error)[:300]))
        refused += error is not None
    kernel.close()
    assert ran == []
    assert unlike == []
    assert wandered == []
    assert not list(here.rglob(MARK))
    assert not list(here.glob("*.jsonl"))
    assert not list(here.parent.glob("*.jsonl"))
    ledger(
        "8 files and code",
        "Malicious files (weights, headers, configurations, tokenizers, templates, data, adapters, states): no pickle "
        "is opened, no foreign code compiled or run, no process, no connection, no file elsewhere",
        trials=len(chosen),
        figures=f"{refused} refused, the others loaded as data",
    )


def test_there_are_more_than_a_hundred_files_with_names_of_their_own(world):
    names = [case.name for case in world[1]]
    assert len(names) == len(set(names)) >= 100


def test_the_watch_sees_what_it_is_for(here, monkeypatch):
    import pickle
    import socket
    import subprocess

    (here / "evil.py").write_text(CODE)
    with watching(here) as seen:
        for _, payload in list(payloads())[:2]:
            pickle.loads(payload)
        exec(compile(CODE, "x", "exec"))
        monkeypatch.syspath_prepend(here)
        __import__("evil")
        subprocess.run(["true"], check=True)
        with socket.socket() as probe, pytest.raises(OSError, match=r".*"):
            probe.connect(("127.0.0.1", 9))
    kinds = {line.split()[0] for line in seen.runs}
    assert kinds >= {
        "pickle.find_class",
        "os.system",
        "compile",
        "exec",
        "subprocess.Popen",
        "socket.connect",
    }
    assert (here / MARK).exists()


def test_without_the_guards_a_model_would_run_code(world, here, monkeypatch):
    """The sabotage: transformers told to trust the folder, as `LOADING` never does."""
    _, every = world
    (case,) = (case for case in every if case.name == "configuration: code of an unknown model")
    monkeypatch.setattr("viva.engine.model.LOADING", {"trust_remote_code": True})
    guarded = transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(
        transformers.AutoConfig,
        "from_pretrained",
        lambda *args, **options: guarded(*args, **options | {"trust_remote_code": True}),
    )
    monkeypatch.setenv("HF_MODULES_CACHE", str(here / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(here / "modules"))
    seen, _ = load(case, here)
    assert any(run.startswith(("exec", "compile", "import")) for run in seen.runs)


_FORBIDDEN = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "imp", "ctypes")
_CALLS = {
    *(
        "torch.load",
        "torch.hub.load",
        "numpy.load",
        "np.load",
        "os.system",
        "os.popen",
        "eval",
        "exec",
        "compile",
    ),
    *(
        "yaml.load",
        "__import__",
        "pandas.read_pickle",
        "torch.jit.load",
        "os.execv",
        "os.execvp",
        "os.posix_spawn",
    ),
}
_KNOWN = {
    ("selfplay/user_code.py", "exec"): "viva protocol check FILE.py: the user's own code, by their own word",
    (
        "conversation/sandbox.py",
        "pickle",
    ): "a tool's function and arguments, from the run to a child that it started",
    ("threads.py", "ctypes"): "numbers for the process's own C library; no file is named",
}


def dangers(source: str, name: str) -> list[str]:
    """Imports and calls in a source that could run what is in a file."""
    rows = []
    for node in ast.walk(ast.parse(source)):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.split(".")[0] in _FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _FORBIDDEN:
            found = [str(node.module)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found = [called] if called in _CALLS else []
            for keyword in node.keywords:
                value = keyword.value
                is_yes = isinstance(value, ast.Constant) and value.value is True
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and is_yes:
                    found.append(f"{keyword.arg}=True")
                if keyword.arg == "weights_only":
                    found.append("weights_only")
            if called.endswith(".from_pretrained") and "PreTrainedTokenizerFast" not in called:
                named = {keyword.arg for keyword in node.keywords}
                if not named & {"trust_remote_code", None}:
                    found.append(f"{called} without trust_remote_code")
        rows += [f"{name}:{node.lineno} {what}" for what in found if (name, what) not in _KNOWN]
    return rows


def test_no_source_can_open_a_pickle_or_run_what_a_file_holds():
    rows = []
    for path in sorted(SRC.rglob("*.py")):
        rows += dangers(path.read_text(encoding="utf-8"), path.relative_to(SRC).as_posix())
    assert rows == []


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from dill import loads", "import torch\ntorch.load('x')", "exec('x')"),
        *("import os\nos.system('x')", "np.load('x', allow_pickle=True)", "f(trust_remote_code=True)"),
        *("AutoModel.from_pretrained('x')", "import subprocess\nsubprocess.run('x', shell=True)"),
    ],
)
def test_the_search_of_the_sources_sees_what_it_is_for(source):
    assert dangers(source, "a.py")


HOLES = {
    "torch": ("2.5.1", "CVE-2025-32434: code in files that are loaded with weights_only"),
    "transformers": ("5.2.999", "CVE-2026-4372: code that config.json names as attention"),
    "datasets": ("3.6.0", "loading scripts, which run code of the data set's repository"),
    "safetensors": ("0.3.999", "before its audit"),
    "starlette": ("0.39.999", "CVE-2024-47874: forms without limits"),
}
"""The last version with a hole that matters here."""


@pytest.mark.parametrize("name", HOLES)
def test_versions_with_known_holes_are_excluded(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    listed = [*project["project"]["dependencies"], *(each for extra in extras for each in extra)]
    (requirement,) = (each for each in map(Requirement, listed) if each.name == name)
    last = Version(HOLES[name][0])
    assert last not in requirement.specifier, HOLES[name][1]
    for file in ("constraints.txt", "constraints-oldest.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line.split("==")[0].lower() == name:
                assert Version(line.split("==")[1]) > last, file


def test_the_canary_is_where_the_hook_looks():
    assert MARK in CODE
    assert SHELL.endswith(MARK)
    assert os.sep not in MARK
