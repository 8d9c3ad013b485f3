"""Answers that are formulas are compared as formulas, and nothing that a policy writes makes that slow or silly."""

import os
import signal
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.judging import expressions
from viva.judging.answers import is_correct
from viva.judging.expressions import MAX_LENGTH, same_expression


@pytest.mark.parametrize(
    ("given_text", "wanted"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("2y+x", "x+2y"),
        ("x = 2y", "2y"),
        (r"\frac{x}{2}", "0.5x"),
        (r"\{1, 2\}", r"\{2,1\}"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        ("3,-3", r"\pm 3"),
        (r"\pi r^2", r"r^{2}\pi"),
        (r"$\sqrt 2$", r"\sqrt{2}"),
    ],
)
def test_the_same_expression_written_otherwise_is_recognised(given_text, wanted):
    assert same_expression(given_text, wanted)
    assert is_correct(f"So it is \\boxed{{{given_text}}}.", wanted)


@pytest.mark.parametrize(
    ("given_text", "wanted"),
    [
        ("x+1", "x+2"),
        ("[0,1)", "(0,1)"),
        (r"\infty", r"-\infty"),
        ("elppas", "apples"),
        (r"\text{pears}", r"\text{apples}"),
        ("1=2=x", "x"),
        ("10=x", "x"),
        ("", "x"),
        ("x", ""),
        ("x}{x", "x"),
        ("x" * (MAX_LENGTH + 1), "x"),
    ],
)
def test_another_expression_or_none_is_not(given_text, wanted):
    assert not same_expression(given_text, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}",
        "9!!!!!!",
        "10^{999999999}",
        "(a+b+c+d+e)^{99}",
        r"\sum_{i=1}^{10000000} i^i",
        r"\int_0^1 e^{x^x} dx",
        "(" * 90 + "x" + ")" * 90,
        r"\frac{" * 30,
        "9**9**9**9",
    ],
)
def test_what_would_take_for_ever_is_refused_at_once(text):
    started = time.process_time()
    assert not same_expression(text, "x+1")
    assert not same_expression("x+1", text)
    assert time.process_time() - started < 0.1


@settings(deadline=None, max_examples=40)
@given(st.text(alphabet=r"x12+-=^_{}()\frac, $", max_size=30))
def test_whatever_is_written_is_compared_without_an_error(text):
    same_expression(text, "x+1")


def test_expressions_are_compared_in_other_threads_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(same_expression("1+x", "x+1")))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.fixture
def process(monkeypatch):
    """A comparing process of the test's own."""
    ours = expressions._Process()
    monkeypatch.setattr(expressions, "_PROCESS", ours)
    yield ours
    ours.close()


def test_what_does_not_end_is_ended_and_the_next_pair_is_compared(process):
    """In two processes, since an alarm inside did not end every comparison."""
    assert same_expression("1+x", "x+1")
    first = process._child.pid
    start = time.process_time()
    assert not same_expression(r"\exp(999999999999999999999^{99})", r"\cot(x)+\tan(x)")
    assert process._child.returncode == -signal.SIGXCPU
    assert time.process_time() - start < 1
    assert same_expression("1+x", "x+1")
    assert process._child.pid != first


def test_one_process_is_used_again_and_ends_with_its_owner(process):
    assert same_expression("1+x", "x+1")
    first = process._child
    assert same_expression("2+x", "x+2")
    assert process._child is first
    process.close()
    assert first.returncode == 0


def test_a_process_ended_from_outside_grades_nothing(process, monkeypatch):
    assert same_expression("1+x", "x+1")
    child = process._child
    monkeypatch.setattr(expressions, "ask", lambda child, line: child.kill() or "")
    with pytest.raises(RuntimeError, match=r"ended with status -9 while it compared \['x\+1', '1\+x'\]"):
        same_expression("1+x", "x+1")
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("program", ["/bin/false", "/bin/cat"])
def test_a_process_that_does_not_start_is_an_error(process, monkeypatch, program):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(RuntimeError, match="math-verify"):
        same_expression("1+x", "x+1")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_the_child_to_its_parent(process):
    assert same_expression("1+x", "x+1")
    if (pid := os.fork()) == 0:
        expressions._PROCESS.forget()
        os._exit(0 if same_expression("3+x", "x+3") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert same_expression("2+x", "x+2")
