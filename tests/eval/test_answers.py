import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.eval.answers import is_correct


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
    ],
)
def test_a_right_answer_is_recognised(text, answer):
    assert is_correct(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("15", "51"),
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
        (r"\boxed{\frac{1}{0}}", "0"),
        (r"\boxed{\frac{1}{2}\frac{1}{2}}", "1/4"),
    ],
)
def test_a_wrong_or_missing_answer_is_not(text, answer):
    assert not is_correct(text, answer)


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


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "the answer is ", "1", "1,", "-1 ", "#### ", "/", "."])
def test_a_megabyte_is_read_in_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    is_correct(text, "3")
    assert time.process_time() - started < 3
