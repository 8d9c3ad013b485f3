"""An independent reader of the built-in policy's word problems."""

import re


def answer_to(question: str) -> str:
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    value = numbers[0] * numbers[1] if "boxes" in question else numbers[0]
    rest = numbers[2:] if "boxes" in question else numbers[1:]
    words = re.findall(r"buys|gives away", question)
    for word, number in zip(words, rest, strict=True):
        value += number if word == "buys" else -number
    return str(value)
