"""Every parser of model text in the package, and what models might write: seeds, fragments and floods."""

import random
from collections.abc import Iterator

from chat_formats import renderer_of

from viva.conversation.critiques import read_critiques, read_revision
from viva.conversation.protocol import Reading, View, quote, read_solution
from viva.conversation.records import AgentResponse, Critique, CritiqueReply, ReplyStatus, Revision, Solution
from viva.conversation.rendering import read_reply
from viva.conversation.replies import FoundObject, ObjectScanner, parse_reply
from viva.conversation.tools import find_call
from viva.experts.assisted import leak
from viva.experts.conversation_expert import ends_behind, solution_tokens
from viva.judging.answers import CHECKS, answer_key, extract_answer, is_correct, marked_answer
from viva.judging.ballots import Preference, Tie, pair_of
from viva.judging.comparison import Outcome
from viva.judging.expressions import same_expression
from viva.judging.judge import parse_verdict
from viva.judging.ranking import RankingReply, parse_ranking
from viva.view.report import embedded_json

VIEW = View(agent_id=1, num_agents=4, round_index=1, aliases=(2, 0, 3, 1), persona="")
LETTERS = dict(zip("ABCD", VIEW.aliases, strict=True))
FIELDS = ["solution", "reflection", "evaluation"]
STRATEGIES = {"json", "json_fence", "fence", "embedded", "xml", "text"}


def check_reply(text):
    parsed = parse_reply(text)
    assert type(parsed) is Reading
    assert type(parsed.response) is AgentResponse
    assert sorted(parsed.response.model_dump()) == sorted(FIELDS)
    assert list(parsed.response.model_dump()) == list(AgentResponse.model_fields)
    assert parsed.strategy in STRATEGIES
    assert all(type(value) is str for value in parsed.response.model_dump().values())
    parsed.response.solution.encode()


def check_objects(text):
    scanner = ObjectScanner(text, ("solution", "preference"), "solution")
    found = scanner.first()
    if found is not None:
        assert type(found) is FoundObject
        assert 0 <= found.start < found.end <= len(text)
        assert text[found.start] == "{"
        assert text[found.end - 1] == "}"
        assert found.fields["solution"].strip()


def check_solution(text):
    reading = read_solution(text, VIEW)
    assert type(reading) is Reading
    assert type(reading.response) is Solution
    assert reading.response.solution == text.strip()


def check_revision(text):
    reading = read_revision(text, VIEW)
    assert type(reading.response) is Revision
    assert reading.response.decision in ("revise", "defend", "unstated")
    assert reading.response.solution in text


def check_critiques(text):
    response = read_critiques(text, VIEW).response
    assert type(response) is CritiqueReply
    end = 0
    for critique in response.critiques:
        assert type(critique) is Critique
        assert critique.target in {0, 2, 3}
        assert end <= critique.start < critique.stop <= len(text)
        assert critique.text
        assert critique.text in text[critique.start : critique.stop]
        end = critique.stop
    assert len({critique.target for critique in response.critiques}) == len(response.critiques)


def check_verdict(text):
    assert type(parse_verdict(text)) is Outcome


def check_ranking(text):
    ballot = parse_ranking(text, LETTERS, own="D")
    assert type(ballot) is RankingReply
    pairs = [pair_of(vote) for vote in ballot.preferences]
    assert all(type(vote) in (Preference, Tie) for vote in ballot.preferences)
    assert len(set(pairs)) == len(pairs) <= 3
    assert set().union(*pairs) <= {0, 2, 3}
    assert all(count > 0 for count in ballot.dropped.values())
    assert ballot.status in ReplyStatus


def check_answer(text):
    given, key, marked = extract_answer(text), answer_key(text), marked_answer(text)
    assert given is None or type(given) is str  # the empty text where a box is empty
    assert key is None or (type(key) is str and key)
    assert marked is None or type(marked) is str
    assert text.strip() or given is None
    assert type(is_correct(text, "72")) is bool


def check_checks(text):
    for name in ("exact", "choice"):
        assert type(CHECKS[name].is_right(text, "B")) is bool
        vote = CHECKS[name].vote(text)
        assert vote is None or (type(vote) is str and vote)


def check_expression(text):
    assert type(same_expression(text, "x/2")) is bool


def check_leak(text):
    assert leak(text, ("hint", "\u0130")) in ({"leak": 0.0}, {"leak": 1.0})


def check_quote(text):
    lines = quote(text).splitlines()
    assert lines
    assert all(line.startswith("> ") for line in lines)


def check_page(text):
    assert not set("<>&") & set(embedded_json({text: [text]}))


READ_BY = ("qwen3", "qwen3_5", "glm5_3_low_reasoning", "kimi_k2", "deepseekv3_thinking", "deepseekv4_1")
READ_BY += ("gpt_oss_low_reasoning", "role_colon", "llama3", "nemotron3", "mistral")


def check_reading(text, names=READ_BY):
    name = names[len(text) % len(names)]
    renderer = renderer_of(name)
    text = text.encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )  # no tokens spell half a character
    # control tokens are control tokens here: it is the model that writes
    tokens = renderer.tokenizer.encode(text, add_special_tokens=False)
    stop = renderer.get_stop_sequences()[0]
    tokens = [*tokens, stop] if isinstance(stop, int) else tokens
    for reply in (tokens, tokens[:-1]):
        read, ended = read_reply(renderer, reply)
        assert type(read) is str
        assert type(ended) is bool


def check_place(text):
    renderer = renderer_of("qwen3_instruct")
    solution = parse_reply(text).response.solution
    tokens = renderer.tokenizer.encode(renderer.tokenizer.shield(text), add_special_tokens=False)
    span = solution_tokens(renderer, tokens, text, solution)
    if span is not None:
        assert 0 <= span[0] < span[1] <= len(tokens)
        assert type(ends_behind(renderer, tokens, text, solution, span)) is bool


def check_call(text):
    found = find_call(text)
    assert (found is None) == ("<tool_call>" not in text)
    if found is not None:
        name, arguments, stop = found
        assert type(name) is str
        assert arguments is None or type(arguments) is dict
        assert 0 < stop <= len(text)


PARSERS = {
    "fields of a reply": check_reply,
    "JSON in a text": check_objects,
    "solution": check_solution,
    "revision": check_revision,
    "critiques": check_critiques,
    "call of a tool": check_call,
    "verdict": check_verdict,
    "ranking": check_ranking,
    "final answer": check_answer,
    "answer checks": check_checks,
    "leaked words": check_leak,
    "quotation": check_quote,
    "page": check_page,
    "sampled tokens": check_reading,
}
"""All but two: expressions (math-verify) and the place of a solution, which take too long for a million."""

SEEDS = (
    '{"reflection": "r", "evaluation": "e", "solution": "x = 5"}',
    '```json\n{"solution": "a\\nb", "evaluation": "\\u00e9", "reflection": ""}\n```',
    "<reflection>r</reflection><evaluation>e</evaluation><solution>s</solution>",
    'Well: {"solution": {"solution": "inner"}, "reflection": [1, 2.5e3, null]} so.',
    '{"reasoning": "A is \\"worse\\"", "preference": "B"}',
    "<preference>Tie</preference>",
    "Checked.\nRanking: A > B = C > D",
    "1. Solution B\n2. Solution A\n3. C",
    "Final ranking: A > B, B > C; A = D.",
    "Critique of A: wrong.\n**Critique of Solution C:** fine\nTo D: no.",
    "Revise: x = 5\n so it is.",
    "Thinking.\n**Defend:** the answer is \\boxed{\\frac{1}{2}}",
    "So 3 * 24 = 72.\n#### 72",
    "The answer is (B) 12 apples.",
    "\\boxed{\\{1, 2\\}} or $\\sqrt{2}^{99}$",
    '<think>no</think>yes<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>yes",
)
FRAGMENTS = (
    *('<tool_call>{"name": "add", "arguments": {', "</tool_call>", "NaN"),
    *('{"', '"}', "{", "}", "[", "]", '"', "\\", "\\\\", '\\"', ",", ":", '": "', '", "', '"solution": "'),
    *(
        '{"solution": "',
        '{"preference": "',
        '"reflection":',
        "null",
        "true",
        "-1.5e9",
        "1" * 40,
        "\\u00",
        "\\ud83d",
    ),
    *(
        "```",
        "```json\n",
        "```\n",
        "`",
        "<solution>",
        "</solution>",
        "<evaluation>",
        "</reflection>",
        "<",
        ">",
        "</",
    ),
    *(
        "<preference>",
        "</preference>",
        "A",
        "B",
        "C",
        "D",
        "E",
        "Tie",
        " > ",
        " = ",
        "<",
        ">=",
        ";",
        "Ranking:",
    ),
    *("Solution A", "Agent B", "Final ranking: ", "1. ", "2) ", "- ", "* ", "**", "_", "#", "#### ", "> "),
    *(
        "Critique of A:",
        "Critique of B: x",
        "To C:",
        "to the solution A:",
        "Critique of Zoe:",
        "D:",
        "Revise:",
    ),
    *(
        "Defend: ",
        "I will revise",
        "decision: defend",
        "revised.",
        "\n",
        "\n\n",
        "\r",
        "\r\n",
        "\v",
        "\f",
        "\x85",
    ),
    *("\u2028", "\u2029", "\x1c", "\x00", "\t", " ", "  ", "\ufeff", "\u200b", "\u202e", "\ud800", "\udc00"),
    *(
        "\U0001f642",
        "\u0130",
        "\u00df",
        "\u0660",
        "\uff21",
        "\u0410",
        "e\u0301",
        "\ufdd0",
        "\ue000",
        "x" * 30,
    ),
    *(
        "\\boxed{",
        "\\frac{1}{2}",
        "\\dfrac{",
        "\\text{cm}",
        "\\sqrt{2}",
        "^{99}",
        "^",
        "_",
        "$",
        "%",
        "1/3",
        "1,000.5",
    ),
    *(
        "answer is ",
        "Answer: ",
        "72",
        "-72",
        "0.72",
        "(B)",
        "[C]",
        "**D**",
        "option ",
        "x=5",
        "2y",
        "\\pi",
        "apples",
    ),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
        "<|im_start|>",
        "<|message|>",
        "<|end|>",
    ),
    *("<|channel|>final", "to=functions.f", "<|tool_calls_section_begin|>", "\uff5cDSML\uff5c", "<|eot_id|>"),
    *("\n\nUser:", "hint", "the", "is", "and so on. ", "End of solution A.", "[round 1, agent 0]"),
)


def replies(seed: int, count: int) -> Iterator[str]:
    """What a model might write: heaps of fragments, and good replies with something wrong."""
    rng = random.Random(seed)
    for _ in range(count):
        pieces = rng.choices(FRAGMENTS, k=int(rng.random() ** 2 * 24))
        if rng.random() < 0.5:
            yield "".join(pieces)
            continue
        text = rng.choice(SEEDS)
        for piece in pieces[:4]:
            place = int(rng.random() * (len(text) + 1))
            end = place + int(rng.random() ** 3 * 12)
            text = text[:place] + piece + text[end:]
        yield text


FLOODS = (
    *FRAGMENTS,
    *SEEDS,
    '{"a":',
    '{"a":"',
    '{"solution":"x"}',
    '{"solution":"x",',
    '[{"solution":',
    '{"\\"',
    '{"\\',
    '\\{"',
    "{ ",
    '{"a":{"solution":"',
    "<solution>x</solution><evaluation>",
    "<solution>x",
    "<preference>",
    "<preference>A",
    "```json {",
    "```{",
    "``",
    "A > B\n",
    "A>",
    "A > ",
    "A>B,",
    "1. A\n2. B\n",
    "1. A\n",
    "A>B>C>D>E>F>G>H>I>J>K>L>M>N>O>P>Q>R>S>T>U>V>W>X>Y>Z\n",
    "Ranking: ",
    "Critique of the ",
    "Critique of A:\n",
    "Critique of A: x\n",
    "Critique of the solution the agent ",
    "i\n",
    "I \n",
    "I will\n",
    "Revise my the solution ",
    "Revise:",
    "Revise \n",
    "**Revise",
    " \n",
    "\t",
    "\\frac{",
    "\\boxed{x",
    "answer is",
    "1/",
    "1.",
    "-1",
    "$-1",
    "x^",
    "\\text {",
    "(B",
    "A - ",
    "<tool_call>f ",
    "<tool_call>[",
    "<tool_call>{}</tool_call>",
    "<|message|>x<|end|>",
    "<|channel|>final<|message|>",
    "<|constrain|> ",
    "\u0130",
)
"""What a reply may be full of."""


def flood(unit: str, size: int) -> str:
    """A text of a size, full of one thing."""
    return (unit * (size // len(unit) + 1))[:size]
