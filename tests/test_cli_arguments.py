"""Every subcommand and every option of each: what is unknown, misplaced or given twice is refused with a suggestion."""

import argparse
import importlib
import sys

import chz
import pytest

import viva.cli
from viva.recipes.config import parse_options
from viva.recipes.programs import RECIPES

# `viva train` runs a module that other tests have loaded
pytestmark = pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")

STRAY = ["no_such_a", "no_such_b", "no_such_c"]


def leaves(parser, names=()):
    """All commands with their parsers, down to the last subcommand."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield names, parser
    for action in nested:
        for name, each in action.choices.items():
            yield from leaves(each, (*names, name))


COMMANDS = dict(leaves(viva.cli.parser()))
UNCOUNTED = ("agent", "environment", "warmup")
"""Recipes whose cost nobody knows."""


def takes_options(names):
    """Whether the command's last arguments are options of the form name=value, and not another program's."""
    return names != ("cookbook",) and any(
        action.nargs == argparse.REMAINDER for action in COMMANDS[names]._actions
    )


def calls(names):
    """The command with something in each place that needs it; `train` and `cost` once for every recipe."""
    if names == ("train",):
        return [[*names, recipe] for recipe in RECIPES]
    if names == ("cost",):
        return [[*names, f"recipe={recipe}"] for recipe in RECIPES if recipe not in UNCOUNTED]
    places = [action for action in COMMANDS[names]._actions if not action.option_strings]
    return [[*names, *("nowhere" for place in places if place.nargs in (None, "*", "+"))]]


ALL_CALLS = [pytest.param(names, call, id=" ".join(call)) for names in COMMANDS for call in calls(names)]


def refused(capsys, *arguments):
    """What is said of arguments that end the program with status 2."""
    capsys.readouterr()
    try:
        status = viva.cli.main(arguments)
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    assert status == 2, told
    assert "error: " in told.err
    assert "Traceback" not in told.err
    return told.err


def test_all_commands_are_walked():
    assert {("train",), ("view",), ("protocol", "check")} <= set(COMMANDS)
    assert len(COMMANDS) >= 11


@pytest.mark.parametrize(("names", "call"), ALL_CALLS)
def test_what_a_command_does_not_know_is_refused(names, call, capsys):
    assert "--no-such" in refused(capsys, *names, "--no-such", *call[len(names) :])
    assert "'--'" in refused(capsys, *call, "--", "seed=1")
    if names == ("cookbook",):
        return  # what stands behind is the program's
    assert "--no-such" in refused(capsys, *call, "--no-such")
    assert "no-such" in refused(capsys, *call, "--no-such=1")
    told = refused(capsys, *call, *STRAY)
    assert any(stray in told for stray in STRAY) or "nowhere" in told  # as many runs as are given
    if takes_options(names):
        assert "unknown option 'no_such'" in refused(capsys, *call, "no_such=1")


@pytest.mark.parametrize("names", COMMANDS)
def test_a_flag_is_neither_shortened_nor_misspelt(names, capsys):
    (call, *_) = calls(names)
    flags = [flag for action in COMMANDS[names]._actions for flag in action.option_strings]
    for flag in flags:
        if flag.startswith("--") and flag != "--help":
            assert f"Did you mean {flag!r}?" in refused(capsys, *names, flag[:-1], *call[len(names) :])
            assert f"Did you mean {flag!r}?" in refused(capsys, *names, f"{flag}s", *call[len(names) :])


@pytest.fixture
def option_classes(monkeypatch, capsys):
    """What the options of every command are read into."""
    found = []

    def caught(config_class, argv, recipe=None):
        if config_class.__module__ == "__main__":  # a recipe's, which runs as the main module does
            config_class = importlib.import_module(sys.modules["__main__"].__spec__.name).Config
        found.append(config_class)
        raise SystemExit(2)

    with monkeypatch.context() as patch:
        patch.setattr("viva.recipes.config.parse_options", caught)
        patch.setattr("viva.recipes.programs.parse_options", caught)
        patch.setattr("viva.recipes.cost.parse_options", caught)
        patch.setattr("viva.recipes.evaluation.planned.parse_options", caught)
        for names in COMMANDS:
            if takes_options(names):
                for call in calls(names):
                    with pytest.raises(SystemExit, match="2"):
                        viva.cli.main(call)
    return list(dict.fromkeys(found))


def test_every_option_is_refused_when_misspelt_given_twice_or_without_an_equals_sign(option_classes, capsys):
    assert len(option_classes) >= 7

    def told(config_class, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            parse_options(config_class, arguments)
        return capsys.readouterr().err

    for config_class in option_classes:
        for name in chz.chz_fields(config_class):
            assert f"unknown option '{name}s'. Did you mean '{name}'?" in told(config_class, f"{name}s=1")
            assert f"Did you mean {name}=VALUE" in told(config_class, f"--{name.replace('_', '-')}", "1")
            assert f"Did you mean {name}=VALUE" in told(config_class, name)
            assert f"{name} is given twice" in told(config_class, f"{name}=1", f"--{name}=2")
            assert f"{name} is given twice" in told(config_class, *[f"{name}=1"] * 2)
            assert f"'...{name}=1' is no option" in told(config_class, f"...{name}=1")


def test_options_of_a_demonstration_are_refused_when_given_twice(capsys, tmp_path, monkeypatch):
    from viva.recipes.demo import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["critique_self_play", "max_steps=1", "max_steps=2"])
    assert "max_steps is given twice" in capsys.readouterr().err
