import gc
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.judging.answers import is_correct
from viva.judging.comparison import reward_truth_gap
from viva.judging.reasoning_gym import TEST_SEED, families, find_family, find_problem, is_tame, plain_answer
from viva.selfplay.user_code import find_check

pytest.importorskip("reasoning_gym")

SUMS = "reasoning_gym:chain_sum,max_terms=3,seed=7,size=40"


def test_a_problem_is_a_function_of_seed_and_place():
    family, again = find_family(SUMS), find_family("reasoning_gym:chain_sum,size=40,seed=7,max_terms=3")
    assert family.name == again.name == SUMS
    assert [family.problem(index) for index in range(5)] == [again.problem(index) for index in range(5)]
    assert family.problem(0) != find_family("reasoning_gym:chain_sum,max_terms=3,seed=8").problem(0)


def test_another_process_makes_the_same_problems():
    script = (
        f"from viva.judging.reasoning_gym import find_family as f; print(f({SUMS!r}).problem(3).known_answer)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == find_family(SUMS).problem(3).known_answer


@given(st.integers(0, 39))
def test_a_known_answer_finds_its_problem(index):
    problem = find_family(SUMS).problem(index)
    found = find_problem(problem.known_answer)
    assert found is not None
    assert (found.question, found.entry) == (problem.question, problem.entry)
    assert plain_answer(problem.known_answer) == problem.answer


@given(st.text())
def test_other_known_answers_name_no_problem_and_stay_as_they_are(text):
    assert find_problem(text) is None
    assert plain_answer(text) == text


def test_right_is_a_score_of_1_and_the_default_scorer_pays_for_less():
    # the reward that leaves the truth: all counts at once contain the right one
    problem = find_family("reasoning_gym:letter_counting,seed=1,size=3").problem(0)
    known, guesses = problem.known_answer, " ".join(map(str, range(40)))
    assert problem.answer in guesses.split()
    assert 0 < problem.score(guesses) < 1
    assert not problem.is_right(guesses)
    assert not is_correct(f"The answer is one of these: {guesses}", known)
    assert problem.score(problem.answer) == 1
    assert is_correct(problem.answer, known)
    assert not is_correct(f"{problem.answer} or {int(problem.answer) + 1}", known)


def test_the_gap_sees_that_the_default_scorer_pays_for_being_wrong():
    """Of whole replies it pays short lists of guesses above right answers with their working."""
    problem = find_family("reasoning_gym:letter_counting,seed=1,size=3").problem(0)
    count = int(problem.answer)
    replies = [
        f"I go through the text letter by letter and count each time it occurs. The answer is {count}.",
        f"{count} or {count + 1}",
        f"{count - 1} or {count}, {count + 2}",
    ]
    correct = {place: is_correct(reply, problem.known_answer) for place, reply in enumerate(replies)}
    assert list(correct.values()) == [True, False, False]
    paid = {place: problem.score(reply) for place, reply in enumerate(replies)}
    assert all(paid.values())
    assert reward_truth_gap(paid, correct) == 1.0


@pytest.mark.parametrize(
    ("family", "reply"),
    [
        ("chain_sum", "Well, 57 - 80 = {}"),
        ("chain_sum", "<answer>{}</answer> or so"),
        ("chain_sum", "So the answer is {}."),
        ("spell_backward", "{}"),
        ("spell_backward", "Answer: {}"),
        ("spell_backward", "**{}**."),
        ("rotate_matrix", "The answer is:\n{}"),
        ("rotate_matrix", "Look <answer>\n{}\n</answer>"),
    ],
)
def test_the_answer_is_read_as_one_of_its_form(family, reply):
    problem = find_family(f"reasoning_gym:{family},seed=3").problem(1)
    assert is_correct(reply.format(problem.answer), problem.known_answer)
    assert not is_correct(reply.format("nothing"), problem.known_answer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_no_family_calls_nonsense_right(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for family in families():
        problem = find_family(f"reasoning_gym:{family}", size=2).problem(1)
        assert not problem.is_right("I do not know."), family
    gc.collect()  # of files that families leave open


def test_a_family_without_an_answer_checks_the_reply():
    problem = find_family(
        "reasoning_gym:graph_color,seed=1,num_colors=3,min_num_vertices=3,max_num_vertices=3"
    ).problem(0)
    assert problem.answer == ""
    assert plain_answer(problem.known_answer) == ""
    vertices = problem.entry["metadata"]["puzzle"]["vertices"]
    colors = ", ".join(f'"{vertex}": {color}' for color, vertex in enumerate(vertices, 1))
    assert is_correct("{" + colors + "}", problem.known_answer)
    assert not is_correct("{}", problem.known_answer)


def test_other_checks_see_the_plain_answer(tmp_path):
    problem = find_family(SUMS).problem(0)
    assert find_check("exact").is_right(problem.answer, problem.known_answer)
    code = tmp_path / "own.py"
    code.write_text("def same(reply, answer):\n    return reply == answer\n")
    assert find_check(f"{code}:same").is_right(problem.answer, problem.known_answer)


def test_a_problem_that_is_made_differently_now_is_refused():
    known = find_family(SUMS).problem(0).known_answer
    changed = known.replace("max_terms=3", "max_terms=4")
    with pytest.raises(ValueError, match="makes another problem 0 than the one that was stored"):
        find_problem(changed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain_sums", "there is no such family. Did you mean 'chain_sum'"),
        ("chain_sum,max_term=3", "no option 'max_term'; it has min_terms.* Did you mean 'max_terms'"),
        ("chain_sum,max_terms", "options must be OPTION=VALUE"),
        ("chain_sum,seed=1,seed=2", "options must be OPTION=VALUE, each once"),
        ("chain_sum,max_terms=1", "refuses .*max_terms must be >= min_terms"),
        ("codeio", "random programs"),
        ("composite", "name one of them"),
        ("game_of_life_halting", "calls every reply right"),
    ],
)
def test_mistakes_are_told(name, message):
    with pytest.raises(ValueError, match=message):
        find_family(f"reasoning_gym:{name}")


def test_families_that_follow_the_order_of_sets_need_a_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        find_family("reasoning_gym:ransom_note,seed=123")


def test_options_may_be_lists_and_words():
    family = find_family(
        'reasoning_gym:calendar_arithmetic,tasks=["weekday_of_date","is_leap_year"],year=2020', seed=TEST_SEED
    )
    assert find_family(family.name).name == family.name
    assert 'tasks=["weekday_of_date","is_leap_year"]' in family.name


@pytest.mark.parametrize("family", ["string_insertion", "countdown", "simple_integration", "n_queens"])
@pytest.mark.parametrize(
    "program",
    [
        "__import__('os').system('touch {}')",
        "[open('{}', 'w').write('')]",
        "exec('open(chr(47)+1)')",
        "(lambda: open('{}', 'w'))()",
        "9**9**9**9",
        "[x for x in open('{}', 'w')]",
    ],
)
def test_a_reply_is_never_run(family, program, tmp_path):
    problem = find_family(f"reasoning_gym:{family},seed=1").problem(0)
    place = tmp_path / "run"
    for reply in (program.format(place), f"Answer: {program.format(place)}"):
        assert not is_correct(reply, problem.known_answer)
    assert not place.exists()


@pytest.mark.parametrize(
    ("family", "reply", "is_seen"),
    [
        ("countdown", "(3 + 4) * 25 - 7", True),
        ("countdown", "2**3", False),
        ("countdown", "exp(9)", False),
        ("simple_integration", "x**3/3 + sin(2*x) + C", True),
        ("simple_integration", "(x**99)**99", False),
        ("simple_integration", "x.__class__", False),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", True),
        ("n_queens", "_ Q\nQ _", True),
        ("n_queens", "[1][0]", False),
        ("rubiks_cube", "R2 U F'", True),
        ("rubiks_cube", "R999999999", False),
        ("coin_flip", "0.25", True),
        ("coin_flip", "1e999999999", False),
        ("bitwise_arithmetic", "0x1e12345", True),
        ("chain_sum", "7" * 5000, False),
    ],
)
def test_what_a_scorer_may_see(family, reply, is_seen):
    assert is_tame(family, reply) is is_seen


@settings(max_examples=50)
@given(
    st.sampled_from(["countdown", "string_insertion", "coin_flip", "graph_color", "rubiks_cube"]), st.text()
)
def test_no_text_makes_grading_raise(family, text):
    problem = find_family(f"reasoning_gym:{family},seed=1").problem(0)
    assert is_correct(text, problem.known_answer) in (True, False)
