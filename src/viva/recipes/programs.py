"""Recipes of Viva and programs of tinker-cookbook by name."""

import ast
import asyncio
import importlib.util
import runpy
import signal
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path

from viva.conversation.messages import unknown
from viva.recipes.config import parse_options
from viva.threads import prepare_threads

RECIPES = (
    "conversation_preference_rl",
    "critique_self_play",
    "math_efficiency",
    "protocol",
    "environment",
    "agent",
    "warmup",
)
"""Names of the recipes. Each is a module of this room with ``Config``, see `RecipeConfig`."""


def recipe_summaries() -> dict[str, str]:
    """First line of the module of every recipe, by the recipe's name; runs no recipe's code."""
    folder = Path(__file__).parent
    return {
        name: (
            ast.get_docstring(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))) or ""
        ).partition("\n")[0]
        for name in RECIPES
    }


def recipe_named(name: str, allowed: Collection[str] = RECIPES) -> tuple[str, dict[str, str]]:
    """The recipe that a name means, and the option that says the user's protocol if the name is one's.

    Raises:
        ValueError: If there is no such recipe among those allowed.
    """
    if ":" in name:  # an object of the user's code
        return "protocol", {"protocol": name}
    recipe = name.replace("-", "_")
    if recipe not in allowed:
        raise ValueError(unknown("recipe", name, allowed, also=", or a protocol as path.py:NAME"))
    return recipe, {}


def train_recipe(recipe: str, argv: Sequence[str] | None) -> int:
    """Run one of `RECIPES` with command-line options (``None``: the process's); see `viva.recipes.common.exit_code`."""
    prepare_threads()
    config = parse_options(import_module(f"viva.recipes.{recipe}").Config, argv, recipe)
    from viva.recipes.common import exit_code, say
    from viva.recipes.loop import run_recipe

    try:
        return asyncio.run(exit_code(run_recipe(config)))
    except KeyboardInterrupt:  # before or after the steps, where `Interrupts` does not listen
        say("interrupted; the run can be resumed", is_error=True)
        return 128 + signal.SIGINT


def cookbook_module(program: str) -> str | None:
    """The module or file that a program's name means, of the cookbook first."""
    if program.endswith(".py"):
        return program if Path(program).is_file() else None
    for name in (f"tinker_cookbook.recipes.{program}", f"tinker_cookbook.{program}", program):
        try:
            spec = importlib.util.find_spec(name)
        except (ModuleNotFoundError, ValueError):  # a package on the way is none, or a name is empty
            continue
        if spec is not None and spec.submodule_search_locations is None:
            return name
    return None


def run_cookbook_program(
    module: str, argv: list[str], *, state_dir: Path | None, device: str | None, precision: str
) -> str | None:
    """Run a program that was written for the tinker SDK on the local engine.

    Args:
        module: From `cookbook_module`.
        argv: Command line that it sees.
        state_dir: For checkpoints; ``None``: beside the cookbook's own runs.
        device: See `viva.engine.install`.
        precision: See `viva.engine.install`.

    Returns:
        The reason why it could not be run; ``None`` if it ran.
    """
    from tinker_cookbook.cli_utils import runs_path

    import viva.engine

    try:
        engine = viva.engine.install(
            state_dir=state_dir or runs_path("states"), device=device, precision=precision
        )
    except ValueError as error:
        return str(error)
    sys.argv = argv  # the program sees what `python -m` would show it
    try:
        with engine:
            if module.endswith(".py"):
                runpy.run_path(module, run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        return (
            f"{module} needs a package that is not there: {error}. docs/environments.md lists which extra of "
            "tinker-cookbook brings it"
        )
    return None


def cookbook_programs() -> list[str]:
    """Recipes of the cookbook that can be run; none of their code runs here."""
    import tinker_cookbook.recipes

    folders = [Path(folder) for folder in tinker_cookbook.recipes.__path__]
    return sorted(
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for folder in folders
        for path in folder.rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    )
