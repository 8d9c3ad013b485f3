"""Options of ``viva screen``, and beside them those of a recipe: the run that is planned.

Nothing heavy is loaded here, so that ``--help`` and mistakes are told at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chz

from viva.conversation.messages import unknown
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
from viva.recipes.protocol import Config as ProtocolConfig
from viva.recipes.protocol import ConversationConfig
from viva.selfplay.user_code import is_target

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

Planned = MathConfig | ConversationConfig
"""The configuration of a run that is planned."""


def parse_screen(argv: Sequence[str]) -> tuple[ScreenOptions, Planned | None]:
    """Options of ``viva screen``, and the configuration of the recipe that they name, which has all other options.

    Raises:
        SystemExit: See `viva.recipes.config.parse_options`.
        ValueError: If there is no such recipe.
    """
    given = {option_name(text): text.partition("=")[2] for text in argv}
    name = given.get("recipe") or _named_in(given.get("config"))
    if name is None:
        return parse_options(ScreenOptions, argv), None
    recipe, protocol = _recipe(name)
    config_class = ANSWERING[recipe]
    own = [text for text in argv if option_name(text) in {*chz.chz_fields(ScreenOptions), "help"}]
    options = parse_options(ScreenOptions, own)
    theirs = [text for text in argv if text not in own or option_name(text) in _shared(config_class)]
    _check_names([option_name(text) for text in theirs], config_class)
    theirs += [f"{key}={value}" for key, value in protocol.items()]
    config = parse_options(config_class, theirs, recipe)
    return _as_planned(options, recipe, config), config


def screen_options(values: Mapping[str, Any]) -> tuple[ScreenOptions, Planned | None]:
    """The same from Python values, of which ``recipe`` may be a `Protocol`; `ValueError` if there is a mistake."""
    name = values.get("recipe") or _named_in(values.get("config"))
    if name is None:
        return make_options(ScreenOptions, values), None
    recipe, protocol = _recipe(str(name))
    config_class = ANSWERING[recipe]
    own = {name: value for name, value in values.items() if name in chz.chz_fields(ScreenOptions)}
    shared = _shared(config_class)
    theirs = {name: value for name, value in values.items() if name not in own or name in shared}
    _check_names(theirs, config_class)
    named = theirs.pop("config", None) or {}
    if isinstance(named, (str, Path)):
        named = read_options(Path(named).expanduser(), config_class, recipe)
    config = make_options(config_class, {**named, **theirs, **protocol})
    return _as_planned(make_options(ScreenOptions, own), recipe, config), config


def _named_in(config: object) -> str | None:
    """The recipe that a file of options names."""
    return recipe_of(Path(config).expanduser()) if isinstance(config, (str, Path)) else None


def _recipe(name: str) -> tuple[str, dict[str, str]]:
    """The recipe's name, and the option that says the user's protocol if it is one."""
    if is_target(name):
        return "protocol", {"protocol": name}
    recipe = name.replace("-", "_")
    if recipe not in ANSWERING:
        raise ValueError(unknown("recipe", name, tuple(ANSWERING), also=", or a protocol as path.py:NAME"))
    return recipe, {}


def _shared(config_class: type[Planned]) -> set[str]:
    """Options of a screening and of a recipe; the model is not: of an adapter it is the base."""
    return (chz.chz_fields(ScreenOptions).keys() & chz.chz_fields(config_class).keys()) - {"model_name"}


def _check_names(names: Iterable[str], config_class: type[Planned]) -> None:
    """Refuse names of no option, of a screening or of a recipe."""
    for name in names:
        if name not in chz.chz_fields(config_class) and name != "config":
            raise ValueError(unknown_option(name, config_class, ScreenOptions))


def _as_planned(options: ScreenOptions, recipe: str, config: Planned) -> ScreenOptions:
    """The screening's options as those of the run that is planned, where both have them."""
    # an engine that is not given may be that of a run that is screened
    opened, default = chz.chz_fields(OpenedOptions).keys(), DEFAULTS
    given = {
        name: getattr(config, name)
        for name in _shared(type(config))
        if name not in opened or getattr(config, name) != getattr(default, name)
    }
    return chz.replace(options, recipe=recipe, **given)
