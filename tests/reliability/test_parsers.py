"""Parsers of model text: typed results for whatever a model writes, in linear time, without patterns that backtrack."""

import ast
import importlib
import logging
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_text import (
    FLOODS,
    FRAGMENTS,
    LETTERS,
    PARSERS,
    SEEDS,
    VIEW,
    check_expression,
    check_place,
    check_reading,
    flood,
    replies,
)
from regex_dangers import dangers
from timing import seconds

from viva.conversation.critiques import read_critiques, read_revision
from viva.conversation.protocol import quote, read_solution
from viva.conversation.replies import ObjectScanner, parse_reply
from viva.conversation.tools import find_call
from viva.experts.conversation_expert import solution_tokens
from viva.judging.answers import CHECKS, answer_key, extract_answer, is_correct
from viva.judging.expressions import same_expression
from viva.judging.judge import parse_verdict
from viva.judging.ranking import parse_ranking

SEED = 7
SRC = Path(__file__).parents[2] / "src"
RECIPE = "7 parsers"


@pytest.fixture(autouse=True)
def _quiet():
    """The cookbook logs replies with several ends in full."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(check, count):
    """Check so many replies; a failure names the reply."""
    for number, text in enumerate(replies(SEED, count)):
        try:
            check(text)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with the reply
            pytest.fail(f"reply {number} of seed {SEED}: {text!r} gave {type(error).__name__}: {error}")


# typed results


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_gives_typed_results_for_any_reply(name, trials, ledger):
    count = trials(short=4_000, full=1_000_000)
    run(PARSERS[name], count)
    ledger(RECIPE, f"typed results for any reply: {name}", trials=count, seed=SEED)


def test_expressions_and_places_give_typed_results_for_any_reply(trials, ledger):
    count = trials(short=200, full=100_000)
    run(check_expression, count)
    run(check_place, count)
    ledger(
        RECIPE,
        "typed results for any reply: expressions (math-verify) and where a solution stands in the tokens",
        trials=2 * count,
        seed=SEED,
    )


@given(
    st.lists(st.one_of(st.sampled_from((*FRAGMENTS, *SEEDS)), st.text(max_size=3)), max_size=12).map("".join)
)
def test_no_short_reply_is_a_counterexample(text):
    """What the fast generator finds, this makes small."""
    for check in PARSERS.values():
        check(text)


def test_the_fuzz_finds_a_parser_that_fails_on_rare_text():
    def fragile(text):
        assert "</solution>" not in text or "{" not in text

    with pytest.raises(pytest.fail.Exception, match="gave AssertionError"):
        run(fragile, 4_000)


# linear time

TIMED = {
    "parse_reply": parse_reply,
    "ObjectScanner.first": lambda text: ObjectScanner(text, ("solution",), "solution").first(),
    "read_solution": lambda text: read_solution(text, VIEW),
    "read_revision": lambda text: read_revision(text, VIEW),
    "read_critiques": lambda text: read_critiques(text, VIEW),
    "find_call": find_call,
    "parse_verdict": parse_verdict,
    "parse_ranking": lambda text: parse_ranking(text, LETTERS, own="D"),
    "extract_answer": extract_answer,
    "answer_key": answer_key,
    "is_correct": lambda text: is_correct(text, "72"),
    "exact": lambda text: CHECKS["exact"].is_right(text, "B"),
    "choice": lambda text: CHECKS["choice"].is_right(text, "B"),
    "same_expression": lambda text: same_expression(text, "x/2"),
    "quote": quote,
}
WORD = 1 << 16
"""Characters of the texts that may take 50 ms."""


@pytest.mark.parametrize("name", TIMED)
def test_a_flooded_reply_is_read_in_linear_time(name, trials, ledger):
    call = TIMED[name]
    size, limit = trials(short=WORD // 2, full=WORD), trials(short=1_000, full=50) / 1000
    spent = {}
    for unit in FLOODS[:: trials(short=3, full=1)]:
        spent[unit] = seconds(call, flood(unit, size), tries=trials(short=1, full=3))
        assert spent[unit] < limit, (unit, spent[unit])
    if size < WORD:
        return
    longest = {unit: seconds(call, flood(unit, WORD << 4)) for unit in spent}
    for unit, longer in longest.items():
        # half a second for 1 MB is well, also where the shorter text happened to end in what is read at once
        assert longer <= max(2.5**4 * spent[unit], 0.5), (unit, spent[unit], longer)
    ratios = []
    for unit in sorted(longest, key=lambda unit: -longest[unit])[:8]:
        times = [seconds(call, flood(unit, WORD << shift)) for shift in range(5)]
        ratios += [after / max(before, 0.005) for before, after in pairwise(times)]
        assert max(ratios) <= 4, (unit, times)
    ledger(
        RECIPE,
        f"linear time up to 1 MB: {name}",
        trials=2 * len(spent) + 5 * 8,
        figures=f"64 kB in at most {1000 * max(spent.values()):.0f} ms, 1 MB in {1000 * max(longest.values()):.0f} ms; "
        f"twice the text takes at most {max(ratios):.1f} times as long",
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm5_3_low_reasoning", "kimi_k2", "deepseekv4_1"])
def test_flooded_tokens_are_read_in_linear_time(name, trials):
    """Decoding takes most of it; a pattern that backtracks would take minutes."""
    for unit in FLOODS[len(FRAGMENTS) :] if name == "qwen3" else FLOODS[-12:]:
        text = flood(unit, trials(short=WORD // 32, full=WORD))
        assert seconds(lambda text: check_reading(text, (name,)), text, tries=1) < 5, unit


def test_where_a_solution_stands_is_found_in_linear_time():
    """Regression: a search from the right took a time quadratic in the reply."""
    text = '"' + "a" * 400_000 + '"'

    class Stub:
        tokenizer = None

    assert seconds(lambda text: solution_tokens(Stub(), [], text, "ab" + "a" * 200_000), text, tries=1) < 1


def test_a_ballot_is_not_flooded():
    line = " > ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + "\n"
    ballot = parse_ranking(line * 1_000, {letter: place for place, letter in enumerate(line[:101:4])})
    assert len(ballot.preferences) == 325
    assert ballot.dropped.keys() == {"repeated", "flood"}
    assert ballot.dropped["repeated"] < 10_000


# third parties


@pytest.mark.parametrize(
    "text",
    [
        r"\left(e^{99}\cot(1000000e))",
        r"\exp(999999999999999999999^{99})",
        r"\cot(\cot(\sin(x)-\sec(\cos(\tan(x)))))",
    ],
)
def test_what_simplification_cannot_finish_is_cut_off(text):
    """Four seconds of the processor at most; and nothing longer than 200 characters is looked at."""
    start = time.monotonic()
    assert type(same_expression(text, r"\cot(x)+\tan(x)")) is bool
    assert time.monotonic() - start < 30
    assert seconds(lambda text: same_expression(text, "x"), text * 20_000, tries=1) < 0.5


# patterns

REVIEWED = {
    (
        "viva.conversation.replies",
        "_OPENING",
    ): "each quotation mark right behind a brace ends the string that an "
    "earlier beginning opened, so no two beginnings run through the same text; the floods above try it",
    ("viva.run.checkpoints", "_OWN_BESIDE"): "reads names of folders in a run, of at most 255 characters",
    ("viva.recipes.config", "_UNREADABLE"): "reads one line that the options' parser wrote, not a model's",
}
"""Patterns that the check is too careful for, and why they are linear or never see a model's text."""
MADE_IN_FUNCTIONS = {
    ("viva.conversation.guard", "f'[{letters}]'"): "one character of a set",
    (
        "viva.conversation.replies",
        "f\"<(/?)({'|'.join(names)})>\"",
    ): "a choice of fixed names, without repetition",
    (
        "viva.eval.records",
        r"f'(?<![^\\W_]|[.-]){re.escape(wanted)}(?![^\\W_]|[.,]\\d)'",
    ): "a fixed text between looks at a character or two, without repetition",
    (
        "viva.judging.judge",
        "f'<{field}>([^<]*+)</{field}>'",
    ): "a fixed name on both sides of a possessive run without its first character",
    (
        "viva.testing",
        r"'\\nYou are agent (\\d+)[,.] .*This is round (\\d+) of'",
    ): "reads one line of the package's own prompts, in tests",
}
"""Patterns that no module keeps under a name, and why they are linear."""


def modules_with_patterns():
    for path in sorted(SRC.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(
            isinstance(node, ast.Import) and "re" in [name.name for name in node.names]
            for node in ast.walk(tree)
        ):
            yield ".".join(path.relative_to(SRC).with_suffix("").parts), tree


def is_call_of_re(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr != "escape"
    )


def kept_patterns(tree):
    """Arguments of all patterns that a module makes once, when it is imported."""
    return {
        id(inner)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for inner in ast.walk(node.value)
        if is_call_of_re(inner)
    }


def uses(tree, name):
    """Methods that are called on a pattern."""
    return {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == name
    }


def patterns_in(value, name):
    if isinstance(value, re.Pattern):
        yield name, value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from patterns_in(item, name)
    elif isinstance(value, dict):
        yield from patterns_in([*value.keys(), *value.values()], name)


def test_no_pattern_of_the_package_can_backtrack_on_long_text(ledger):
    seen, slow = 0, {}
    for module, tree in modules_with_patterns():
        kept = kept_patterns(tree)
        for node in ast.walk(tree):
            if is_call_of_re(node) and id(node) not in kept:
                made = ast.unparse(node.args[0])
                constant = node.args[0]
                seen += 1
                if (module, made) in MADE_IN_FUNCTIONS:
                    continue
                if isinstance(constant, ast.Constant):
                    anchored = node.func.attr in ("match", "fullmatch")
                    if found := dangers(re.compile(constant.value), anchored=anchored):
                        slow[module, made] = found
                else:
                    slow[module, made] = ["made in a function: keep it under a name, or say why it is linear"]
        for name, value in vars(importlib.import_module(module)).items():
            for _, pattern in patterns_in(value, name):
                seen += 1
                used = uses(tree, name)
                found = dangers(pattern, anchored=bool(used) and used <= {"match", "fullmatch"})
                if found and (module, name) not in REVIEWED:
                    slow[module, name] = found
    assert slow == {}
    assert seen > 30
    ledger(
        RECIPE,
        "no regular expression can backtrack on model text",
        trials=seen,
        figures="all patterns in src",
    )


@pytest.mark.parametrize(
    ("pattern", "anchored", "is_slow"),
    [
        (r"<think>(.*?)</think>", False, True),  # the cookbook's
        (r"<solution>(.*?)</solution>\s*<evaluation>(.*?)</evaluation>", True, True),
        (r"^\s*<tool_call>\s*([\w\-\.]+)\s*(.*?)\s*</tool_call>\s*$", True, True),
        (r"(a+)+$", True, True),
        (r"(?:a|b*)*c", True, True),
        (r"(?:\w+\s?)*:", True, True),
        (r"\s*foo", False, True),
        (r"\w+@x", False, True),
        (r"\d*\d*x", True, True),
        (r"\s*+foo", True, False),
        (r"(?:[^\"\\]++|\\.)*+\"", True, False),
        (r"<([^<>]*)>", False, False),
        (r"[a-z]+", False, False),
        (r"(?:,\s*\w{1,20})*;", True, False),
    ],
)
def test_the_check_of_patterns_tells_slow_from_quick(pattern, anchored, is_slow):
    assert bool(dangers(re.compile(pattern, re.S), anchored=anchored)) is is_slow
