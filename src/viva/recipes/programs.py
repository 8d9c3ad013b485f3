"""Recipes of Viva and programs of tinker-cookbook, found by name; none of their code runs here."""

import ast
import importlib.util
import pkgutil
from pathlib import Path

__all__ = ["cookbook_module", "cookbook_programs", "recipe_summaries", "training_module"]

_TRAINING_MODULES = ("train", "train_rl")
"""What the module of a recipe that runs it may be called."""


def recipe_summaries() -> dict[str, str]:
    """First line of the training module of every recipe, by the recipe's name; runs no recipe's code."""
    import viva.recipes

    summaries: dict[str, str] = {}
    for found in pkgutil.iter_modules(viva.recipes.__path__):
        path = training_module(found.name)[1] if found.ispkg else None
        if path is not None:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            summaries[found.name] = (docstring or "").partition("\n")[0]
    return summaries


def training_module(recipe: str) -> tuple[str, Path | None]:
    """Name and file of the module that runs a recipe; no file if the package is no recipe."""
    for name in _TRAINING_MODULES:
        module = f"viva.recipes.{recipe}.{name}"
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            return module, Path(spec.origin)
    return "", None


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
