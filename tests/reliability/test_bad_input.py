"""Bad input gives one message that says what to do, before anything is computed, and touches nothing."""

import os
import random
import re

import pytest
from bad_input import CASES
from bad_world import build_world, run_command

from viva.engine.core import Core
from viva.engine.sampling_client import LocalSamplingClient
from viva.engine.training_client import LocalTrainingClient
from viva.run.files import LOCK

SEED = 8
LONGEST = 1200
COMPUTING = (
    (LocalSamplingClient, ("sample", "compute_logprobs")),
    (LocalTrainingClient, ("forward", "forward_backward", "forward_backward_custom", "optim_step")),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with all that the cases name; the hub is not asked for anything."""
    folder, cache = tmp_path_factory.mktemp("world"), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
        patch.setattr("viva.training.remote._FIRST_PAUSES_S", (0.0,))
        patch.delenv("TINKER_API_KEY", raising=False)
        build_world(folder)
        yield folder


@pytest.fixture
def computed(monkeypatch):
    """What was computed: names of the engine's calls, and of the models that were loaded."""
    calls: list[str] = []

    def spy(owner, name, what):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            calls.append(what)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for owner, names in COMPUTING:
        for name in names:
            spy(owner, name, name)
    spy(Core, "base_model", "load")
    return calls


def tree(folder):
    """Everything in a folder with all that writing changes; the time of the last change cannot be set back.

    Locks are named and emptied again.
    """
    found = {}
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            is_file = name in files and name != LOCK
            found[path] = (status.st_mode, status.st_ino, is_file and (status.st_size, status.st_ctime_ns))
    return found


def faults(case, world, computed, capsys):
    """What is wrong with the answer to a case; empty if nothing is."""
    before = tree(world)
    computed.clear()
    capsys.readouterr()
    try:
        status = run_command(case.arguments)
    except Exception as error:  # noqa: BLE001 - whatever comes out here is what the user would see
        return [f"raised {type(error).__name__}: {error}"]
    told = capsys.readouterr()
    found = [] if status == 2 else [f"status {status}"]
    after = tree(world)
    found += [f"touched {path}" for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
    found += [f"computed {call}" for call in computed if call != "load" or not case.loads]
    errors = [line for line in re.split(r"[\r\n]+", told.err) if re.match(r"(viva[ \w]*: )?error: ", line)]
    found += [] if len(errors) == 1 else [f"{len(errors)} messages"]
    message = told.err[told.err.find("error: ") :]
    found += [f"no {part!r}" for part in case.parts if part not in message]
    found += [f"{len(message)} characters"] if len(message) > LONGEST else []
    found += ["a traceback"] if "Traceback" in told.err + told.out else []
    return [*found, message[:400]] if found else []


def test_bad_input_is_refused_in_words_before_anything_is_computed_or_touched(
    world, computed, capsys, trials, ledger
):
    number = trials(short=len(CASES) // 3, full=len(CASES))
    chosen = random.Random(SEED).sample(CASES, number)
    wrong = {case.name: found for case in chosen if (found := faults(case, world, computed, capsys))}
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
    assert len(CASES) >= 260
    assert len({case.arguments for case in CASES}) == len(CASES)
    areas = ", ".join(f"{sum(case.area == area for case in chosen)} {area}" for area in _areas())
    ledger(
        "11 bad input",
        "each bad configuration, prompt file, data set, model and run is refused with status 2 and one message with "
        "its parts; nothing is sampled or trained, and no file is made or changed",
        trials=number,
        seed=SEED if number < len(CASES) else None,
        figures=areas,
    )


def _areas():
    return dict.fromkeys(case.area for case in CASES)


@pytest.mark.parametrize(
    ("name", "sabotage", "fault"),
    [
        ("viva.recipes.plan._check", lambda config: None, "status 0"),
        (
            "viva.recipes.plan._check",
            lambda config: (_ for _ in ()).throw(ValueError("wrong")),
            "no 'eval_every",
        ),
        (
            "viva.recipes.plan._check",
            lambda config: (_ for _ in ()).throw(KeyError("wrong")),
            "raised KeyError",
        ),
    ],
)
def test_the_check_of_bad_input_can_fail(world, computed, capsys, monkeypatch, name, sabotage, fault):
    case = next(case for case in CASES if "eval_every=-1" in case.arguments)
    assert faults(case, world, computed, capsys) == []
    monkeypatch.setattr(name, sabotage)
    found = faults(case, world, computed, capsys)
    assert any(each.startswith(fault) for each in found)
    for path in sorted((world / "new").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
