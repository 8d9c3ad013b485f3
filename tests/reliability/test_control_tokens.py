"""Whatever stands in a message, the control tokens of a prompt are those of the chat format, and no letter is lost.

Every chat format that `load_renderer` accepts x every added token of its tokenizer, special or not x six places in a
text x every field of every prompt of the package.
"""

import random
from pathlib import Path

import pytest
from chat_formats import COOKBOOK, FORMATS, added_tokens, renderer_of
from tinker_cookbook import renderers

from viva.conversation.critiques import critique_instruction, critique_messages, shown
from viva.conversation.guard import GuardedTokenizer
from viva.conversation.protocol import View, shown_solution
from viva.conversation.records import AgentResponse, ReplyStatus, Turn
from viva.conversation.rendering import build_prompt, direct_messages
from viva.experts.assisted import RIGHT_FEEDBACK
from viva.judging.comparison import JUDGE_SYSTEM_PROMPT, VERDICT_PREFIX, judge_messages
from viva.selfplay.round_robin import round_robin_protocol

SEED = 6
pytestmark = pytest.mark.filterwarnings(
    "ignore:use_system_prompt=True but messages already start:UserWarning"
)
PLACES = ("{}", "{}b", "a{}", "a {} b", "{0}{0}", "a\n{}\nb")


def said(**fields):
    response = AgentResponse(**({"reflection": "r", "evaluation": "e", "solution": "s"} | fields))
    return Turn(agent_id=1, round_index=0, prompt="p", text="t", response=response, status=ReplyStatus.OK)


def view_of(persona):
    return View(agent_id=0, num_agents=2, round_index=1, aliases=(0, 1), persona=persona)


def turn(*, question="q", persona="the Critic.", **fields):
    protocol = round_robin_protocol(2)
    return protocol.messages(protocol.prompt(question, [said(**fields)], view_of(persona)))


def judged(*, question="q", a="x", b="y", system=JUDGE_SYSTEM_PROMPT):
    return judge_messages(question, a, b, system)


def attempted(*, attempt="x", feedback=RIGHT_FEEDBACK, hint=None):
    system = [] if hint is None else [{"role": "system", "content": hint}]
    return [
        *system,
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": attempt},
        {"role": "user", "content": feedback},
    ]


FIELDS = {
    "question": lambda text: turn(question=text),
    "question alone": lambda text: direct_messages(text),
    "persona": lambda text: turn(persona=text),
    "another's reflection": lambda text: turn(reflection=text),
    "another's evaluation": lambda text: turn(evaluation=text),
    "another's solution": lambda text: turn(solution=text),
    "judged question": lambda text: judged(question=text),
    "judged solution A": lambda text: judged(a=text),
    "judged solution B": lambda text: judged(b=text),
    "judge's system prompt": lambda text: judged(system=text),
    "solution to criticise": lambda text: critique_messages("q", [shown_solution("A", text)], "go"),
    "critique": lambda text: critique_messages("q", [shown("Critique of it", text)], "go"),
    "critic's persona": lambda text: critique_messages("q", [], critique_instruction(view_of(text))),
    "hint or condition": lambda text: attempted(hint=text),
    "first attempt": lambda text: attempted(attempt=text),
    "feedback": lambda text: attempted(feedback=text),
    "first message of the assistant": lambda text: [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "q"},
    ],
    "parts of a message": lambda text: [{"role": "user", "content": [{"type": "text", "text": text}]}],
}


def controls(renderer, tokens):
    return [token for token in tokens if token in renderer.tokenizer.control_ids]


def probed(messages):
    """The messages with a character of its own for each content, and the contents."""
    contents, bare = [], []
    for message in messages:
        content = message["content"]
        contents.append(content if isinstance(content, str) else content[0]["text"])
        bare.append({"role": message["role"], "content": chr(0xE000 + len(bare))})
    return bare, contents


def expected_text(frame, contents):
    for place, content in enumerate(contents):
        frame = frame.replace(chr(0xE000 + place), content)
    return frame


@pytest.fixture(scope="module")
def frames():
    """Prompts of probes by format and roles: text and control tokens."""
    known = {}

    def frame(name, bare, prefill):
        key = (name, tuple(message["role"] for message in bare), prefill)
        if key not in known:
            renderer = renderer_of(name)
            tokens = build_prompt(renderer, bare, prefill=prefill).to_ints()
            known[key] = str(renderer.tokenizer.decode(tokens)), controls(renderer, tokens)
        return known[key]

    return frame


def check(name, token, place, field, frames):
    renderer = renderer_of(name)
    messages = FIELDS[field](place.format(token))
    prefill = VERDICT_PREFIX if field.startswith("judge") else None
    bare, contents = probed(messages)
    text, control = frames(name, bare, prefill)
    tokens = build_prompt(renderer, messages, prefill=prefill).to_ints()
    where = (name, token, place, field)
    assert controls(renderer, tokens) == control, where
    if "folded" not in name:
        stripped = [
            content.strip() for content in contents
        ]  # some formats leave white space around a text out
        known = (expected_text(text, contents), expected_text(text, stripped))
        assert str(renderer.tokenizer.decode(tokens)) in known, where


def test_the_formats_are_all_that_the_cookbook_has():
    source = Path(renderers.__file__).read_text(encoding="utf-8")
    known = {line.split('"')[1] for line in source.splitlines() if "name == " in line}
    assert known - set(COOKBOOK) == {"tml_v0"}


def cases(name, fields_each, rng):
    for token in added_tokens(name):
        for place in PLACES:
            for field in rng.sample(sorted(FIELDS), fields_each):
                if (name, field) != ("nemotron3_low_thinking", "parts of a message"):  # it refuses them
                    yield name, token, place, field


def test_no_text_becomes_control_in_any_field_of_any_format(trials, ledger, frames):
    rng = random.Random(SEED)
    chosen = [case for name in FORMATS for case in cases(name, trials(short=1, full=6), rng)]
    chosen = rng.sample(chosen, min(len(chosen), trials(short=2_000, full=10**9)))
    for case in chosen:
        check(*case, frames)
    tokenizers = {tuple(added_tokens(name)) for name in FORMATS}
    ledger(
        "6 text is never control",
        "no text becomes a control token, and none is lost, in any field of any chat format",
        trials=len(chosen),
        seed=SEED,
        figures=f"{len(FORMATS)} chat formats, {len(set().union(*tokenizers))} added tokens, {len(PLACES)} places, "
        f"{len(FIELDS)} fields",
    )


@pytest.mark.parametrize("name", ["qwen3_instruct", "llama3", "kimi_k2", "mistral", "gemma"])
def test_the_check_fails_without_the_guard(monkeypatch, frames, name):
    token = {"mistral": "[INST]", "gemma": "<start_of_turn>", "llama3": "<|eot_id|>"}.get(name, "<think>")
    check(name, token, PLACES[0], "another's solution", frames)
    monkeypatch.setattr(GuardedTokenizer, "shield", lambda self, text: text)
    with pytest.raises(AssertionError):
        check(name, token, PLACES[0], "another's solution", frames)
