"""How a run ends: one exit code and one stream for each way."""

import asyncio
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import tinker

from viva.recipes import loop
from viva.recipes.common import exit_code
from viva.recipes.conversation_preference_rl import Config
from viva.recipes.loop import run_recipe
from viva.recipes.plan import BatchUnit
from viva.training.loop import AllGroupsFailedError
from viva.training.remote import EngineLostError, watched
from viva.training.service import EngineConfig

TRAINING = SimpleNamespace(config=SimpleNamespace(update=SimpleNamespace(learning_rate=1e-4)))


class Order(tuple):
    """Three steps."""

    groups_per_batch = 2
    items = (1, 2)
    num_passes = 1.5


async def passes(*_, **__):
    pass


def raises(error):
    def raise_it(*_):
        raise error

    return raise_it


class Folder:
    """Keeps how it is closed."""

    def __init__(self, checkpoints=None):
        self.checkpoints = checkpoints
        self.closed = []

    def close(self, **options):
        self.closed.append(options)


class Service:
    """Keeps how its session ends."""

    def __init__(self):
        self.endings = []

    async def close(self, status):
        self.endings.append(status)


def open_parts(**parts):
    return SimpleNamespace(**({"trackers": (), "folder": Folder(), "service": Service()} | parts))


@pytest.fixture
def ends(monkeypatch):
    """Runs a recipe whose parts do what a test says; the exit code."""
    plan = SimpleNamespace(
        config=SimpleNamespace(
            model_name="m",
            loss_fn="importance_sampling",
            loss_fn_config=None,
            temperature=1.0,
            kl_penalty_coef=0.0,
            max_steps=3,
        ),
        model="m",
        log_path="runs/x",
        engine=EngineConfig(),
        trackers=(),
        order=Order((0, 1, 2)),
        test=(),
        summary="3 agents x 5 rounds",
        unit=BatchUnit(samples=3),
    )

    async def end(*, make_plan=None, open_run=None, train=None, received=None, engine=None):
        plan.engine = engine or EngineConfig()

        async def opened(options, check):
            given = (open_run or (lambda _: open_parts()))(options)
            if check is not None:
                await check(given.service, given.client)
            return given

        async def built(plan, opened):
            return TRAINING

        async def trained(training):
            return (train or (lambda _: True))(training)

        def finished(training, *, model, is_complete):
            training.interrupts = SimpleNamespace(received=received)

        monkeypatch.setattr(loop, "open_run", opened)
        monkeypatch.setattr(loop, "train", trained)
        monkeypatch.setattr(loop, "finish_run", finished)
        config = SimpleNamespace(
            **vars(plan.config), make_plan=make_plan or (lambda: plan), build_training=built
        )
        return await exit_code(run_recipe(config))

    return end


async def test_a_complete_run_ends_with_0_and_introduces_itself(ends, capsys):
    assert await ends() == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.startswith("m: 3 steps of 2 conversations, 3 agents x 5 rounds; 2 prompts (1.5 passes)")


@pytest.mark.parametrize("error", [ValueError("seed is wrong"), OSError("seed is wrong")])
async def test_a_mistake_in_the_options_ends_with_2_on_the_error_stream(ends, capsys, error):
    assert await ends(make_plan=raises(error)) == 2
    assert capsys.readouterr() == ("", "error: seed is wrong\n")


@pytest.mark.parametrize(
    "error", [ValueError("no such model"), OSError("no such model"), tinker.TinkerError("no such model")]
)
async def test_an_engine_that_cannot_be_opened_ends_with_2_on_the_error_stream(ends, capsys, error):
    assert await ends(open_run=raises(error)) == 2
    assert capsys.readouterr() == ("", "error: no such model\n")


async def test_a_run_that_failed_ends_with_1_on_the_error_stream(ends, capsys):
    assert await ends(train=raises(AllGroupsFailedError("all groups failed"))) == 1
    assert capsys.readouterr().err == "error: all groups failed\n"


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ([SimpleNamespace(next_step=20)], "The state after 20 steps is saved: go on with the same command"),
        ([], "Nothing was saved yet"),
    ],
)
@pytest.mark.parametrize("error", [EngineLostError("gone."), tinker.TinkerError("gone.")])
async def test_a_run_whose_engine_is_lost_ends_with_1_and_says_how_to_go_on(
    ends, capsys, monkeypatch, error, saved, told
):
    checkpoints = SimpleNamespace(latest=lambda: saved[-1] if saved else None)
    opened = open_parts(folder=Folder(checkpoints), client=None)
    monkeypatch.setattr("viva.doctor.examination.check_engine", passes)
    remote = EngineConfig(engine="remote")
    assert await ends(open_run=lambda _: opened, train=raises(error), engine=remote) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert f"gone. {told}" in line


async def test_a_disk_that_fails_is_told_with_the_file_and_the_way_out(ends, capsys):
    checkpoints = SimpleNamespace(latest=lambda: SimpleNamespace(next_step=20))
    opened = open_parts(folder=Folder(checkpoints))
    full = OSError(28, "No space left on device", "runs/x/metrics.jsonl")
    assert await ends(open_run=lambda *_: opened, train=raises(full)) == 1
    told = capsys.readouterr().err
    assert (
        "error: runs/x/metrics.jsonl: No space left on device. Make room there, or see to the disk." in told
    )
    assert "The state after 20 steps is saved" in told

    def damaged():
        raise ValueError("checkpoints.jsonl is damaged")

    opened.folder.checkpoints.latest = damaged
    assert await ends(open_run=lambda *_: opened, train=raises(full)) == 1
    assert "see to the disk. checkpoints.jsonl is damaged" in capsys.readouterr().err


async def test_a_disk_that_fails_before_the_first_step_is_told_likewise(ends, capsys):
    full = OSError(28, "No space left on device", "runs/x/config.json")
    assert await ends(open_run=raises(full)) == 2
    told = capsys.readouterr().err
    assert (
        told == "error: runs/x/config.json: No space left on device. Make room there, or see to the disk.\n"
    )


async def test_a_run_whose_engine_is_lost_before_its_first_step_is_refused(ends, capsys, monkeypatch):
    async def gone(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr("viva.doctor.examination.check_engine", gone)
    monkeypatch.setattr("viva.training.service.watched", partial(watched, limit_s=0.0, every_s=0.01))
    opened = open_parts(client=None)
    remote = EngineConfig(engine="remote", base_url="http://127.0.0.1:9")
    assert await asyncio.wait_for(ends(open_run=lambda _: opened, engine=remote), 20) == 2
    assert "error: the server at http://127.0.0.1:9 has been out of reach" in capsys.readouterr().err


async def test_a_run_that_was_stopped_ends_with_128_and_the_signal(ends):
    assert await ends(train=lambda _: False, received=signal.SIGTERM) == 143


async def test_an_error_of_the_program_itself_is_not_hidden(ends):
    with pytest.raises(ZeroDivisionError):
        await ends(train=raises(ZeroDivisionError()))


class Tracker:
    """Keeps what it is closed with, and refuses if it is told to."""

    def __init__(self, codes, error=None):
        self._codes, self._error = codes, error

    def close(self, exit_code):
        self._codes.append(exit_code)
        if self._error:
            raise self._error


@pytest.mark.parametrize(
    ("parts", "code", "ending"),
    [
        ({}, 0, "success"),
        ({"train": raises(AllGroupsFailedError("all groups failed"))}, 1, "errored"),
        ({"train": lambda _: False, "received": signal.SIGTERM}, 143, "interrupted"),
    ],
)
async def test_trackers_folder_and_session_are_closed_by_how_the_run_ended(ends, parts, code, ending):
    codes = []
    opened = open_parts(trackers=(Tracker(codes), Tracker(codes)))
    assert await ends(open_run=lambda _: opened, **parts) == code
    assert codes == [code, code]
    assert len(opened.folder.closed) == 1
    assert opened.service.endings == [ending]


async def test_trackers_of_a_run_that_raises_are_closed_as_failed_though_one_of_them_fails_too(ends):
    codes = []
    opened = open_parts(trackers=(Tracker(codes), Tracker(codes, ZeroDivisionError("tracker"))))
    with pytest.raises(ZeroDivisionError, match="tracker") as raised:
        await ends(open_run=lambda _: opened, train=raises(KeyError("train")))
    assert codes == [1, 1]
    assert len(opened.folder.closed) == 1
    assert opened.service.endings == ["errored"]
    assert isinstance(raised.value.__context__, KeyError)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "131072: 21,845 passes over 2 prompts in 1,041 steps, 17 hours if a step takes a minute"),
        ({"max_steps": 1000}, None),
        ({"num_epochs": 1000}, None),
    ],
)
def test_a_run_without_a_length_says_how_long_it_is_before_the_first_step(options, told, tmp_path, capsys):
    plan = Config(train_prompts=["a", "b"], log_path=str(tmp_path / "run"), **options).make_plan()
    loop._introduce(plan, TRAINING)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(lines) == (told is not None)
    assert told is None or (
        told in lines[0] and "num_epochs=... or max_steps=... makes it shorter" in lines[0]
    )
