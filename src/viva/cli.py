"""The ``viva`` command: train a recipe; report on a run, score or estimate it again; list recipes, check a protocol.

Nothing heavy is imported here; each command imports what it needs when it runs.
"""

import argparse
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from viva import __version__
from viva.conversation.messages import did_you_mean, unknown
from viva.run.secrets import printable
from viva.threads import prepare_threads

Command = Callable[[argparse.Namespace], int | None]
"""Its exit status; ``None`` stands for 0."""
ResultT = TypeVar("ResultT")
_NOBODY_READS = 141  # a shell's status of a process that ends so
_EXPLAIN_THEMSELVES = ("train", "cookbook")
"""Commands that tell the user's mistakes themselves; what they raise is none."""


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
        hint = did_you_mean(f"--{argument.partition('=')[0].lstrip('-')}", known)
        return f"unknown argument {argument!r}.{hint} --help lists all"


class _Argument:
    """An argument of a command, as `argparse.ArgumentParser.add_argument` takes it."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names = names
        self.options = options


def _options(what: str) -> _Argument:
    return _Argument("options", metavar="key=value", nargs=argparse.REMAINDER, help=what)


def parser() -> argparse.ArgumentParser:
    """All subcommands with their arguments."""
    top = _Parser(
        prog="viva",
        description="Train language models by letting them argue, judge one another and learn from it.",
        epilog="'viva COMMAND --help' explains a command.",
    )
    top.add_argument("--version", action="version", version=f"viva {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, summary, description, *arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=description)
        if name == "protocol":
            actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
            command = actions.add_parser(
                "check",
                help="validate a protocol and play it with scripted agents",
                description="Validate a protocol, play it with scripted agents (honest, silent, malformed, slow, "
                "failing), and print who sees what and who earns what.",
            )
        for argument in arguments:
            command.add_argument(*argument.names, **argument.options)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process if ``None``.

    Returns:
        Exit status: 0, 2 after a mistake in the arguments, or 141 where nobody reads the output any more.
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
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        from viva.recipes.programs import RECIPES

        name = arguments[0].replace("-", "_")
        hint = f" 'viva train {name}' runs the recipe of that name." if name in RECIPES else ""
        return _mistake(unknown("command", arguments[0], _COMMANDS) + hint)
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
    prepare_threads()  # commands may load torch before they do anything else
    try:
        return _COMMANDS[options.command][0](options) or 0
    except (ValueError, OSError) as error:
        if options.command in _EXPLAIN_THEMSELVES:
            raise
        return _mistake(_told(error))


def _train(options: argparse.Namespace) -> int:
    from viva.recipes.programs import recipe_named, train_recipe

    try:
        recipe, protocol = recipe_named(options.recipe)
    except ValueError as error:
        return _mistake(str(error))
    return train_recipe(recipe, [*(f"{name}={value}" for name, value in protocol.items()), *options.options])


def _report(options: argparse.Namespace) -> None:
    from viva.view.report import write_report

    _write(f"{write_report(options.run, options.output, second=options.second)}\n")


def _view(options: argparse.Namespace) -> None:
    from viva.loopback import check_packages
    from viva.view.files import runs_text

    if options.runs:
        check_packages("viva view")
        from viva.view.app import serve

        serve(options.runs, port=options.port, open_browser=options.open, say=_say_as_it_is)
    else:
        _write(f"{runs_text(Path())}\n")


def _serve(options: argparse.Namespace) -> None:
    from viva.recipes.serve import ServeOptions, serve_model

    serve_model(options.target, _chosen(ServeOptions, options), _say_as_it_is)


def _say_as_it_is(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # an address with its token, for whoever sits here
    sys.stdout.flush()


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _chosen(config_class: type[ResultT], options: argparse.Namespace) -> ResultT:
    """The options of a command that computes."""
    from viva.recipes.config import parse_options

    return parse_options(config_class, options.options)


def _export(options: argparse.Namespace) -> None:
    from viva.recipes.export import ExportOptions, export_run

    chosen = _chosen(ExportOptions, options)
    _write("".join(f"{path}\n" for path in export_run(options.run, chosen)))


def _cost(options: argparse.Namespace) -> None:
    from viva.recipes.cost import cost_text, parse_cost, recipe_cost, uncounted_options

    chosen, config = parse_cost(options.options)
    _write(cost_text(recipe_cost(config, chosen.text), chosen))
    if names := uncounted_options(config):
        sys.stderr.write(f"note: without effect on these figures: {', '.join(names)}\n")


def _ask_engine(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of work with an engine.

    Raises:
        ValueError: If a mistake or the engine ended it; with what to do.
    """
    import asyncio

    import tinker

    from viva.training.remote import EngineError, explain

    try:
        return asyncio.run(work)
    except (ValueError, OSError, EngineError, tinker.TinkerError) as error:
        raise ValueError(explain(error, "the engine") or _told(error)) from error


def _doctor(options: argparse.Namespace) -> int:
    from viva.recipes.doctor import DoctorOptions, examine_engine

    chosen = _chosen(DoctorOptions, options)
    return 0 if _ask_engine(examine_engine(chosen, lambda text: _write(f"{text}\n"))) else 1


def _eval(options: argparse.Namespace) -> None:
    from viva.recipes.evaluation import EvalOptions

    chosen = _chosen(EvalOptions, options)
    from viva.recipes.evaluation.build import evaluate

    _write(_ask_engine(evaluate(options.target, chosen))[0])


def _screen(options: argparse.Namespace) -> None:
    from viva.recipes.evaluation.planned import parse_screen

    chosen, planned = parse_screen(options.options)
    from viva.recipes.evaluation.screen import screen

    _ask_engine(screen(options.target, options.task, chosen, planned))


def _rescore(options: argparse.Namespace) -> None:
    from viva.recipes.rescore import AskedRescoreOptions, rescore_run
    from viva.view.rescoring import rescore_text

    chosen = _chosen(AskedRescoreOptions, options)
    _write(rescore_text(_ask_engine(rescore_run(options.run, chosen))))


def _estimate(options: argparse.Namespace) -> None:
    from viva.view.estimates import EstimateOptions, estimate_run, estimation_text

    _write(estimation_text(estimate_run(options.run, _chosen(EstimateOptions, options))))


def _recipes(_options: argparse.Namespace) -> None:
    from viva.recipes.programs import recipe_summaries

    for name, summary in recipe_summaries().items():
        _write(f"{name}\n    {summary}\n    viva train {name} key=value ...\n")


def _protocol(options: argparse.Namespace) -> int:
    from viva.selfplay.check import check_protocol, find_protocol

    lines, problems = check_protocol(find_protocol(options.target, options.agents), options.agents)
    _write("\n".join(lines) + "\n")
    if problems:
        return _mistake("\n".join(["the protocol does not work:", *(f"- {problem}" for problem in problems)]))
    return 0


def _cookbook(options: argparse.Namespace) -> int:
    from viva.recipes.programs import cookbook_module, cookbook_programs, run_cookbook_program

    module = cookbook_module(options.program)
    if module is None:
        return _mistake(unknown("program", options.program, cookbook_programs()))
    problem = run_cookbook_program(
        module,
        [f"viva cookbook {options.program}", *options.options],
        state_dir=options.states,
        device=options.device,
        precision=options.precision,
    )
    return 0 if problem is None else _mistake(problem)


def _told(error: BaseException) -> str:
    """Text of an error; errors of the disk get a remedy."""
    if isinstance(error, BrokenPipeError):  # no mistake: nobody reads on, see `main`
        raise error
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give another file or folder, or see to this one"
    return str(error)


def _mistake(message: str) -> int:
    sys.stderr.write(printable(f"viva: error: {message}\n"))
    return 2


_RUN = _Argument("run", metavar="RUN", type=Path, help="the run's folder (its log_path)")
_MODEL = _Argument("target", metavar="MODEL", help="a hub name, GGUF file, folder of a model or run, or tiny")

_COMMANDS: dict[str, tuple[Command, str, str | None, *tuple[_Argument, ...]]] = {
    "train": (
        _train,
        "run a recipe, or a protocol of your own: viva train RECIPE key=value ...",
        "Run a recipe. 'viva train RECIPE --help' lists its options; config=FILE takes them from a file, "
        "which may be a run's config.json. path.py:PROTOCOL trains a conversation of your own.",
        _Argument("recipe", metavar="RECIPE", help="a name that 'viva recipes' lists, or path.py:PROTOCOL"),
        _options("options of the recipe"),
    ),
    "eval": (
        _eval,
        "measure a run or a model: viva eval RUN_OR_MODEL key=value ...",
        "Ask a policy directly and in conversations, and show what is right, with intervals; with "
        "against=, compare two. 'viva eval RUN_OR_MODEL --help' lists the options.",
        _Argument(
            "target",
            metavar="RUN_OR_MODEL",
            help="a run's folder, a hub name, the folder of a model or adapter, tiny, or a result file",
        ),
        _options("what to measure, and how"),
    ),
    "screen": (
        _screen,
        "which reward can teach a model a task: viva screen MODEL TASK key=value ...",
        "Ask a model some hundred problems, greedily and as in training, have it judge its own answers, and tell which "
        "reward can work there, or that none can and why. 'viva screen MODEL TASK --help' lists the options.",
        _MODEL,
        _Argument("task", metavar="TASK", help="a JSONL file, or reasoning_gym:FAMILY,option=value,..."),
        _options("how the problems are asked"),
    ),
    "report": (
        _report,
        "write report.html for a run: viva report RUN [RUN2]",
        "Write one self-contained HTML file: the curves of a run, the judge over all conversations, some "
        "whole conversations with credit on tokens, and evaluations. A second run is laid over the first one.",
        _Argument(
            "run", metavar="RUN", type=Path, help="the run's folder (its log_path), or a result of viva eval"
        ),
        _Argument("second", metavar="RUN2", type=Path, nargs="?", help="another run, laid over it"),
        _Argument(
            "-o", "--output", metavar="FILE", type=Path, help="file to write (default: RUN/report.html)"
        ),
    ),
    "view": (
        _view,
        "look at a run in the browser, also while it goes on: viva view RUN [RUN2]",
        "Serve a page about a run on this machine alone: curves, conversations, credit on tokens, "
        "verdicts, evaluations. A second run is laid over the first one's curves.",
        _Argument(
            "runs",
            metavar="RUN",
            nargs="*",
            type=Path,
            help="one or two runs' folders (their log_path); results of viva eval, or a folder of them; none: list "
            "runs",
        ),
        _Argument("--port", metavar="N", type=int, default=0, help="port (default: a free one)"),
        _Argument("--open", action="store_true", help="open the page in the browser"),
    ),
    "serve": (
        _serve,
        "a model over HTTP for agents and scripts: viva serve MODEL key=value ...",
        "Serve a model to programs on this machine: OpenAI's interface and Tinker's protocol. 'viva serve MODEL "
        "--help' lists the options.",
        _MODEL,
        _options("where and how"),
    ),
    "rescore": (
        _rescore,
        "other rewards for stored conversations: viva rescore RUN preset=robust",
        "Score the stored conversations of a run by another reward, by all of them, or by other rules of critique "
        "self-play, and show how every reward changes and how it goes along with the truth. Nothing is sampled; a "
        "judge or scorer is asked only where one is named. 'viva rescore RUN --help' lists the options.",
        _RUN,
        _options("rules to change"),
    ),
    "export": (
        _export,
        "weights for peft, transformers and llama.cpp: viva export RUN to=FOLDER or to=FILE.gguf",
        "Write the trained adapter and the merged model, or the merged model as a GGUF file, and a model card for "
        "each. 'viva export RUN --help' lists the options.",
        _RUN,
        _options("what to write, and where"),
    ),
    "cost": (
        _cost,
        "tokens and hours of a configuration: viva cost recipe=RECIPE key=value ...",
        "Count what a step of a recipe samples, scores and trains, and what that means for models and "
        "accelerators. Options are the recipe's own and those that 'viva cost recipe=RECIPE --help' lists.",
        _options("recipe and options"),
    ),
    "doctor": (
        _doctor,
        "what an engine really does: viva doctor base_url=... model_name=...",
        "Put questions with known answers to an engine and show which it answers rightly, and what that "
        "allows. 'viva doctor engine=local --help' lists the options.",
        _options("which engine and model"),
    ),
    "estimate": (
        _estimate,
        "every estimator on the stored samples of a run: viva estimate RUN",
        "Estimate the batches that a run of math_efficiency kept by every estimator, without sampling, "
        "and recommend one. 'viva estimate RUN --help' lists the options.",
        _RUN,
        _options("what to compute"),
    ),
    "recipes": (
        _recipes,
        "list the recipes and how to run them",
        None,
    ),
    "protocol": (
        _protocol,
        "check a conversation protocol: viva protocol check TARGET",
        "Check a protocol without a model.",
        _Argument(
            "target", metavar="TARGET", help="critique, round_robin, module:ATTRIBUTE or path.py:ATTRIBUTE"
        ),
        _Argument("--agents", metavar="N", type=int, default=3, help="number of agents (default: 3)"),
    ),
    "cookbook": (
        _cookbook,
        "a program of tinker-cookbook on the local engine: viva cookbook rl_loop key=value ...",
        "Run a program that was written for the tinker SDK on the local engine. Options of viva's own come "
        "before the program's name.",
        _Argument(
            "--states",
            metavar="FOLDER",
            type=Path,
            help="folder for checkpoints (default: 'states' where the cookbook keeps its runs, ~/tinker-runs)",
        ),
        _Argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)"),
        _Argument("--precision", default="float32", help="float32, fast or bfloat16 (default: float32)"),
        _Argument(
            "program",
            metavar="PROGRAM",
            help="a recipe like rl_loop or math_rl.train, a module, or a file like own.py",
        ),
        _options("of the program"),
    ),
}
"""By name: the command, its help, description and arguments; the options of recipes are read by the recipes."""


if __name__ == "__main__":
    sys.exit(main())
