"""What the user sees while a run goes, on a terminal and elsewhere."""

import gc
import io
import sys
from dataclasses import replace
from functools import partial

from bandit_runs import make_run, metrics_of
from rich.console import Console
from terminals import Clock, terminal

from viva.training.console import RunConsole, StepProgress, sparkline
from viva.training.loop import train


def shown(run: RunConsole) -> list[str]:
    """The display, as it stands on a terminal."""
    run.console.export_text()  # what was said before
    run.console.print(run.display())
    return [line.rstrip() for line in run.console.export_text().splitlines()]


def test_elsewhere_every_step_is_one_plain_line():
    text = io.StringIO()
    with RunConsole(num_steps=3, console=Console(file=text, width=200)) as console:
        progress = console.sampling(4)
        progress.on_reply(7)
        console.step_done(0, {"reward/std": 0.5, "rollout/void": 0, "time/tokens_per_second": 1234.5})
        console.step_done(1, {"rollout/void": 2, "test/direct_accuracy": 0.256})
        console.message("a [markup] stays text")
        for text_of_topic in ("first", "second"):
            console.warn_once("topic", text_of_topic)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("step 1/3 | reward std 0.50 | tok/s 1,234 | ")
    assert lines[1].startswith("step 2/3 | held-out accuracy 25.6% | void 2 | ")
    assert lines[1].endswith(" left")
    assert lines[2:] == ["a [markup] stays text", "warning: first"]
    assert "\x1b" not in text.getvalue()


def test_a_terminal_shows_the_run_the_step_and_the_numbers_that_matter_with_their_trend():
    clock = Clock()
    run = RunConsole(num_steps=4, console=terminal(), clock=clock)
    for step, (accuracy, spread) in enumerate([(0.572, 0.45), (0.6, 0.4)]):
        clock.now += 60
        metrics = {"test/direct_accuracy": accuracy, "reward/std": spread, "rollout/sampled_tokens": 2000}
        run.step_done(step, metrics | {"rollout/void": 0, "some/other": 1})
    progress = run.sampling(12)
    clock.now += 10
    for _ in range(5):
        progress.on_reply(100)
    progress.on_group(None)
    bars = [line.replace("━", "").replace("╸", "").replace("╺", "").split() for line in shown(run)]
    assert bars == [
        ["step", "3/4", "1", "min", "50", "s", "left"],
        ["sampling", "1", "of", "12", "conversations,", "50", "tok/s,", "30", "s", "left"],
        ["held-out", "accuracy", "60.0%", "▁█", "from", "57.2%"],
        ["reward", "std", "0.40", "█▁", "from", "0.45"],
    ]
    for _ in range(11):
        progress.on_group(None)
    run.phase("updating")
    assert [line.split()[0] for line in shown(run)] == ["step", "updating", "held-out", "reward"]


def test_rollouts_ahead_of_an_update_are_shown_beside_it_and_after_it():
    run = RunConsole(num_steps=4, console=terminal())
    progress = run.sampling(12)
    run.phase("updating")
    assert [line.split()[0] for line in shown(run)[1:]] == ["updating", "sampling"]
    run.step_done(0, {})
    assert [line.split()[0] for line in shown(run)[1:]] == ["sampling"]
    for _ in range(12):
        progress.on_group(None)
    assert shown(run)[1:] == []


def test_the_display_may_be_drawn_between_any_two_lines_of_what_changes_it():
    run = RunConsole(num_steps=4, console=terminal())

    def draw(frame, event, argument):
        if frame.f_code.co_filename.endswith("console.py") and frame.f_code.co_name != "display":
            sys.settrace(None)
            run.display()
            sys.settrace(draw)
        return draw

    sys.settrace(draw)
    try:
        for step in range(2):
            run.sampling(1).on_group(None)
            run.phase("updating")
            run.step_done(step, {"reward/std": 0.5, "rollout/void": step})
    finally:
        sys.settrace(None)
    assert shown(run)[1].split() == ["reward", "std", "0.50", "▅▅", "from", "0.50"]


def test_without_an_answer_key_the_numbers_that_can_mean_learning_are_shown_with_their_trend():
    run = RunConsole(num_steps=9, console=terminal())
    for step in range(2):
        conversation = {"judge/confidence": 0.5 + step / 10, "judge/disagreement": 0.3, "reward/mean": 1e-17}
        run.step_done(step, conversation)
    assert [line.split()[:3] for line in shown(run)[1:]] == [
        ["judge's", "confidence", "60%"],
        ["judge", "contradicts", "itself"],
    ]  # the reward of a tournament is 0 whatever is learned
    run = RunConsole(num_steps=9, console=terminal())
    for step in range(2):
        run.step_done(step, {"reward/mean": 0.2 + step, "gain/mean": 0.05, "sign/against_majority": 0.2})
    assert [line.split() for line in shown(run)[1:]] == [
        ["reward", "1.20", "▁█", "from", "0.20"],
        ["gain", "of", "revision", "+0.050", "▅▅", "from", "+0.050"],
        ["votes", "against", "the", "majority", "20%", "▅▅", "from", "20%"],
    ]


def test_a_narrow_terminal_cuts_lines_and_does_not_break_them():
    run = RunConsole(num_steps=2, console=terminal(40))
    for step in range(2):
        run.step_done(step, {"test/direct_accuracy": 0.5 + step / 10, "optim/kl_sample_train_v1": 1e-8})
    assert max(map(len, shown(run))) <= 40
    assert [line.split() for line in shown(run)[1:]] == [
        ["held-out", "accuracy", "60.0%"],
        ["kl", "1.0e-08"],
    ]


def test_a_run_that_goes_on_knows_the_trend_from_before():
    history = [{"step": step, "reward/std": 1.0 - step / 10} for step in range(5)]
    run = RunConsole(num_steps=8, first_step=5, history=history, console=terminal())
    assert shown(run)[2].split() == ["reward", "std", "0.60", "█▆▅▃▁", "from", "1.00"]


def test_what_is_said_during_a_run_stands_above_the_display_and_warnings_stand_once():
    run = RunConsole(num_steps=2, console=terminal())
    with run:
        for _ in range(3):
            run.warn_once("void", "2 groups void; look at them with viva view")
        sys.stdout.write("a plain line\n")
    text = run.console.file.getvalue()
    assert text.count("warning: 2 groups void") == 1
    assert "a plain line" in text


def test_progress_is_told_by_tokens_as_soon_as_a_step_has_shown_how_many_there_are():
    clock = Clock()
    unknown = StepProgress(num_groups=10, expected_tokens=None, clock=clock)
    assert (unknown.share, unknown.seconds_left, unknown.tokens_per_second) == (0.0, None, 0.0)
    known = StepProgress(num_groups=10, expected_tokens=1000, clock=clock)
    clock.now += 5
    for progress in (unknown, known):
        progress.on_reply(250)
        progress.on_group(None)
    assert (unknown.share, known.share) == (0.1, 0.25)
    assert (known.seconds_left, known.tokens_per_second) == (15.0, 50.0)
    known.on_reply(5000)  # more than expected is not yet the end
    assert known.share == 0.99
    for _ in range(9):
        known.on_group(None)
    assert (known.share, known.seconds_left) == (1.0, 0.0)
    assert StepProgress(num_groups=0, expected_tokens=None).share == 1.0


def test_a_row_of_blocks_goes_from_the_lowest_value_to_the_highest():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3.0, 3.0]) == "▅▅"


async def test_the_display_changes_no_result(tmp_path, monkeypatch):
    await train(make_run(tmp_path / "plain"))
    console = terminal()
    monkeypatch.setattr("viva.training.loop.RunConsole", partial(RunConsole, console=console))
    await train(make_run(tmp_path / "shown"))
    assert "step 6/6" in console.export_text()
    assert metrics_of(tmp_path / "plain") == metrics_of(tmp_path / "shown")
    names = ("transcripts.jsonl", "tokens.jsonl")
    assert [(tmp_path / "plain" / name).read_bytes() for name in names] == [
        (tmp_path / "shown" / name).read_bytes() for name in names
    ]


def calls_to_draw(num_done: int) -> int:
    """Functions that are called to note twenty tokens of fifty replies and to draw the display once."""
    run = RunConsole(num_steps=500, console=terminal())
    for step in range(num_done):
        run.step_done(step, dict.fromkeys(("test/direct_accuracy", "reward/std", "parse/ok"), step / 100))
    progress, count = run.sampling(12), 0

    def noticed(frame, event, value):
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what it finds would be counted as well
    sys.setprofile(noticed)
    try:
        for _ in range(50):
            progress.on_reply(20)
        run.console.print(run.display())
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_drawing_the_display_takes_no_more_the_longer_a_run_is():
    early, late = calls_to_draw(100), calls_to_draw(400)
    assert late < 1.1 * early
    assert late < 20_000  # some milliseconds, twice a second


def rows(run: RunConsole) -> list[str]:
    return [" ".join(line.replace("━", "").replace("╸", "").replace("╺", "").split()) for line in shown(run)]


def test_an_evaluation_shows_how_far_it_is_beside_rollouts_that_run_ahead():
    clock = Clock()
    run = RunConsole(num_steps=4, console=terminal(100), clock=clock)
    ahead = run.sampling(12)
    questions = run.evaluating("test questions", 500, "questions")
    clock.now += 10
    for _ in range(100):
        questions.on_reply(20)
        questions.on_group(None)
    ahead.on_reply(50)
    assert rows(run)[1:] == [
        "evaluating 100 of 500 questions, 200 tok/s, 40 s left",
        "sampling 0 of 12 conversations, 5 tok/s",
    ]
    run.evaluated()
    assert rows(run)[1:] == ["sampling 0 of 12 conversations, 5 tok/s"]


def test_the_next_evaluation_knows_how_much_the_last_one_took():
    clock = Clock()
    run = RunConsole(num_steps=4, console=terminal(100), clock=clock)
    for tokens in (1000, 500):
        progress = run.evaluating("test conversations", 2, "conversations")
        clock.now += 10
        progress.on_reply(tokens)
        if tokens == 1000:  # the first one ends
            progress.on_group(None)
            progress.on_group(None)
    assert rows(run)[1:] == ["evaluating 0 of 2 conversations, 50 tok/s, 10 s left"]


async def test_the_evaluators_of_a_run_tell_the_console_how_far_they_are(tmp_path):
    told = []

    async def count(sampler, step, begin):
        progress = begin("test questions", 3, "questions")
        progress.on_group(None)
        told.append((step, progress.num_groups, progress.num_done))
        return {"test/x": 1.0}

    await train(replace(make_run(tmp_path), evaluators=[count]))
    assert {(count, done) for _, count, done in told} == {(3, 1)}
    assert told[0][0] == 0
