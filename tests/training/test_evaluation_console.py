"""What the user sees while `viva eval` goes on."""

import io

import pytest
from rich.console import Console
from terminals import Clock, terminal

from viva.training.console import EvaluationConsole


def play(console: EvaluationConsole, clock: Clock) -> None:
    for title, count, noun in (("direct", 500, "answers"), ("equal tokens", 8, "problems")):
        progress = console.begin(title, count, noun)
        clock.now += 12
        for _ in range(count):
            progress.on_reply(20)
            progress.on_group(None)


def test_elsewhere_every_part_is_one_plain_line_at_its_end():
    text, clock = io.StringIO(), Clock()
    with EvaluationConsole(console=Console(file=text, width=200), clock=clock) as console:
        play(console, clock)
    assert text.getvalue().splitlines() == [
        "direct: 500 answers, 10,000 tokens in 12 s",
        "equal tokens: 8 problems, 160 tokens in 12 s",
    ]


def test_a_terminal_shows_how_far_the_part_is_and_nothing_stays():
    clock = Clock()
    console = EvaluationConsole(console=terminal(), clock=clock)
    progress = console.begin("direct", 500, "answers")
    clock.now += 10
    for _ in range(125):
        progress.on_reply(16)
        progress.on_group(None)
    console.console.print(console.display())
    (line,) = console.console.export_text().splitlines()
    assert " ".join(line.replace("━", "").replace("╸", "").replace("╺", "").split()) == (
        "direct 125 of 500 answers, 200 tok/s, 30 s left"
    )


def test_a_part_that_fails_is_not_told_as_done():
    text = io.StringIO()
    console = EvaluationConsole(console=Console(file=text))

    def fail() -> None:
        with console:
            console.begin("direct", 3, "answers")
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        fail()
    assert text.getvalue() == ""


def test_it_writes_to_the_error_stream_so_that_tables_can_be_piped():
    assert EvaluationConsole().console.stderr
