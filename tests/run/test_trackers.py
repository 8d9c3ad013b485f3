"""Trackers get every step once, whatever was resumed, and are told nothing but options and metrics."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from viva.run.folder import RunFolder, prepare_run_folder
from viva.run.trackers import MEMORY, PACKAGES, TrackerChoice, choose_trackers, open_trackers


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viva.run.trackers.find_spec", lambda name: SimpleNamespace(origin="a file"))


# the option


def test_names_and_projects_are_read_in_their_order(installed) -> None:
    chosen = choose_trackers(["console", "wandb:arguments", "tensorboard", "trackio"])
    assert [(choice.name, choice.project) for choice in chosen] == [
        ("console", "viva"),
        ("wandb", "arguments"),
        ("tensorboard", "viva"),
        ("trackio", "viva"),
    ]


@pytest.mark.parametrize(
    ("texts", "options", "chosen"),
    [
        (["console"], {"wandb_project": "p"}, [("console", "viva", None), ("wandb", "p", None)]),
        (
            ["console"],
            {"wandb_project": "p", "wandb_name": "n"},
            [("console", "viva", None), ("wandb", "p", "n")],
        ),
        (["wandb", "trackio:t"], {"wandb_project": "p"}, [("wandb", "p", None), ("trackio", "t", None)]),
        (["wandb:p"], {"wandb_project": "p", "wandb_name": "n"}, [("wandb", "p", "n")]),
        (["wandb"], {"wandb_name": "n"}, [("wandb", "viva", "n")]),
        ([], {"wandb_project": "p"}, [("wandb", "p", None)]),
    ],
)
def test_project_and_name_of_wandb_are_options_too(installed, texts, options, chosen) -> None:
    found = [(each.name, each.project, each.run_name) for each in choose_trackers(texts, **options)]
    assert found == chosen


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["wandb:a"], {"wandb_project": "b"}, "trackers=wandb:a and wandb_project=b name two projects"),
        (["console"], {"wandb_name": "n"}, "wandb_name=n names a run in .*, but trackers has no wandb: give"),
        ([], {"wandb_project": " "}, "wandb_project must be a name; got ' '"),
        (["wandb"], {"wandb_name": ""}, "wandb_name must be a name; got ''"),
        (["wandb", "wandb:p"], {"wandb_project": "p"}, "trackers names wandb twice"),
    ],
)
def test_contradictions_about_wandb_are_refused(installed, texts, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        choose_trackers(texts, **options)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["tensorbord"], "Did you mean 'tensorboard'"),
        (["jsonl"], "metrics.jsonl in log_path is always written"),
        (["wandb", "wandb:b"], "names wandb twice"),
        (["tensorboard:p"], "a project goes behind trackio or wandb"),
        (["wandb:"], "a project goes behind"),
    ],
)
def test_a_wrong_tracker_is_told_with_what_is_allowed(installed, texts, message) -> None:
    with pytest.raises(ValueError, match=message):
        choose_trackers(texts)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    "spec", [None, SimpleNamespace(origin=None)], ids=["nothing", "a folder of that name"]
)
def test_a_missing_package_is_told_with_the_command(monkeypatch, name, spec) -> None:
    monkeypatch.setattr("viva.run.trackers.find_spec", lambda package: spec)
    with pytest.raises(ValueError, match=rf"not installed: pip install 'viva-rl\[{name}\]'"):
        choose_trackers([name])


def test_the_extras_of_the_package_are_the_trackers() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in PACKAGES:
        assert f'\n{name} = ["{name}>=' in pyproject


# each step once


class Keeper:
    """Stands for wandb and trackio: keeps what it is given under its own id."""

    def __init__(self) -> None:
        self.started: list[dict] = []
        self.logged: dict[str, list[tuple[int, dict]]] = {}
        self.finished = 0
        self.exit_codes: list[int | None] = []

    def init(self, **options):
        self.started.append(options)
        rows = self.logged.setdefault(options.get("id") or options["name"], [])

        def finish(exit_code=None):
            self.finished += 1
            self.exit_codes.append(exit_code)

        return SimpleNamespace(log=lambda metrics, step: rows.append((step, metrics)), finish=finish)


@pytest.fixture(params=["wandb", "trackio"])
def kept(request, monkeypatch) -> tuple[str, Keeper]:
    keeper, module = Keeper(), ModuleType(request.param)
    module.init = keeper.init
    module.Settings = lambda **settings: settings
    module.Error = RuntimeError
    monkeypatch.setitem(sys.modules, request.param, module)
    return request.param, keeper


def a_run(path: Path, *, behavior="resume") -> RunFolder:
    return prepare_run_folder(
        path, behavior=behavior, config={"seed": 1, "base_url": "https://me:key@host/"}
    ).open()


def log(folder: RunFolder, trackers, steps) -> None:
    for step in steps:
        metrics = {"reward/mean": step / 2}
        folder.log.write_step(step, metrics)
        for tracker in trackers:
            tracker(step, metrics)


def close(trackers) -> None:
    for tracker in trackers:
        tracker.close()


def steps_of(keeper: Keeper) -> list[int]:
    (rows,) = keeper.logged.values()
    assert all(metrics == {"reward/mean": step / 2} for step, metrics in rows)
    return [step for step, _ in rows]


def test_a_resumed_run_repeats_no_step(tmp_path, kept) -> None:
    name, keeper = kept
    folder, choices = a_run(tmp_path), [TrackerChoice(name="console"), TrackerChoice(name=name, project="p")]
    log(folder, open_trackers(choices, folder), range(2))
    sizes = folder.log.sizes()
    log(folder, open_trackers(choices, folder, next_step=2), range(2, 5))
    folder.log.cut_back(sizes)  # the run was killed here, and goes on from its checkpoint after two steps
    trackers = open_trackers(choices, folder, next_step=2)
    log(folder, trackers, range(2, 7))
    close(trackers)
    assert steps_of(keeper) == [0, 1, 2, 3, 4, 5, 6]
    assert keeper.finished == 1
    assert all(options["project"] == "p" for options in keeper.started)


def test_a_tracker_that_joins_late_or_missed_steps_catches_up(tmp_path, kept) -> None:
    name, keeper = kept
    folder = a_run(tmp_path)
    log(folder, [], range(3))
    log(folder, open_trackers([TrackerChoice(name=name)], folder, next_step=3), [3])
    folder.log.write_step(4, {"reward/mean": 2.0})  # killed before the tracker got it
    log(folder, open_trackers([TrackerChoice(name=name)], folder, next_step=5), [5])
    assert steps_of(keeper) == [0, 1, 2, 3, 4, 5]


def test_a_run_that_replaces_another_in_its_folder_is_another_run(tmp_path, kept) -> None:
    name, keeper = kept
    for behavior in ("resume", "delete"):
        folder = a_run(tmp_path / "run", behavior=behavior)
        log(folder, open_trackers([TrackerChoice(name=name)], folder), range(2))
    assert len(keeper.logged) == 2
    assert all([step for step, _ in rows] == [0, 1] for rows in keeper.logged.values())


def test_a_run_that_died_before_its_first_step_goes_on_under_its_id(tmp_path, kept) -> None:
    name, keeper = kept
    for _ in range(2):
        open_trackers([TrackerChoice(name=name)], a_run(tmp_path))
    assert len(keeper.started) == 2
    assert len(keeper.logged) == 1


def test_nothing_but_the_options_is_handed_on(tmp_path, kept) -> None:
    name, keeper = kept
    close(open_trackers([TrackerChoice(name=name)], a_run(tmp_path)))
    (options,) = keeper.started
    assert options["config"] == {"seed": 1, "base_url": "https://***@host/"}
    if name == "wandb":
        settings = options["settings"]
        assert (settings["console"], settings["save_code"], settings["x_save_requirements"]) == (
            "off",
            False,
            False,
        )
        assert settings["disable_code"] is settings["disable_git"] is settings["x_disable_meta"] is True
    else:
        assert options["auto_log_gpu"] is options["auto_log_cpu"] is False


def test_a_refusal_of_wandb_says_what_to_do_and_closes_the_others(tmp_path, monkeypatch) -> None:
    keeper = Keeper()
    trackio, wandb = ModuleType("trackio"), ModuleType("wandb")
    trackio.init = keeper.init

    def refuse(**options):
        raise RuntimeError("no API key.")

    wandb.init, wandb.Error, wandb.Settings = refuse, RuntimeError, dict
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with pytest.raises(ValueError, match=r"cannot start: no API key\. Log in with 'wandb login'"):
        open_trackers([TrackerChoice(name="trackio"), TrackerChoice(name="wandb")], a_run(tmp_path))
    assert keeper.finished == 1


def test_wandb_is_told_how_the_run_ended(tmp_path, kept) -> None:
    name, keeper = kept
    for exit_code in (0, 1, 143):
        (tracker,) = open_trackers([TrackerChoice(name=name)], a_run(tmp_path))
        tracker.close(exit_code)
    assert keeper.exit_codes == ([0, 1, 143] if name == "wandb" else [None] * 3)


def test_a_run_has_the_name_that_was_given_or_that_of_its_folder(tmp_path, kept) -> None:
    name, keeper = kept
    for run_name in (None, "first"):
        close(open_trackers([TrackerChoice(name=name, run_name=run_name)], a_run(tmp_path)))
    names = [started["name"] for started in keeper.started]
    assert [text.startswith(start) for text, start in zip(names, (tmp_path.name, "first"), strict=True)] == [
        True
    ] * 2


def test_the_console_alone_leaves_no_file(tmp_path) -> None:
    assert open_trackers([TrackerChoice(name="console")], a_run(tmp_path)) == ()
    assert not (tmp_path / MEMORY).exists()


# the packages themselves


def needs(package: str) -> pytest.MarkDecorator:
    spec = find_spec(package)
    return pytest.mark.skipif(spec is None or spec.origin is None, reason=f"{package} is not installed")


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_step_once(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, choices = a_run(tmp_path), [TrackerChoice(name="tensorboard")]
    trackers = open_trackers(choices, folder)
    log(folder, trackers, range(2))
    sizes = folder.log.sizes()
    log(folder, trackers, range(2, 5))
    folder.log.cut_back(sizes)
    trackers = open_trackers(choices, folder, next_step=2)
    log(folder, trackers, range(2, 6))
    close(trackers)
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert [(event.step, event.value) for event in seen.Scalars("reward/mean")] == [
        (step, step / 2) for step in range(6)
    ]


@pytest.fixture
def writer(monkeypatch) -> list[int | None]:
    """Stands for the package tensorboard: from which step on each writer hides what is there."""
    purged: list[int | None] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            purged.append(purge_step)

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return purged


def test_tensorboard_hides_what_is_repeated_also_of_a_run_without_a_checkpoint(tmp_path, writer) -> None:
    for next_step in (0, 2, None):
        open_trackers([TrackerChoice(name="tensorboard")], a_run(tmp_path), next_step=next_step)
    assert writer == [0, 2, None]


PROGRAM = """
import sys
from pathlib import Path
from viva.run.folder import prepare_run_folder
from viva.run.trackers import choose_trackers, open_trackers

folder = prepare_run_folder(Path(sys.argv[1]), behavior="resume", config={"seed": 1}).open()
first, last = int(sys.argv[3]), int(sys.argv[4])
folder.log.cut_back({})
for step in range(first):
    folder.log.write_step(step, {"reward/mean": step / 2})
trackers = open_trackers(choose_trackers([sys.argv[2]]), folder, next_step=first)
for step in range(first, last):
    folder.log.write_step(step, {"reward/mean": step / 2})
    for tracker in trackers:
        tracker(step, {"reward/mean": step / 2})
for tracker in trackers:
    tracker.close()
"""


def run_twice(folder: Path, tracker: str, **environment: str) -> None:
    """Steps 0 to 3, then, resumed, 2 to 5, each in a process of its own, as these packages leave threads behind."""
    for first, last in ((0, 4), (2, 6)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), tracker, str(first), str(last)],
            env={**os.environ, **environment},
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr


@needs("wandb")
def test_wandb_keeps_a_run_offline(tmp_path) -> None:
    run_twice(tmp_path, "wandb:p", WANDB_MODE="offline", WANDB_SILENT="true")
    parts = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    run_id = json.loads((tmp_path / MEMORY).read_text())["run_id"]
    assert {path.name for path in parts} == {f"run-{run_id}.wandb"}
    text = b"".join(path.read_bytes() for path in parts)
    assert text.count(b"reward/mean") >= 6
    host = os.uname().nodename.encode()
    # each record has a random id of twelve characters, which may contain a short name by chance
    rest = re.sub(rb"\x0c(?!%s)[0-9a-z]{12}" % re.escape(host), b"", text)
    assert len(rest) < len(text)
    assert host not in rest


@needs("trackio")
def test_trackio_keeps_every_step_once(tmp_path) -> None:
    run_twice(tmp_path / "run", "trackio:p", TRACKIO_DIR=str(tmp_path / "trackio"))
    (path,) = (tmp_path / "trackio").glob("p.db")
    with sqlite3.connect(path) as data:
        rows = data.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(step, json.loads(metrics)["reward/mean"]) for step, metrics in rows] == [
        (step, step / 2) for step in range(6)
    ]
