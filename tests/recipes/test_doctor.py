"""`viva doctor` and its page."""

import asyncio
import json
import re
import typing
from functools import partial
from importlib import metadata

import chz
import pytest
from pages import codes, page, tables
from random_models import make_model

import viva.cli
from viva.doctor.bench import Finding
from viva.doctor.examination import FEATURES, PROBES, Report
from viva.doctor.training import FORMULAS
from viva.recipes.config import RecipeConfig
from viva.recipes.doctor import DoctorOptions
from viva.training.remote import watched

PAGE = page("doctor.md")
FIRST = next(iter(PROBES))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", names_labels=False)


def test_the_local_engine_does_everything(model, tmp_path, capsys) -> None:
    options = [f"model_name={model}", "tolerance=0.001", "lora_rank=4", f"report={tmp_path}/found"]
    assert viva.cli.main(["doctor", *options]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert f"tinker {metadata.version('tinker')}" in first
    found = [re.split(r"\s{2,}", line) for line in lines]
    assert [row[:2] for row in found[: len(PROBES)]] == [[name, "yes"] for name in PROBES]
    assert found[len(PROBES) + 2 : -2] == [[name, "yes"] for name in FEATURES]
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["conformant"]
    assert [each["answer"] for each in record["findings"]] == ["yes"] * len(PROBES)
    assert record["features"] == [{"name": name, "missing": []} for name in FEATURES]
    written = (tmp_path / "found.md").read_text()
    assert written.startswith(f"# local: {len(PROBES)} of {len(PROBES)} answers are yes\n")
    assert all(f"| {name} | yes |" in written for name in (FIRST, next(iter(FEATURES))))


def test_a_report_tells_what_is_missing_and_shows_a_servers_text_as_text() -> None:
    findings = [Finding(name=name, answer="yes", detail="") for name in PROBES]
    findings[0] = Finding(name=FIRST, answer="no", detail="| <b>no</b>\n# [x](javascript:0)")
    report = Report(
        engine="the server at x", server="<i>", model="m", settings={"lora_rank": 4}, findings=findings
    )
    assert not report.record()["conformant"]
    assert any(each["missing"] == [f"{FIRST}: no"] for each in report.record()["features"])
    row = next(line for line in report.page().splitlines() if line.startswith(f"| {FIRST} |"))
    assert row == f"| {FIRST} | **no** | \\| \\<b\\>no\\</b\\> # \\[x\\](javascript:0) |"
    assert "server: \\<i\\>;" in report.page()


def test_what_is_not_done_is_told_and_the_exit_code_says_so(model, capsys, monkeypatch) -> None:
    from viva.engine import LocalTrainingClient

    real = LocalTrainingClient.forward

    def forward(self, data, loss_fn, loss_fn_config=None):
        return real(self, data, "importance_sampling" if loss_fn == "dro" else loss_fn, None)

    monkeypatch.setattr(LocalTrainingClient, "forward", forward)
    monkeypatch.delattr(LocalTrainingClient, "save_state")
    assert viva.cli.main(["doctor", f"model_name={model}", "tolerance=0.001", "lora_rank=4"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^value of dro +wrong +asked for loss_fn=dro, the engine answered", out, re.M)
    assert re.search(r"^value of ppo +wrong +asked for loss_fn=ppo with \{'clip_low", out, re.M)
    assert re.search(r"^checkpoints +no +AttributeError", out, re.M)
    assert re.search(r"^loss_fn=dro +no +value of dro: wrong$", out, re.M)
    assert re.search(r"^checkpoints, behavior_if_exists=resume +no +checkpoints: no$", out, re.M)
    assert re.search(r"^all recipes +yes$", out, re.M)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("tolerance=0", "tolerance and timeout_s must be positive"),
        ("lora_rank=-1", "lora_rank must be 0 or more; got -1"),
        ("model_name=/no/such", "is not a folder"),
        ("report=/no/such/found", "must lie in a folder that there is"),
    ],
)
def test_mistakes_are_refused(option, complaint, capsys) -> None:
    assert viva.cli.main(["doctor", option]) == 2
    assert complaint in capsys.readouterr().err


def test_a_server_that_is_gone_ends_the_questions(capsys, monkeypatch) -> None:
    class Service:
        async def create_lora_training_client(self, *_, **__):
            await asyncio.Event().wait()

        async def close(self, status):
            told.append(status)

    told = []
    monkeypatch.setattr("viva.training.service.make_service", lambda *_, **__: Service())
    monkeypatch.setattr("viva.training.service.watched", partial(watched, limit_s=0.0, every_s=0.01))
    assert viva.cli.main(["doctor", "base_url=http://127.0.0.1:9", "model_name=some/model"]) == 2
    assert "the server at http://127.0.0.1:9 has been out of reach" in capsys.readouterr().err
    assert told == ["interrupted"]


def test_every_precision_of_the_engine_can_be_examined() -> None:
    kinds = [typing.get_type_hints(options)["precision"] for options in (DoctorOptions, RecipeConfig)]
    assert kinds[0] == kinds[1]


def test_every_option_and_probe_is_documented() -> None:
    rows = [row for table in tables(PAGE, "option") for row in table]
    assert {codes(row[0])[0]: codes(row[1])[0] for row in rows} == {
        name: str(value) for name, value in chz.asdict(DoctorOptions()).items()
    }
    named = [name for table in tables(PAGE, "probe") for row in table for name in codes(row[0])]
    losses = {name.replace("<loss>", loss) for name in named for loss in FORMULAS if "<loss>" in name}
    assert losses | {name for name in named if "<loss>" not in name} == set(PROBES)
