"""Options of ``viva screen``, and beside them those of a recipe: the run that is planned.

Nothing heavy is loaded here, so that ``--help`` and mistakes are told at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import chz

from viva.recipes.config import (
    make_options,
    option_name,
    parse_options,
    read_options,
    recipe_of,
    unknown_option,
)
from viva.recipes.conversation_preference_rl import Config as PreferenceConfig
from viva.recipes.critique_self_play import Config as CritiqueConfig
from viva.recipes.evaluation import DEFAULTS, OpenedOptions, ScreenOptions
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.programs import recipe_named
from viva.recipes.protocol import Config as ProtocolConfig
from viva.recipes.protocol import ConversationConfig

CONVERSATIONS: dict[str, type[ConversationConfig]] = {
    "conversation": PreferenceConfig,
    "critique": CritiqueConfig,
    "protocol": ProtocolConfig,
}
KIND_OF = {
    "conversation_preference_rl": "conversation",
    "critique_self_play": "critique",
    "protocol": "protocol",
}
"""Kind of conversation by recipe."""
ANSWERING: dict[str, type[MathConfig] | type[ConversationConfig]] = {
    "math_efficiency": MathConfig,
    **{recipe: CONVERSATIONS[kind] for recipe, kind in KIND_OF.items()},
}
"""Recipes whose policies answer questions."""

ConfigT = TypeVar("ConfigT")

Planned = MathConfig | ConversationConfig
"""The configuration of a run that is planned."""


_OWN = frozenset({*chz.chz_fields(ScreenOptions), "config", "help"})
"""Names of options of a screening."""


def parse_screen(argv: Sequence[str]) -> tuple[ScreenOptions, Planned | None]:
    """Options of ``viva screen``, and the configuration of the recipe that they name, which has all other options.

    Raises:
        SystemExit: See `viva.recipes.config.parse_options`.
        ValueError: If there is no such recipe.
    """
    given = {option_name(text): text.partition("=")[2] for text in argv}
    named = _named_recipe(given)
    if named is None:
        return parse_options(ScreenOptions, argv), None
    recipe, protocol = named
    config_class = ANSWERING[recipe]
    theirs = [text for text in argv if option_name(text) in _theirs(config_class)]
    theirs += [f"{key}={value}" for key, value in protocol.items()]
    own = [text for text in argv if option_name(text) in _OWN]
    options = parse_options(ScreenOptions, own, beside=config_class)
    config = parse_options(config_class, theirs, recipe, beside=ScreenOptions)
    return _as_planned(options, given, recipe, config), config


def screen_options(values: Mapping[str, Any]) -> tuple[ScreenOptions, Planned | None]:
    """The same from Python values, of which ``recipe`` may be a `Protocol`; `ValueError` if there is a mistake."""
    named = _named_recipe(values)
    if named is None:
        return _made(ScreenOptions, values, None, None), None
    recipe, protocol = named
    config_class = ANSWERING[recipe]
    theirs = {name: value for name, value in values.items() if name in _theirs(config_class)} | protocol
    own = {name: value for name, value in values.items() if name in _OWN}
    options = _made(ScreenOptions, own, None, config_class)
    config = _made(config_class, theirs, recipe, ScreenOptions)
    return _as_planned(options, values, recipe, config), config


def _made(
    config_class: type[ConfigT], values: Mapping[str, Any], recipe: str | None, beside: type | None
) -> ConfigT:
    """Options from values, of which ``config`` may hold more."""
    given = dict(values)
    config = given.pop("config", None)
    stored = {} if config is None else read_options(config, config_class, recipe, beside)
    return make_options(config_class, stored | given)


def _named_recipe(given: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """The recipe and the protocol that options name, if they name one; a name of no option is refused then."""
    config = given.get("config")
    name = given.get("recipe") or (None if config is None else recipe_of(config))
    if name is None:
        return None
    recipe, protocol = recipe_named(str(name), ANSWERING)
    for each in given:
        if each not in _OWN | _theirs(ANSWERING[recipe]):
            raise ValueError(unknown_option(each, ANSWERING[recipe], ScreenOptions))
    return recipe, protocol


def _theirs(config_class: type[Planned]) -> set[str]:
    """Names of options of a recipe; the model is none of them: of an adapter it is the base."""
    return (chz.chz_fields(config_class).keys() - {"model_name"}) | {"config"}


def _as_planned(
    options: ScreenOptions, given: Mapping[str, Any], recipe: str, config: Planned
) -> ScreenOptions:
    """The screening's options as those of the run that is planned, where both have them."""
    # an engine that is not given may be that of a run that is screened
    opened, default = chz.chz_fields(OpenedOptions).keys(), DEFAULTS
    shared = {
        name: getattr(config, name)
        for name in chz.chz_fields(ScreenOptions).keys() & _theirs(type(config))
        if name not in opened or getattr(config, name) != getattr(default, name)
    }
    # a file of options names the model that is trained, not the base of the one that is screened
    own = {} if "model_name" in given else {"model_name": None}
    return chz.replace(options, recipe=recipe, **shared, **own)
