"""Every family's prompts are those of its own chat template, and every family trains."""

import pickle

import pytest
from letters import Letters
from random_models import CONTROL, make_model, make_tokenizer
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder

from viva.conversation.guard import GuardedTokenizer
from viva.conversation.rendering import ChatTemplateRenderer, build_prompt, load_renderer, read_reply
from viva.engine import LocalServiceClient
from viva.run.folder import prepare_run_folder
from viva.training.loop import LoopConfig, Training, train
from viva.training.sampling import Sampling
from viva.training.update import UpdateConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma")
STOPS = {"llama": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}
NO_SYSTEM = ("mistral", "gemma")
BY_TEMPLATE = ("qwen2", *NO_SYSTEM)
"""Where tinker-cookbook has no renderer that writes the same; Qwen2's template has a default system message."""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "Really?"},
]


def template_tokens(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [2, 4])
def test_prompts_are_those_of_the_familys_chat_template(family, length):
    tokenizer = make_tokenizer(family)
    renderer = load_renderer(tokenizer, model_name=f"nobody/{family}")
    assert isinstance(renderer, ChatTemplateRenderer) == (family in BY_TEMPLATE)
    messages = TALK[:length]
    if family in NO_SYSTEM:
        system, first, *rest = messages
        expected = [{"role": "user", "content": f"{system['content']}\n\n{first['content']}"}, *rest]
    else:
        expected = messages
    assert build_prompt(renderer, messages).to_ints() == template_tokens(tokenizer, expected)
    assert build_prompt(renderer, messages[1:]).to_ints() == template_tokens(tokenizer, messages[1:])
    stop = tokenizer.convert_tokens_to_ids(STOPS.get(family, "<|im_end|>"))
    assert renderer.get_stop_sequences() == [stop]
    reply = [*tokenizer.encode("So it is.", add_special_tokens=False), stop]
    assert read_reply(renderer, reply) == ("So it is.", True)
    assert read_reply(renderer, reply[:-1]) == ("So it is.", False)


@pytest.mark.parametrize("family", BY_TEMPLATE)
def test_text_cannot_forge_a_turn_of_the_template(family):
    tokenizer = make_tokenizer(family)
    renderer = load_renderer(tokenizer, model_name="x")
    control = set(tokenizer.convert_tokens_to_ids(CONTROL[family]))

    def count(text):
        prompt = build_prompt(renderer, [{"role": "user", "content": text}]).to_ints()
        return sum(token in control for token in prompt)

    forged = "".join(CONTROL[family])
    assert count(f"a{forged}b{forged}") == count("ab")
    again = pickle.loads(pickle.dumps(renderer))
    assert again.get_stop_sequences() == renderer.get_stop_sequences()
    assert (
        build_prompt(again, TALK, prefill="{").to_ints()
        == build_prompt(renderer, TALK, prefill="{").to_ints()
    )


def test_a_template_that_writes_the_date_is_not_used_where_the_family_has_a_renderer():
    tokenizer = make_tokenizer("llama")
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    tokenizer.chat_template = f"{dated}{tokenizer.chat_template}"
    renderer = load_renderer(tokenizer, model_name="x")
    assert not isinstance(renderer, ChatTemplateRenderer)
    assert build_prompt(renderer, TALK).to_ints() != template_tokens(tokenizer, TALK)
    renderer = load_renderer(tokenizer, model_name="x", renderer_name="chat_template")
    assert build_prompt(renderer, TALK).to_ints() == template_tokens(tokenizer, TALK)


def test_a_template_without_control_tokens_is_not_used():
    tokenizer = make_tokenizer("mistral")
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    assert isinstance(load_renderer(tokenizer, model_name="x"), RoleColonRenderer)
    with pytest.raises(ValueError, match="no control token: text could forge it"):
        load_renderer(tokenizer, model_name="x", renderer_name="chat_template")
    tokenizer.chat_template = None
    assert isinstance(load_renderer(tokenizer, model_name="x"), RoleColonRenderer)
    with pytest.raises(ValueError, match="has no chat template"):
        load_renderer(tokenizer, model_name="x", renderer_name="chat_template")


def test_messages_that_a_template_refuses_are_told():
    tokenizer = make_tokenizer("gemma")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if m.role == 'system' %}",
        "{% if loop.index0 % 2 != (m.role == 'assistant') | int %}{{ raise_exception('must alternate') }}{% endif %}"
        "{% if m.role == 'system' %}",
    )
    renderer = ChatTemplateRenderer(GuardedTokenizer(tokenizer))
    with pytest.raises(ValueError, match="refuses messages with the roles user, user: must alternate"):
        build_prompt(renderer, [TALK[1], TALK[1]])


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_samples_and_trains(tmp_path, family):
    model = make_model(tmp_path / "model", family, names_labels=False)
    folder = prepare_run_folder(tmp_path / "run", behavior="raise", config={}).open()
    client = LocalServiceClient(
        device="cpu", state_dir=folder.state_dir, one_run=True
    ).create_lora_training_client(str(model), rank=4, seed=0)
    renderer = load_renderer(client.get_tokenizer(), model_name=str(model))
    config = LoopConfig(
        update=UpdateConfig(learning_rate=0.01), sampling=Sampling(max_tokens=12), eval_every=0
    )
    data = Letters(renderer, 1, ProblemGroupBuilder)
    assert await train(Training(config=config, client=client, dataset=data, folder=folder))
    (metrics,) = folder.log.metrics()
    assert metrics["optim/logprob_gap_max"] < 1e-3
    assert metrics["optim/grad_norm"] > 0
    assert metrics["rollout/sampled_tokens"] > 0
