"""Every file of a run cut short or with a bit turned, at every byte: what goes on is right, or it is told and refused.

Two questions to each damage. Which checkpoint is taken, and is what was loaded what was saved? And, for a part of them:
does the run that goes on from the damaged folder end equal to the bit?
"""

import asyncio
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk_cases import outcome, server, tree
from disk_run import load

from viva.run.checkpoints import Checkpoints
from viva.run.folder import prepare_run_folder

SEED = 20261122
EVERY_BYTE = 4096
"""Files up to this size are damaged at every byte, longer ones at 500 places."""
LOGS = ("metrics.jsonl", "transcripts.jsonl", "tokens.jsonl")
CONFIG = {"seed": 1, "name": "disk"}


@pytest.fixture(scope="module")
def run():
    return server()


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    operations = run(folder)["operations"]
    return outcome(folder), operations


@pytest.fixture(scope="module")
def killed(run, whole, tmp_path_factory):
    """A run killed in its last step, after two checkpoints: with a journal, and logs that have gone further."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    operations = whole[1]
    last = max(k for k, name in enumerate(operations, 1) if name == "write metrics.jsonl")
    assert run(folder, k=last, fault="killed") == {"killed": True}
    assert [one.next_step for one in Checkpoints(folder).all()] == [2, 4]
    return folder


class Judge:
    """Knows what is right in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = Checkpoints(folder).all()
        self.loaded = {
            one.next_step: self._values(self._load(Checkpoints(folder).resolve(one)))
            for one in self.checkpoints
        }

    def _load(self, path):
        return load(self.folder / "state", path)

    def _values(self, client):
        return np.array(client.logits), np.array(client.moments), client.steps

    def files(self) -> list[str]:
        """Those that a decision reads."""
        states = [name for name in tree(self.folder) if name.startswith("state/")]
        return ["config.json", "checkpoints.jsonl", *LOGS, *states]

    def wrong(self, name: str, place: int) -> str | None:
        """What is wrong with the decision in a folder in which this file is damaged from or at this byte."""
        told: list[str] = []

        async def decide():
            prepared = prepare_run_folder(self.folder, behavior="resume", config=CONFIG)

            async def open_state(path):
                return self._load(path)

            return await prepared.folder.open_newest(open_state, told.append)

        try:
            client, checkpoint = asyncio.run(decide())
        except ValueError as error:
            return None if self._helps(str(error), name) else f"refused without help: {error}"
        except (KeyError, TypeError, AttributeError, UnicodeError) as error:
            return f"a traceback: {error!r}"
        if checkpoint not in self.checkpoints:
            return f"a checkpoint that never was: {checkpoint}"
        expected = self.loaded[checkpoint.next_step]
        if not all(np.array_equal(a, b) for a, b in zip(self._values(client), expected, strict=True)):
            return f"other weights than were saved after {checkpoint.next_step} steps"
        if checkpoint.next_step != 4 and not any(Path(name).name in text for text in told):
            return f"an older checkpoint, and nothing about {name}: {told}"
        if name in LOGS and place < checkpoint.log_sizes[name]:
            return f"{name} is damaged before the end of what is kept of it"
        return None

    def _helps(self, text: str, name: str) -> bool:
        is_named = str(self.folder / name) in text
        return is_named and any(
            way in text for way in ("behavior_if_exists=delete", "from a copy", "another checkpoint")
        )


def places(size: int) -> list[int]:
    if size <= EVERY_BYTE:
        return list(range(size))
    return sorted(random.Random(SEED).sample(range(size), 500))


def damages(path: Path):
    """(byte, content) of the file cut at, and with a bit turned at, every place."""
    content = path.read_bytes()
    draw = random.Random(f"{SEED} {path.name}")
    for place in places(len(content)):
        yield place, content[:place]
        turned = content[place] ^ (1 << draw.randrange(8))
        yield place, content[:place] + bytes([turned]) + content[place + 1 :]


def failures(judge: Judge, name: str, share: float) -> tuple[int, list[str]]:
    """How many damages of a file were tried (a share of all), and what went wrong."""
    path = judge.folder / name
    original = path.read_bytes()
    every = list(damages(path))
    chosen = every if share >= 1 else random.Random(SEED).sample(every, max(4, int(share * len(every))))
    found = []
    try:
        for place, content in chosen:
            path.write_bytes(content)
            problem = judge.wrong(name, place)
            if problem is not None:
                found.append(f"{name}, byte {place} of {len(original)}: {problem}")
    finally:
        path.write_bytes(original)
    return len(chosen), found


def test_no_damage_to_any_byte_of_any_file_is_loaded_in_silence(killed, tmp_path, trials, ledger):
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    judge, before = Judge(folder), tree(folder)
    share = trials(short=0, full=1) or 0.002
    number, found = 0, []
    for name in judge.files():
        tried, wrong = failures(judge, name, share)
        number += tried
        found += wrong
    assert found == []
    assert tree(folder) == before
    ledger(
        "2 disks and torn files",
        "State files cut or with a bit turned at every byte (500 places in those over 4 kB): the newest undamaged "
        "checkpoint is taken and the damage told, or the error names the file and the way out",
        trials=number,
        seed=SEED,
        figures=f"{len(judge.files())} files: configuration, index, logs, and the manifest and tensors of two states",
    )


def test_a_run_that_goes_on_from_damaged_files_ends_equal_or_is_refused_untouched(
    run, whole, killed, tmp_path, trials, ledger
):
    draw = random.Random(SEED)
    names = sorted(tree(killed))
    number = trials(short=13, full=400)
    refused = passed_over = 0
    for trial in range(number):
        name = names[trial % len(names)]
        folder = tmp_path / f"{trial}" / "run"
        shutil.copytree(killed, folder)
        _, content = draw.choice(list(damages(folder / name)))
        (folder / name).write_bytes(content)
        before = tree(folder)
        result = run(folder)
        if result["error"]:
            refused += 1
            assert result["kind"] == "ValueError", result["error"]
            assert Path(name).name in result["error"], result["error"]
            assert tree(folder) == before
        else:
            passed_over += bool(result["told"])
            assert ended(outcome(folder)) == ended(whole[0]), (name, result["told"])
            assert set(outcome(folder)[-1]) <= set(whole[0][-1]), name
    assert refused < number
    ledger(
        "2 disks and torn files",
        "Runs that go on from a folder with a damaged file, the journal among them: they end equal to the bit, or are "
        "refused and nothing is touched",
        trials=number,
        seed=SEED,
        figures=f"{refused} refused, {passed_over} went on from the checkpoint before",
    )


def ended(left):
    """What a run leaves, but for checkpoints before the last: those that were damaged are dropped, or stay so."""
    metrics, texts, checkpoints, states, _ = left
    name = checkpoints[-1][0]
    return metrics, texts, checkpoints[-1], {path: states[path] for path in states if f"/{name}/" in path}


def _unchecked(content, where):
    return {key: value for key, value in content.items() if key != "sha256"}


@pytest.mark.parametrize(
    ("place", "broken", "name"),
    [
        ("viva.run.log.unsealed", _unchecked, "checkpoints.jsonl"),
        ("viva.engine.checkpoint.unsealed", _unchecked, "state/weights/000004/checkpoint.json"),
        ("viva.engine.checkpoint.file_digest", lambda file: "0", "state/weights/000004/state.safetensors"),
        ("viva.run.checkpoints.Checkpoints.check_logs", lambda self, one: None, "tokens.jsonl"),
    ],
)
def test_without_a_check_the_damage_is_seen_by_the_test(killed, tmp_path, monkeypatch, place, broken, name):
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    judge = Judge(folder)
    if place.endswith("_digest"):
        import json

        from viva.model_files import sealed

        for manifest in folder.rglob("checkpoint.json"):
            content = json.loads(manifest.read_text())
            manifest.write_text(json.dumps(sealed(content | {"files": dict.fromkeys(content["files"], "0")})))
    monkeypatch.setattr(place, broken)
    _, found = failures(judge, name, 40 / len(list(damages(folder / name))))
    assert found
