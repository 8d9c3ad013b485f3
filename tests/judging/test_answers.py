"""Final answers are read and compared, and the checks tell whether one is right and what votes for the same."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.judging.answers import CHECKS, answer_key, is_correct
from viva.selfplay.user_code import find_check


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 + 3 = 15. The answer is 15.", "15"),
        ("The answer is 15 apples.", "15"),
        ("The answer is: **15**", "15"),
        ("Answer: 15", "15"),
        ("so 3, then 4\n#### 15", "15"),
        ("First I thought the answer is 7. But the answer is 15.", "15"),
        (r"so \boxed{7}, no, \boxed{15}", "15"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"the answer is 3, that is \boxed{15}", "15"),
        ("2 boxes, 3 books: 6 and then 15", "15"),
        ("it costs $1,234.50", "1234.5"),
        ("The answer is $1,234", "1234"),
        ("15.0", "15"),
        ("The answer is 3/4", "0.75"),
        ("The answer is 50%", "50"),
        ("The answer is -5", "-5"),
        ("10 - 15 = -5", "-5"),
        ("5-3 leaves 2", "2"),
        ("the capital: the answer is Paris.", "paris"),
        ("The answer is  New   York", "New York"),
        ("ANSWER IS 15", "15"),
        ("15", "She sold 15 clips. #### 15"),
        ("Wow 0.5", ".5"),
        ("yes", "Yes"),
        ("The answer is 5m.", "5"),
        ("The answer is 2y", "2y"),
        ("She sells 48/2 = <<48/2=24>>24 clips in May.\n#### 72", "48+24 = <<48+24=72>>72 clips.\n#### 72"),
        ("#### 1,000", "so $1000.\n#### 1,000"),
        (r"\boxed{\dfrac{3}{4}}", "0.75"),
        (r"\boxed{-\frac{1}{2}}", "-1/2"),
        (r"\boxed{x = 5}", "5"),
        (r"$\theta = -5$ is it: the answer is $\theta = -5$.", "-5"),
        ("The answer is x = 5", "x = 5"),
        ("5", "x = 5"),
        (r"\boxed{1{,}000}", "1000"),
        ("The answer is -$5.", "-5"),
        ("it fell by -\u20ac1,234.50", "-1234.5"),
        (r"so -\$5", "-5"),
        ("- $5 for lunch", "5"),
        ("from $3-$5", "5"),
        (r"\boxed{5\text{ cm}}", "5"),
        (r"\boxed{5 \, \mathrm{m}^{2}}", "5"),
        (r"\boxed{\frac{1}{2}\text{ hours}}", "0.5"),
        (r"\boxed{45^\circ}", "45"),
        ("5", r"5\text{ cm}"),
    ],
)
def test_a_right_answer_is_recognised(text, answer):
    assert is_correct(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("15", "51"),
        ("The answer is -$5.", "5"),
        (r"\boxed{5\text{ million}}", "5"),
        (r"\boxed{12\text{ dozen}}", "12"),
        (r"\boxed{2\mathrm{i}}", "2"),
        (r"\boxed{3\text{ or }5}", "3"),
        (r"\boxed{3\text{ or 5}}", "3"),
        (r"\boxed{3\text{ or }5}", "5"),
        (r"\boxed{6\text{ cm}}", "5"),
        ("The answer is 15. Or maybe 16?", "16"),
        ("The answer is 5 apples and 3 pears", "5"),
        (r"15 \boxed{16}", "15"),
        ("", "15"),
        ("   ", "15"),
        ("I do not know", "15"),
        ("-5", "5"),
        ("1.5", "15"),
        ("15", ""),
        ("1/0", "0"),
        ("The answer is 1e5", "5"),
        ("12,34", "1234"),
        (r"\boxed{8+1}", "9"),
        (r"\boxed{10=9}", "9"),
        (r"\boxed{x == 9}", "9"),
        (r"\boxed{x = 8+1}", "9"),
        (r"\boxed{1{,}5}", "15"),
        (r"\boxed{\frac{1}{0}}", "0"),
        (r"\boxed{\frac{1}{2}\frac{1}{2}}", "1/4"),
    ],
)
def test_a_wrong_or_missing_answer_is_not(text, answer):
    assert not is_correct(text, answer)


@pytest.mark.parametrize(
    "text",
    [
        "3 - 8 leaves\n-5",
        "The result is **-5**.",
        "I get `-5`",
        "x\t-5",
        "[-5]",
        "the values {-5}",
        'it is "-5"',
        "so x = \u22125",
        "The answer is \u22125",
        "\\boxed{\u22125}",
        "- first\n- -5",
        "4/-5",
        "(3,-5)",
    ],
)
def test_a_minus_before_a_number_is_its_sign_whatever_stands_before_it(text):
    for minus in ("-", "\u2212"):
        assert is_correct(text, f"{minus}5")
    assert answer_key(text) == "-5"
    assert not is_correct(text, "5")


@pytest.mark.parametrize(
    "text",
    [
        *("3-5", "A-5", "x-5", "(2)-5", "[2]-5", "{2}-5", "10%-5%", "3\u22125", "2020-11-5"),
        *("--5", "pages 3--5", "- 5 apples", "4\n- 5"),
    ],
)
def test_a_minus_behind_a_term_or_before_a_space_is_no_sign(text):
    assert answer_key(text) == "5"


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    is_correct(text, "3")
    is_correct("3", text)


@given(st.text(alphabet="abcXYZ .,!", min_size=1).filter(lambda text: text.strip(" .")))
def test_a_text_without_numbers_agrees_with_itself(text):
    assert is_correct(text, text)


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc .,\n", max_size=20))
def test_the_marked_number_is_found_whatever_stands_before_it(number, before):
    assert is_correct(f"{before} The answer is {number}.", str(number))
    assert is_correct(f"{before} The answer is {number:,}.", str(number))
    assert not is_correct(f"{before} The answer is {number}.", str(number + 1))


@given(st.fractions(min_value=-99, max_value=99, max_denominator=50))
def test_fractions_equal_their_reduced_form(fraction):
    doubled = f"{fraction.numerator * 2}/{fraction.denominator * 2}"
    assert is_correct(f"\\boxed{{{doubled}}}", f"{fraction.numerator}/{fraction.denominator}")


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "{", "the answer is ", "1", "1,", "-1 ", "-", "*-1", "\\boxed{x ", "#### ", "/", "."],
)
def test_a_megabyte_is_read_in_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    is_correct(text, "3")
    assert time.process_time() - started < 3


CHOICE, EXACT = CHECKS["choice"], CHECKS["exact"]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b.", "B"),
        ("(C)", "C"),
        ("The answer is B.", "B"),
        ("The answer is (D) because A is wrong.", "D"),
        ("So \\boxed{A}.", "A"),
        ("So \\boxed{\\text{E}}.", "E"),
        ("Answer: **B** 12 apples", "B"),
        ("I first thought (A), but it must be (B)", "B"),
        ("A train leaves at noon.\nC) 15", "C"),
        ("The correct answer is option B", "B"),
        ("The answer is the letter d.", "D"),
        ("The answer is \\(B\\)", "B"),
        ("The answer is $C$.", "C"),
        ('The answer is "E"', "E"),
        ("So \\boxed{\\mathrm{(A)}\\ 12}.", "A"),
        ("The answer is a number", None),
        ("The answer is x = 5", None),
        ("The answer is A + B", None),
        ("The answer is A - B", None),
        ("The answer is x - 5", None),
        ("The answer is B - 12 apples", "B"),
        ("Answer: C - Paris", "C"),
        ("A train leaves at noon.", None),
        ("The answer is Apple", None),
        ("It isn't I'd say", None),
        ("", None),
    ],
)
def test_the_letter_of_a_choice_is_read(text, letter):
    assert CHOICE.vote(text) == letter
    if letter is not None:
        assert CHOICE.is_right(text, f"({letter.lower()}) whatever")
        assert not CHOICE.is_right(text, "Z")


@pytest.mark.parametrize("answer", ["", "15 apples", "Apple", "(1)"])
def test_a_known_answer_without_a_letter_is_refused_beforehand(answer):
    assert "grader=choice needs known answers that begin with a letter" in (CHOICE.refuses(answer) or "")
    assert CHOICE.refuses("B) 15") is None


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Paris", "Paris", True),
        ("  Paris \n", "Paris", True),
        ("The answer is Paris.", "Paris", True),
        ("\\boxed{New  York}", "New York", True),
        ("paris", "Paris", False),
        ("It is Paris", "Paris", False),
        ("8+1", "9", False),
        ("", "", False),
    ],
)
def test_exact_answers_agree_letter_for_letter(text, answer, right):
    assert EXACT.is_right(text, answer) is right


def test_math_votes_are_equal_for_equal_numbers():
    texts = ["The answer is 0.5", "\\boxed{\\frac{1}{2}}", "so 1/2", "1/2 %"]
    assert len({answer_key(text) for text in texts}) == 1
    assert answer_key("the answer is x = 0.5") == answer_key("1/2")
    assert answer_key("x = Paris") == answer_key("X  =  paris ")
    assert answer_key(" ") is None


@given(st.text(max_size=60))
def test_a_text_votes_like_itself_and_reading_never_fails(text):
    for check in CHECKS.values():
        vote = check.vote(text)
        assert vote is None or vote
        assert check.vote(text) == vote


EXPRESSIONS = [
    *("x/2", "$x/2$", "x - 3", "x-3", "n - 1", "2 - x", "a-3b", "2/x", "2 x", "2xy", "3i", "x2", "t/4 + 1"),
    *("pi/2", "2 pi", "log 2", "sin 3", "3\u03c0", "\u221a2", "B3"),
]
QUANTITIES = [
    *(
        "5 km/h",
        "12 hours",
        "3 apples",
        "1,000 dollars",
        "5 cm",
        "-3 degrees",
        "50%",
        "$50",
        "3 out of the box",
    ),
    *("$5/hour", "5 m", "Option 3", "about 7", "12 - a dozen", "5 million", "Rs50"),
]


@pytest.mark.parametrize("answer", EXPRESSIONS)
def test_an_expression_with_one_number_is_not_that_number(answer):
    (number,) = re.findall("[0-9]", answer) if answer != "t/4 + 1" else ["4"]
    for reply in ("\\boxed{{{}}}", "The answer is {}"):
        assert is_correct(reply.format(answer), answer)
        assert not is_correct(reply.format(number), answer)
        assert not is_correct(reply.format(answer), number)


@pytest.mark.parametrize("answer", QUANTITIES)
def test_a_quantity_is_its_number_and_itself(answer):
    number = "".join(re.findall("[-0-9]", answer.replace(" - ", "")))
    for reply in ("\\boxed{{{}}}", "The answer is {}"):
        assert is_correct(reply.format(answer), answer)
        assert is_correct(reply.format(number), answer)
        assert not is_correct(reply.format(number + "1"), answer)


@pytest.mark.parametrize("answer", QUANTITIES[:9])
def test_a_number_with_a_unit_in_a_box_is_that_number(answer):
    number = "".join(re.findall("[-0-9]", answer))
    assert is_correct(f"\\boxed{{{answer}}}", number)
    assert answer_key(f"\\boxed{{{answer}}}") == number


def test_replies_to_one_question_vote_alike_where_their_answers_are_equal():
    texts = ["\\boxed{x/2}", "\\boxed{0.5x}", "\\boxed{x}", "", "The answer is 1/2.", "so it is 0.5"]
    assert CHECKS["math"].votes(texts) == ["x/2", "x/2", "x", None, "1/2", "1/2"]
    assert CHECKS["exact"].votes(texts) == [CHECKS["exact"].vote(text) for text in texts]


@given(st.lists(st.integers(-20, 20).map(lambda number: f"The answer is {number}."), max_size=6))
def test_numbers_vote_together_as_each_by_itself(texts):
    for check in CHECKS.values():
        assert check.votes(texts) == [check.vote(text) for text in texts]


@given(st.integers(-9999, 9999), st.integers(-9999, 9999))
def test_numbers_that_vote_alike_are_graded_alike(one, other):
    texts = [f"The answer is {number}." for number in (one, other)]
    assert (answer_key(texts[0]) == answer_key(texts[1])) == is_correct(texts[0], str(other))


@pytest.mark.parametrize("piece", ["(", "([", "*(", "(A", "\\text{", "answer is ", "\\boxed{"])
def test_a_choice_is_read_in_linear_time(piece):
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    CHOICE.vote(text)
    EXACT.vote(text)
    assert time.process_time() - start < 2.0


def test_a_function_of_the_users_own_grades(tmp_path):
    own = tmp_path / "own_check.py"
    own.write_text("def same_length(text, answer):\n    return len(text) == len(answer)\nBAD = 3\n")
    check = find_check(f"{own}:same_length")
    assert check.is_right("abc", "xyz")
    assert not check.is_right("abc", "x")
    with pytest.raises(ValueError, match="is no function"):
        find_check(f"{own}:BAD")


def test_a_grader_must_say_yes_or_no(tmp_path):
    own = tmp_path / "vague_check.py"
    own.write_text("def vague(text, answer):\n    return 0.7\n")
    with pytest.raises(ValueError, match=r"must return True or False; got 0\.7"):
        find_check(f"{own}:vague").is_right("a", "b")


def test_an_unknown_check_names_those_there_are():
    with pytest.raises(ValueError, match="grader must be one of math, exact, choice, or your own"):
        find_check("maths")
