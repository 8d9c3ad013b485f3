"""The ``viva`` command: train a recipe; report on a run, score or estimate it again; list recipes, check a protocol.

Nothing heavy is imported here; each command imports what it needs when it runs.
"""

import argparse
import difflib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from viva.cli_parser import parser

Command = Callable[[argparse.Namespace], int]

_NOBODY_READS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process if ``None``.

    Returns:
        Exit status: 0, 2 after a mistake in the arguments, or 141 where nobody reads the output any more (a shell's
        status of a process that ends so).
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # what is left in the buffer would fail once more when the interpreter closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Command] = {
        "train": _train,
        "eval": _eval,
        "report": _report,
        "export": _export,
        "cost": _cost,
        "doctor": _doctor,
        "view": _view,
        "rescore": _rescore,
        "estimate": _estimate,
        "recipes": _recipes,
        "protocol": _protocol,
        "cookbook": _cookbook,
    }
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        return _mistake(_unknown("command", arguments[0], list(commands)))
    if "--" in arguments:
        return _mistake(
            "'--' stands for nothing here; leave it out, and write a path that begins with - as ./-NAME"
        )
    if any("~" in argument for argument in arguments):
        from viva.recipes.config import check_home

        try:
            for argument in arguments:
                check_home(argument)
        except ValueError as error:
            return _mistake(str(error))
    options = parser().parse_args(arguments)
    if options.command is None:
        parser().print_help()
        return 0
    return commands[options.command](options)


def _train(options: argparse.Namespace) -> int:
    from viva.recipes.programs import RECIPES, train_recipe, unknown_recipe

    recipe, arguments = str(options.recipe), list(options.options)
    if ":" in recipe:  # an object of the user's code
        return train_recipe("protocol", [f"protocol={recipe}", *arguments])
    if recipe.replace("-", "_") not in RECIPES:
        return _mistake(unknown_recipe(recipe))
    return train_recipe(recipe.replace("-", "_"), arguments)


def _report(options: argparse.Namespace) -> int:
    from viva.view.report import write_report

    try:
        path = write_report(options.run, options.output, second=options.second)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write(f"{path}\n")
    return 0


def _view(options: argparse.Namespace) -> int:
    from viva.view.files import runs_text
    from viva.view.server import serve

    try:
        if not options.runs:
            _write(f"{runs_text(Path())}\n")
            return 0
        serve(options.runs, port=options.port, open_browser=options.open, say=_say_as_it_is)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    return 0


def _say_as_it_is(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # an address with its token, for whoever sits here
    sys.stdout.flush()


def _write(text: str) -> None:
    from viva.run.secrets import printable

    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _export(options: argparse.Namespace) -> int:
    from viva.recipes.config import parse_options
    from viva.recipes.export import ExportOptions, export_run
    from viva.threads import prepare_threads

    prepare_threads()
    chosen = parse_options(ExportOptions, options.options)
    try:
        written = export_run(options.run, chosen)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write("".join(f"{path}\n" for path in written))
    return 0


def _cost(options: argparse.Namespace) -> int:
    from viva.recipes.cost import cost_text, parse_cost, recipe_cost, uncounted_options

    try:
        chosen, config = parse_cost(options.options)
        text = cost_text(recipe_cost(config, chosen.text), chosen)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write(text)
    if names := uncounted_options(options.options):
        sys.stderr.write(f"note: without effect on these figures: {', '.join(names)}\n")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from viva.recipes.config import parse_options
    from viva.recipes.doctor import DoctorOptions, examine_engine
    from viva.threads import prepare_threads

    prepare_threads()
    chosen = parse_options(DoctorOptions, options.options)
    import asyncio

    import tinker

    from viva.training.remote import EngineError, explain

    try:
        is_sound = asyncio.run(examine_engine(chosen, lambda text: _write(f"{text}\n")))
    except (ValueError, OSError, EngineError, tinker.TinkerError) as error:
        return _mistake(explain(error, "the engine") or _told(error))
    return 0 if is_sound else 1


def _eval(options: argparse.Namespace) -> int:
    from viva.recipes.config import parse_options
    from viva.recipes.evaluation import EvalOptions
    from viva.threads import prepare_threads

    prepare_threads()
    chosen = parse_options(EvalOptions, options.options)
    import asyncio

    import tinker

    from viva.recipes.evaluation.build import evaluate
    from viva.training.remote import EngineError, explain

    try:
        text = asyncio.run(evaluate(options.target, chosen))
    except (ValueError, OSError, EngineError, tinker.TinkerError) as error:
        return _mistake(explain(error, "the engine") or _told(error))
    _write(text)
    return 0


def _rescore(options: argparse.Namespace) -> int:
    from viva.recipes.config import parse_options
    from viva.view.rescore import RescoreOptions, rescore, rescore_text

    rules = parse_options(RescoreOptions, options.options)
    try:
        result = rescore(options.run, rules)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write(rescore_text(result))
    return 0


def _estimate(options: argparse.Namespace) -> int:
    from viva.recipes.config import parse_options
    from viva.view.estimates import EstimateOptions, estimate_run, estimation_text

    chosen = parse_options(EstimateOptions, options.options)
    try:
        result = estimate_run(options.run, chosen)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write(estimation_text(result))
    return 0


def _recipes(_options: argparse.Namespace) -> int:
    from viva.recipes.programs import recipe_summaries

    for name, summary in recipe_summaries().items():
        _write(f"{name}\n    {summary}\n    viva train {name} key=value ...\n")
    return 0


def _protocol(options: argparse.Namespace) -> int:
    from viva.selfplay.check import check_protocol, find_protocol

    try:
        protocol = find_protocol(options.target, options.agents)
        lines, problems = check_protocol(protocol, options.agents)
    except ValueError as error:
        return _mistake(_told(error))
    _write("\n".join(lines) + "\n")
    if problems:
        return _mistake("\n".join(["the protocol does not work:", *(f"- {problem}" for problem in problems)]))
    return 0


def _cookbook(options: argparse.Namespace) -> int:
    from viva.threads import prepare_threads

    prepare_threads()
    import viva.engine
    from viva.recipes.programs import cookbook_module, cookbook_programs

    module = cookbook_module(options.program)
    if module is None:
        return _mistake(_unknown("program", options.program, cookbook_programs()))
    from tinker_cookbook.cli_utils import runs_path

    try:
        engine = viva.engine.install(
            state_dir=options.states or runs_path("states"),
            device=options.device,
            precision=options.precision,
        )
    except ValueError as error:
        return _mistake(_told(error))
    # the program sees what `python -m` would show it
    sys.argv = [f"viva cookbook {options.program}", *options.options]
    try:
        with engine:
            if module.endswith(".py"):
                runpy.run_path(module, run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        return _mistake(
            f"{options.program} needs a package that is not there: {error}. docs/environments.md lists which extra of "
            "tinker-cookbook brings it"
        )
    return 0


def _unknown(noun: str, value: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(value.replace("-", "_"), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {noun} {value!r}; allowed: {', '.join(allowed)}.{hint}"


def _told(error: BaseException) -> str:
    """What an error says; those of the disk do not say what to do."""
    if isinstance(error, BrokenPipeError):  # no mistake: nobody reads on, see `main`
        raise error
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give another file or folder, or see to this one"
    return str(error)


def _mistake(message: str) -> int:
    from viva.run.secrets import printable

    sys.stderr.write(printable(f"viva: error: {message}\n"))
    return 2


if __name__ == "__main__":
    sys.exit(main())
