"""The speed benchmark's pure parts, its sides' protocol, and that its page is what its results say."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import render
from drafts import tokens_a_step
from hypothesis import given
from hypothesis import strategies as st
from model import save_model
from rows import ROWS, Ratio, Row, Side
from work import SHAPES, SIZES, prompts, words
from workers import SideFailedError, Worker, rotated, take_turns

from run import PAGE, PYTHONS, RESULTS, parse
from viva.judging.comparison import JUDGE_SYSTEM_PROMPT
from viva.selfplay.round_robin import CONVERSATION_SYSTEM_PROMPT
from viva.tiny import model_path

FOLDER = Path(__file__).parents[1] / "benchmarks" / "performance"
PATH = {"PYTHONPATH": str(FOLDER)}

WORKS = ["long", "balanced", "distinct", "ragged", "conversation", "conversation-3x5", "judge", "limit"]
WORKS += ["orchestration", "busy", "view"]

ECHO = """
from channel import serve
serve(lambda settings: lambda number: {"cost": settings["base"] + number, "pid": 0 / (number < settings["until"])}, ())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "1m")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_every_work_has_a_row_and_every_row_a_script_for_each_side() -> None:
    steps = [f"{shape}-{model}" for model in ("1m", "85m") for shape in SHAPES]
    real = ["batches", "batches-fast", "batches-256", "conversation", "conversation-bf16", "critique"]
    real += ["critique-bf16", "long", "balanced", "limit"]
    assert list(ROWS) == WORKS + steps + [f"{name}-smollm2" for name in real]
    for row in ROWS.values():
        assert row.model in SIZES
        for side in row.sides.values():
            assert (FOLDER / side.script).exists()
            assert side.environment in PYTHONS
        named = {label for ratio in row.ratios for label in (ratio.over, ratio.under)}
        assert named | {figure.side for figure in row.figures} == set(row.sides)


def test_a_row_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(SystemExit, match=r"rows must be of long, .*; got lnog"):
        parse(["rows=long,lnog"])
    with pytest.raises(SystemExit, match="options are rows=, repeats="):
        parse(["repeat=3"])
    with pytest.raises(SystemExit, match=r"sides must be parts of viva, .* / generated verdicts; got TLR"):
        parse(["rows=judge", "sides=viva/TLR"])


@pytest.mark.parametrize(
    ("given", "is_recorded"),
    [([], True), (["sides=viva"], False), (["sides=viva", "record=yes"], True), (["record=no"], False)],
)
def test_some_sides_are_recorded_where_that_is_asked_for_and_other_models_never(
    given: list[str], is_recorded: bool
) -> None:
    assert parse(["rows=limit", *given]).record == is_recorded
    assert not parse(["rows=limit", "model=1m", *given]).record


def test_the_run_that_is_viewed_lies_where_it_is_removed_afterwards(tmp_path: Path) -> None:
    from side_view import make

    make({"model": str(tmp_path), "conversations": 10})
    assert len((tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize(
    ("engine", "system"), [("viva", "round_robin"), ("viva", "critique"), ("plain", "round_robin")]
)
def test_a_step_of_conversations_runs(engine: str, system: str) -> None:
    from side_conversation import make

    play = make(
        {"engine": engine, "system": system, "model": str(model_path()), "precision": "float32", "agents": 3}
        | {"rounds": 1, "conversations": 2, "max_tokens": 4, "verdict": 4, "micro_batch": 2}
    )
    measured = play(1)
    assert measured["cost"] == pytest.approx((measured["rollouts"] + measured["update"]) / 2)
    assert measured["tokens"] > 2 * 4


def test_sizes_are_what_they_are_called() -> None:
    sizes = [round(SIZES[name].parameters / 1e6) for name in ("1m", "42m", "85m", "smollm2")]
    assert sizes == [1, 42, 86, 134]


def test_a_made_model_has_the_parameters_that_its_size_counts(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    # norms are not products
    norms = (2 * SIZES["1m"].layers + 1) * SIZES["1m"].hidden
    assert sum(weight.numel() for weight in model.parameters()) == SIZES["1m"].parameters + norms


@given(data=st.data())
def test_words_keep_their_tokens_when_decoded_and_encoded(folder: Path, tokenizer, data) -> None:
    tokens = data.draw(st.lists(st.sampled_from(words(str(folder))), min_size=1, max_size=30))
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens


def test_prompts_are_about_as_long_as_with_a_real_tokenizer(tokenizer) -> None:
    for text in (CONVERSATION_SYSTEM_PROMPT, JUDGE_SYSTEM_PROMPT):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert len(tokens) < 2 * len(text.split())  # punctuation is apart


def test_every_step_has_prompts_of_its_own(folder: Path) -> None:
    model, shape = str(folder), SHAPES["distinct"]
    one, other = prompts(model, shape, 1), prompts(model, shape, 2)
    assert len(one) == 12
    assert {len(prompt) for prompt in one} == {128}
    assert prompts(model, shape, 1) == one
    assert not {tuple(prompt) for prompt in one} & {tuple(prompt) for prompt in other}


def test_sides_take_turns_in_beginning() -> None:
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 2)) == ["a", "b", "c"]


def worker(folder: Path, **settings: float) -> Worker:
    script = folder / "echo.py"
    script.write_text(ECHO)
    return Worker(str(script), Path(sys.executable), settings, environment=PATH, timeout_s=60)


def test_a_side_that_fails_is_reported_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    workers = {"good": worker(tmp_path, base=10, until=99), "bad": worker(tmp_path, base=0, until=2)}
    try:
        found = take_turns(workers, 3, lambda text: None)
    finally:
        for each in workers.values():
            each.close()
    assert [values["cost"] for values in found["good"]["values"]] == [11, 12, 13]
    assert found["bad"] == {"error": "ZeroDivisionError: division by zero"}


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_a_side_has_started_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    start = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid"
    script.write_text(
        "import subprocess, sys\nfrom channel import serve\n"
        f"serve(lambda settings: lambda number: {{'child': {start}}}, ())\n"
    )
    side = Worker(str(script), Path(sys.executable), {}, environment=PATH, timeout_s=60)
    side.versions()
    child = int(side.step(0)["child"])
    assert is_running(child)
    side.close()
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_a_side_that_the_system_ends_is_reported_with_the_signal_not_with_its_last_line(
    tmp_path: Path,
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, sys\nprint('all is well', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    side = Worker(str(script), Path(sys.executable), {}, environment=PATH, timeout_s=60)
    with pytest.raises(SideFailedError, match="ended by SIGKILL"):
        side.versions()
    side.close()


async def test_samples_that_wait_for_a_server_that_ends_fail() -> None:
    from plain import VllmClient

    client = object.__new__(VllmClient)  # without its models
    client._waiting, client._count = {}, 0
    client._process = subprocess.Popen(
        [sys.executable, "-c", "input(); raise SystemExit(3)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    waiting = client._ask({"refresh": True})
    await asyncio.to_thread(client._listen)
    with pytest.raises(RuntimeError, match="vLLM ended with 3"):
        await asyncio.wait_for(waiting, 10)
    with client._process:
        pass


def test_a_row_of_which_no_side_could_be_started_is_a_row_without_figures() -> None:
    assert take_turns({}, 2, lambda text: None) == {}


def test_a_side_without_its_environment_says_which(tmp_path: Path) -> None:
    with pytest.raises(SideFailedError, match=r"not set up: no \.venv-none"):
        Worker("run.py", tmp_path / ".venv-none" / "bin" / "python", {}, environment={}, timeout_s=1)


ROW = Row(
    work="a step",
    sides={"ours": Side(script="run.py"), "theirs": Side(script="run.py"), "broken": Side(script="run.py")},
    ratios=(
        Ratio(over="theirs", under="ours", aim=3),
        Ratio(over="theirs", under="ours", aim=2, at_most=True),
        Ratio(over="broken", under="ours", aim=2),
    ),
)


def record(*ratios: float) -> dict:
    values = [({"cost": 0.5}, {"cost": 0.5 * ratio}) for ratio in ratios]
    sides = {
        "ours": {"values": [ours for ours, _ in values]},
        "theirs": {"values": [theirs for _, theirs in values]},
    }
    return {"sides": sides | {"broken": {"error": "no wheel"}}}


def test_a_ratio_is_the_median_of_the_repeats_ratios() -> None:
    lines = render.lines_of(ROW, record(2.0, 9.0, 4.0))
    assert lines[0] == ("theirs / ours", "4.00x", "2.00 to 9.00", "at least 3x", "yes")
    assert lines[1][3:] == ("at most 2x", "**no**")
    assert lines[2] == ("broken / ours", "not measured", "", "at least 2x", "")


def test_a_ratio_of_a_batch_is_of_that_batch_alone_and_named_by_it() -> None:
    row = replace(ROW, ratios=(Ratio(over="theirs", under="ours", name="8 x 1"),))
    values = {"ours": [{"8 x 1": 2.0, "1 x 1": 9.0}], "theirs": [{"8 x 1": 3.0, "1 x 1": 1.0}]}
    found = {"sides": {label: {"values": each} for label, each in values.items()}}
    assert render.lines_of(row, found) == [("theirs / ours, 8 x 1", "1.50x", "1.50 to 1.50", "", "")]


def test_a_row_measured_again_replaces_the_first_and_keeps_its_place() -> None:
    texts = [{"row": "judge", "take": 1}, {"row": "long", "take": 1}, {"row": "judge", "take": 2}]
    found = render.newest("\n".join(map(json.dumps, texts)))
    assert list(found) == ["long", "judge"]
    assert found["judge"]["take"] == 2


def test_the_page_names_peers_that_could_not_be_measured_and_rows_that_are_missing() -> None:
    row = ROWS["judge"]
    sides: dict = {label: {"values": [{"cost": 1.0}], "versions": {"torch": "2"}} for label in row.sides}
    sides["generated verdicts"] = {"error": "no wheel"}
    machine = {
        "processor": "P",
        "cores": 2,
        "threads": 2,
        "flags": [],
        "memory_gb": 8,
        "system": "Linux",
        "python": "3",
    }
    entry = {"row": "judge", "repeats": 1, "machine_id": "abc", "machine": machine, "sides": sides}
    page = render.render({"judge": entry})
    assert "- generated verdicts: could not be measured: no wheel" in page
    assert (
        page.count("| not measured | at least 25x |  |") == 1
    )  # in the summary; the row's own table has a range
    assert "Not measured yet: long, balanced" in page


def test_the_page_is_what_the_results_say() -> None:
    assert PAGE.read_text() == render.render(render.newest(RESULTS.read_text()))


async def test_the_plain_way_computes_what_the_engine_computes(folder: Path) -> None:
    import tinker
    from plain import PlainClient

    from viva.engine import LocalServiceClient

    model, shape = str(folder), SHAPES["distinct"]
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [-8.0] * (len(tokens) - 1),
                "advantages": [1.0] * (len(tokens) - 1),
            },
        )
        for tokens in (prompts(model, shape, 1)[0][:length] for length in (9, 20, 5))
    ]
    ours = LocalServiceClient(device="cpu").create_lora_training_client(model, rank=4, seed=0)
    plain = PlainClient(model, "float32", micro_batch=2)
    found = [await client.forward_backward(data, "importance_sampling") for client in (ours, plain)]
    for one, other in zip(*(each.loss_fn_outputs for each in found), strict=True):
        assert one["logprobs"].to_numpy() == pytest.approx(other["logprobs"].to_numpy(), abs=1e-4)


def test_a_draft_is_what_stood_behind_the_same_two_tokens_before() -> None:
    # (1, 2) comes again: 3 and 4 are right guesses behind it, 1 instead of 5 is a wrong one
    assert tokens_a_step([1, 2, 3, 4], [1, 2, 3, 4, 5], most=1) == 5 / 4
    assert tokens_a_step([1, 2, 3, 4], [1, 2, 3, 4, 5], most=3) == 5 / 3
    # a reply that goes on as it began is guessed from itself, and one that repeats nothing is not
    assert tokens_a_step([], [1, 2] * 8, most=3) == 16 / 8
    assert tokens_a_step([], list(range(16)), most=7) == 1
