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
from typing import Any, NoReturn

from viva import __version__
from viva.recipes.programs import cookbook_module, cookbook_programs, recipe_summaries, training_module

__all__ = ["main"]

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
    options = _parser().parse_args(arguments)
    if options.command is None:
        _parser().print_help()
        return 0
    return commands[options.command](options)


class _Parser(argparse.ArgumentParser):
    """Refuses what it does not know, with the nearest known name, and takes no abbreviation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As the parent, but nothing is left over."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._left_over(left[0]))
        return found, left

    def error(self, message: str) -> NoReturn:
        """As the parent; options may be left out."""
        super().error(message.removesuffix(", key=value"))

    def _left_over(self, argument: str) -> str:
        known = list(self._option_string_actions)
        close = difflib.get_close_matches(f"--{argument.partition('=')[0].lstrip('-')}", known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"unknown argument {argument!r}.{hint} --help lists all"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="viva",
        description="Train language models by letting them argue, judge one another and learn from it.",
        epilog="'viva COMMAND --help' explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"viva {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run a recipe: viva train RECIPE key=value ...",
        description="Run a recipe. 'viva train RECIPE --help' lists its options.",
    )
    train.add_argument("recipe", metavar="RECIPE", help="a name that 'viva recipes' lists")
    train.add_argument("options", metavar="key=value", nargs=argparse.REMAINDER, help="options of the recipe")
    _add_eval(commands.add_parser)
    report = commands.add_parser(
        "report",
        help="write report.html for a run: viva report RUN [RUN2]",
        description="Write one self-contained HTML file: the curves of a run, the judge over all conversations, some "
        "whole conversations with credit on tokens, and evaluations. A second run is laid over the first one.",
    )
    report.add_argument(
        "run", metavar="RUN", type=Path, help="the run's folder (its log_path), or a result of viva eval"
    )
    report.add_argument("second", metavar="RUN2", type=Path, nargs="?", help="another run, laid over it")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="file to write (default: RUN/report.html)"
    )
    _add_view(commands.add_parser)
    rescore = commands.add_parser(
        "rescore",
        help="other rewards for stored conversations: viva rescore RUN preset=robust",
        description="Score the stored conversations of a run of critique_self_play by other rules, without sampling, "
        "and show how every reward changes and how it goes along with the truth. 'viva rescore RUN --help' lists the "
        "options.",
    )
    rescore.add_argument("run", metavar="RUN", type=Path, help="the run's folder (its log_path)")
    rescore.add_argument("options", metavar="key=value", nargs=argparse.REMAINDER, help="rules to change")
    _add_export(commands.add_parser)
    _add_cost(commands.add_parser)
    _add_doctor(commands.add_parser)
    _add_estimate(commands.add_parser)
    commands.add_parser("recipes", help="list the recipes and how to run them")
    _add_protocol(commands.add_parser)
    _add_cookbook(commands.add_parser)
    return parser


def _add_view(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    view = add_parser(
        "view",
        help="look at a run in the browser, also while it goes on: viva view RUN [RUN2]",
        description="Serve a page about a run on this machine alone: curves, conversations, credit on tokens, "
        "verdicts, evaluations. A second run is laid over the first one's curves.",
    )
    view.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        type=Path,
        help="one or two runs' folders (their log_path); results of viva eval, or a folder of them; none: list runs",
    )
    view.add_argument("--port", metavar="N", type=int, default=0, help="port (default: a free one)")
    view.add_argument("--open", action="store_true", help="open the page in the browser")


def _add_export(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    export = add_parser(
        "export",
        help="weights for peft and transformers: viva export RUN to=FOLDER",
        description="Write the trained adapter, the merged model and a model card for each. 'viva export RUN --help' "
        "lists the options.",
    )
    export.add_argument("run", metavar="RUN", type=Path, help="the run's folder (its log_path)")
    export.add_argument(
        "options", metavar="key=value", nargs=argparse.REMAINDER, help="what to write, and where"
    )


def _add_cost(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    cost = add_parser(
        "cost",
        help="tokens and hours of a configuration: viva cost recipe=RECIPE key=value ...",
        description="Count what a step of a recipe samples, scores and trains, and what that means for models and "
        "accelerators. Options are the recipe's own and those that 'viva cost recipe=RECIPE --help' lists.",
    )
    cost.add_argument("options", metavar="key=value", nargs=argparse.REMAINDER, help="recipe and options")


def _add_doctor(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    doctor = add_parser(
        "doctor",
        help="what an engine really does: viva doctor base_url=... model_name=...",
        description="Put questions with known answers to an engine and show which it answers rightly, and what that "
        "allows. 'viva doctor engine=local --help' lists the options.",
    )
    doctor.add_argument(
        "options", metavar="key=value", nargs=argparse.REMAINDER, help="which engine and model"
    )


def _add_eval(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    evaluation = add_parser(
        "eval",
        help="measure a run or a model: viva eval RUN_OR_MODEL key=value ...",
        description="Ask a policy directly and in conversations, and show what is right, with intervals; with "
        "against=, compare two. 'viva eval RUN_OR_MODEL --help' lists the options.",
    )
    evaluation.add_argument(
        "target",
        metavar="RUN_OR_MODEL",
        help="a run's folder, a hub name, the folder of a model or adapter, tiny, or a result file",
    )
    evaluation.add_argument(
        "options", metavar="key=value", nargs=argparse.REMAINDER, help="what to measure, and how"
    )


def _add_estimate(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    estimate = add_parser(
        "estimate",
        help="every estimator on the stored samples of a run: viva estimate RUN",
        description="Estimate the batches that a run of math_efficiency kept by every estimator, without sampling, "
        "and recommend one. 'viva estimate RUN --help' lists the options.",
    )
    estimate.add_argument("run", metavar="RUN", type=Path, help="the run's folder (its log_path)")
    estimate.add_argument("options", metavar="key=value", nargs=argparse.REMAINDER, help="what to compute")


def _add_protocol(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    protocol = add_parser(
        "protocol",
        help="check a conversation protocol: viva protocol check TARGET",
        description="Check a protocol without a model.",
    )
    actions = protocol.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="validate a protocol and play it with scripted agents",
        description="Validate a protocol, play it with scripted agents (honest, silent, malformed, slow, failing), "
        "and print who sees what and who earns what.",
    )
    check.add_argument(
        "target", metavar="TARGET", help="critique, round_robin, module:ATTRIBUTE or path.py:ATTRIBUTE"
    )
    check.add_argument("--agents", metavar="N", type=int, default=3, help="number of agents (default: 3)")


def _add_cookbook(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    cookbook = add_parser(
        "cookbook",
        help="a program of tinker-cookbook on the local engine: viva cookbook rl_loop key=value ...",
        description="Run a program that was written for the tinker SDK on the local engine. Options of viva's own come "
        "before the program's name.",
    )
    cookbook.add_argument(
        "--states",
        metavar="FOLDER",
        type=Path,
        help="folder for checkpoints (default: 'states' where the cookbook keeps its runs, ~/tinker-runs)",
    )
    cookbook.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    cookbook.add_argument(
        "--precision", default="float32", help="float32, fast or bfloat16 (default: float32)"
    )
    cookbook.add_argument(
        "program",
        metavar="PROGRAM",
        help="a recipe like rl_loop or math_rl.train, a module, or a file like own.py",
    )
    cookbook.add_argument("options", metavar="key=value", nargs=argparse.REMAINDER, help="of the program")


def _train(options: argparse.Namespace) -> int:
    summaries = recipe_summaries()
    recipe = str(options.recipe).replace("-", "_")
    if recipe not in summaries:
        return _mistake(_unknown("recipe", str(options.recipe), list(summaries)))
    # the recipe sees what `python -m` would show it, so both ways are one
    sys.argv = [f"viva train {recipe}", *options.options]
    runpy.run_module(training_module(recipe)[0], run_name="__main__", alter_sys=True)
    return 0


def _report(options: argparse.Namespace) -> int:
    from viva.report import write_report

    try:
        path = write_report(options.run, options.output, second=options.second)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write(f"{path}\n")
    return 0


def _view(options: argparse.Namespace) -> int:
    from viva.report.sources import runs_text
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
    from viva.rl.secrets import printable

    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _export(options: argparse.Namespace) -> int:
    from viva.engine.threads import prepare_threads
    from viva.recipes.config import parse_options
    from viva.recipes.export import ExportOptions, export_run

    prepare_threads()
    chosen = parse_options(ExportOptions, options.options)
    try:
        written = export_run(options.run, chosen)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write("".join(f"{path}\n" for path in written))
    return 0


def _cost(options: argparse.Namespace) -> int:
    from viva.recipes.cost import parse_cost, recipe_cost, uncounted_options
    from viva.recipes.cost_table import cost_text

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
    from viva.engine.threads import prepare_threads
    from viva.recipes.config import parse_options
    from viva.recipes.doctor import DoctorOptions, examine_engine

    prepare_threads()
    chosen = parse_options(DoctorOptions, options.options)
    import asyncio

    import tinker

    from viva.rl.remote import EngineError, explain

    try:
        is_sound = asyncio.run(examine_engine(chosen, lambda text: _write(f"{text}\n")))
    except (ValueError, OSError, EngineError, tinker.TinkerError) as error:
        return _mistake(explain(error, "the engine") or _told(error))
    return 0 if is_sound else 1


def _eval(options: argparse.Namespace) -> int:
    from viva.engine.threads import prepare_threads
    from viva.recipes.config import parse_options
    from viva.recipes.evaluation.options import EvalOptions

    prepare_threads()
    chosen = parse_options(EvalOptions, options.options)
    import asyncio

    import tinker

    from viva.recipes.evaluation.build import evaluate
    from viva.rl.remote import EngineError, explain

    try:
        text = asyncio.run(evaluate(options.target, chosen))
    except (ValueError, OSError, EngineError, tinker.TinkerError) as error:
        return _mistake(explain(error, "the engine") or _told(error))
    _write(text)
    return 0


def _rescore(options: argparse.Namespace) -> int:
    from viva.recipes.config import parse_options
    from viva.report.rescore import RescoreOptions, rescore, rescore_text

    rules = parse_options(RescoreOptions, options.options)
    try:
        result = rescore(options.run, rules)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write(rescore_text(result))
    return 0


def _estimate(options: argparse.Namespace) -> int:
    from viva.recipes.config import parse_options
    from viva.report.estimates import EstimateOptions, estimate_run, estimation_text

    chosen = parse_options(EstimateOptions, options.options)
    try:
        result = estimate_run(options.run, chosen)
    except (ValueError, OSError) as error:
        return _mistake(_told(error))
    _write(estimation_text(result))
    return 0


def _recipes(_options: argparse.Namespace) -> int:
    for name, summary in recipe_summaries().items():
        _write(f"{name}\n    {summary}\n    viva train {name} key=value ...\n")
    return 0


def _protocol(options: argparse.Namespace) -> int:
    from viva.selfplay.check_report import check_protocol, find_protocol

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
    from viva.engine.threads import prepare_threads

    prepare_threads()
    import viva.engine

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
    from viva.rl.secrets import printable

    sys.stderr.write(printable(f"viva: error: {message}\n"))
    return 2


if __name__ == "__main__":
    sys.exit(main())
