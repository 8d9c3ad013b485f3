"""docs/serve.md says what the command does."""

import chz
from pages import codes, documented_options, page, tables

from viva.recipes.agent import Config
from viva.recipes.config import RecipeConfig
from viva.recipes.serve import ServeOptions
from viva.serve.bodies import ChatBody, CompletionBody

PAGE = page("serve.md")


def test_every_option_is_documented_with_its_default() -> None:
    documented = {name: default for name, (default, _) in documented_options(PAGE).items()}
    assert documented == {name: str(value) for name, value in chz.asdict(ServeOptions()).items()}


def test_every_option_of_an_agent_is_documented_with_its_default() -> None:
    own = chz.chz_fields(Config).keys() - chz.chz_fields(RecipeConfig).keys() | {"group_size"}
    rows = {codes(row[0])[0]: codes(row[1]) for table in tables(PAGE, "agent") for row in table}
    assert rows.keys() == own
    values = chz.asdict(Config(command="x"))
    assert all(default == [str(values[name])] for name, default in rows.items() if name != "command")


def test_every_field_of_a_request_is_named() -> None:
    extensions = {name for table in tables(PAGE, "field") for row in table for name in codes(row[0])}
    assert extensions == {"return_token_ids", "prompt_logprobs", "top_k"}
    fields = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    assert fields - set(codes(PAGE)) == {"user", "model", "messages", "prompt"}
