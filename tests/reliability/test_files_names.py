"""Hostile names never leave the run's folder, or the model's: Python's own report of every access is the proof."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from disk_cases import tree
from hostile_names import hostile_names
from random_models import make_model
from view_runs import metrics_row, tokens, transcript, write_lines
from watched import KernelWatch, unwatched, watching

from viva.engine import LocalServiceClient
from viva.engine.checkpoint import MANIFEST, read_checkpoint
from viva.model_files import check_model_folder, check_name, sealed
from viva.recipes.evaluation.target import find_target
from viva.recipes.export import ExportOptions, export_run
from viva.run.folder import prepare_run_folder
from viva.view.app import cookie_name, make_app

REFUSALS = (ValueError, OSError)


class World:
    """A run with one checkpoint, a model, and next to them what is none of theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model", "llama", names_labels=False)
        self.run = folder / "runs" / "run"
        self.outside = folder / "outside"
        (self.outside / "theirs").mkdir(parents=True)
        (self.outside / "secret.json").write_text('{"secret": 1}')
        (self.outside / "theirs" / "notes").write_text("theirs")
        config = {"recipe": "critique_self_play", "model_name": str(self.model), "seed": 1}
        run = prepare_run_folder(self.run, behavior="raise", config=config).open()
        self.service = LocalServiceClient(state_dir=run.state_dir, one_run=True)
        self.client = self.service.create_lora_training_client(str(self.model), rank=1, seed=0)
        write_lines(self.run / "metrics.jsonl", [metrics_row(step, 0.0) for step in range(2)])
        write_lines(self.run / "transcripts.jsonl", [transcript(step, 0) for step in range(2)])
        write_lines(self.run / "tokens.jsonl", [tokens(0, 0)])
        asyncio.run(run.checkpoints.save(self.client, next_step=2, log_sizes=run.log.sizes()))
        self.state = Path(run.checkpoints.resolve(run.checkpoints.latest()))
        self.names = hostile_names(str(self.outside))
        (self.run / "link").symlink_to(self.outside)
        (self.run / "state" / "weights" / "link").symlink_to(self.outside)
        self.before = tree(self.outside), tree(self.model)

    def strays(self, seen, *allowed: Path) -> list[str]:
        """What was touched of the world besides the run and what is allowed, or that no program has to touch."""
        homes = [os.path.realpath(place) for place in (self.run, *allowed)]
        homes += [
            sys.prefix,
            sys.base_prefix,
            str(Path(__file__).parents[2] / "src"),
            "/proc/self",
            "/dev/null",
        ]
        homes += [
            os.path.realpath(Path(__file__).parents[2] / "tests"),
            "/sys",
            "/proc/meminfo",
            "/proc/stat",
        ]
        scratch = os.path.join(os.path.realpath(tempfile.gettempdir()), "viva-")  # folders of its own making
        return [
            place
            for place in sorted(seen.places)
            if not any(place == home or place.startswith(f"{home}/") for home in homes)
            and not place.startswith(scratch)
        ]

    @contextlib.contextmanager
    def copied(self):
        """A copy of the run that may be spoilt; links are copied as links."""
        place = self.folder / "runs" / "copy"
        with unwatched():
            shutil.copytree(self.run, place, symlinks=True)
        try:
            yield place
        finally:
            with unwatched():
                shutil.rmtree(place)

    @property
    def row(self):
        row = json.loads((self.run / "checkpoints.jsonl").read_text())
        del row["sha256"]
        return row


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def attempt(action, *args, **options):
    """Do it; whether it was refused, which has to be in the proper way."""
    with contextlib.suppress(*REFUSALS):
        action(*args, **options)
        return False
    return True


def save(world, name):
    """Both ways to save."""
    for method in (world.client.save_state, world.client.save_weights_for_sampler):
        attempt(lambda method=method: asyncio.run(_awaited(method(name))))


async def _awaited(future):
    return await future


def load(world, name):
    """A state by its name in the folder of states."""
    path = f"{world.run}/state/weights/{name}"
    if is_own(world, Path(path)):
        attempt(world.service.create_training_client_from_state_with_optimizer, path)
        attempt(world.service.create_sampling_client, path)


def is_own(world, path):
    """A path outside that a user gives is theirs to read; names are what is tried here."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        return path.resolve().is_relative_to(world.run.resolve())
    return True


def delete(world, name):
    """A state by its name in the folder of states, wherever that leads."""
    rest = world.service.create_rest_client()
    attempt(
        lambda: asyncio.run(
            _awaited(rest.delete_checkpoint_from_tinker_path(f"{world.run}/state/weights/{name}"))
        )
    )
    attempt(lambda: asyncio.run(_awaited(rest.delete_checkpoint_from_tinker_path(name))))


def export(world, name):
    """The checkpoint that is asked for, and its line in the index."""
    with world.copied() as run:
        assert attempt(export_run, run, ExportOptions(checkpoint=name, merge=False)) or name == "000002"
        for change in ({"name": name}, {"state_path": name}):
            spoil_index(run, world.row | change)
            attempt(export_run, run, ExportOptions(merge=False))


def evaluate(world, name):
    """The checkpoint that is asked for, and its line in the index: it names the file of the results."""
    with world.copied() as run:
        attempt(find_target, str(run), checkpoint=name)
        spoil_index(run, world.row | {"name": name})
        assert attempt(find_target, str(run), checkpoint=None) or check_name(name)


def resume(world, name):
    """What an index may ask for when a run goes on: states that are loaded, cut or deleted."""
    for change in (
        {"name": name},
        {"state_path": name},
        {"log_sizes": {name: 0}, "log_digests": {name: "0"}},
    ):
        with world.copied() as run:
            spoil_index(run, world.row | change)
            attempt(go_on, run, world.service)


def go_on(run, service):
    async def open_state(path):
        return service.create_training_client_from_state_with_optimizer(path)

    folder = prepare_run_folder(
        run,
        behavior="resume",
        config=json.loads((run / "config.json").read_text()),
        free_options={"sha256"},
    ).open()
    opened = asyncio.run(folder.open_newest(open_state, lambda text: None))
    folder.go_back_to(opened[1] if opened else None, num_steps=9)


def spoil_index(run, row):
    (run / "checkpoints.jsonl").write_text(json.dumps(sealed(row)) + "\n")


def manifest(world, name):
    """Files that a state says it consists of."""
    with world.copied() as run:
        state = run / "state" / "weights" / world.state.name
        content = json.loads((state / MANIFEST).read_text())
        (state / MANIFEST).write_text(json.dumps(sealed(content | {"files": {name: "0"}})))
        assert attempt(read_checkpoint, state)


def view(world, name):
    """Every part of an address that is taken from a request."""
    asyncio.run(ask_for(world, name))


async def ask_for(world, name):
    app = make_app([world.run], token="t")
    text = name.encode("utf-8", "replace").decode()
    quoted = "".join(f"%{byte:02x}" for byte in text.encode())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://127.0.0.1:8123",
        headers={"Cookie": f"{cookie_name('t')}=t"},
    ) as client:
        for path in ("/static/", "/api/", "/", "/api/runs/"):
            answer = await client.get(f"{path}{quoted}")
            assert answer.status_code in (200, 303, 307, 400, 403, 404, 405), answer
        for api in ("conversation", "conversations", "text", "series", "judge"):
            for key in ("step", "run", "ref", "key", "strategy", "page"):
                query = {"step": 0, "group": 0, "run": 0, "ref": "record.question"} | {key: text}
                answer = await client.get(f"/api/{api}", params=query)
                assert answer.status_code in (200, 400, 404), (api, key, answer)
                assert "secret" not in answer.text or "error" in answer.json()


def shard(world, name):
    """Files from which a model takes its weights."""
    index = world.model / "model.safetensors.index.json"
    try:
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}))
        refused = attempt(check_model_folder, world.model)
        assert refused or os.path.basename(name) == name
    finally:
        index.unlink(missing_ok=True)


ACTIONS = (save, load, delete, export, evaluate, resume, manifest, view, shard)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_no_name_leads_out_of_the_folder(world, action, trials, ledger):
    number = trials(short=12, full=200)
    names = world.names[:: len(world.names) // number][:number]
    allowed = [world.folder / "runs" / "copy", world.model]
    kernel = KernelWatch(world.outside)
    for name in names:
        with watching() as seen:
            action(world, name)
        assert world.strays(seen, *allowed) == [], name
        assert kernel.opened() == [], name
    kernel.close()
    assert (tree(world.outside), tree(world.model)) == world.before
    assert read_checkpoint(world.state)
    ledger(
        "8 files and code",
        f"Hostile names to {action.__name__}: nothing outside of the folder is opened, listed, written or deleted",
        trials=len(names),
    )


def test_there_are_two_hundred_names(world):
    assert len(set(world.names)) == 200


def test_the_watches_see_an_access_outside(world):
    kernel = KernelWatch(world.outside)
    with watching() as seen:
        (world.run / "link" / "secret.json").read_text()
        os.listdir(world.run / ".." / ".." / "outside")
    assert f"{world.outside}/secret.json" in kernel.opened()
    kernel.close()
    assert world.strays(seen) == [str(world.outside.resolve()), str(world.outside.resolve() / "secret.json")]
