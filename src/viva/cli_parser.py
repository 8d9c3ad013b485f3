"""The arguments of the ``viva`` command and its subcommands."""

import argparse
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from viva import __version__


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


def parser() -> argparse.ArgumentParser:
    """All subcommands with their arguments; the options of recipes are read by the recipes."""
    top = _Parser(
        prog="viva",
        description="Train language models by letting them argue, judge one another and learn from it.",
        epilog="'viva COMMAND --help' explains a command.",
    )
    top.add_argument("--version", action="version", version=f"viva {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run a recipe, or a protocol of your own: viva train RECIPE key=value ...",
        description="Run a recipe. 'viva train RECIPE --help' lists its options; config=FILE takes them from a file, "
        "which may be a run's config.json. path.py:PROTOCOL trains a conversation of your own.",
    )
    train.add_argument(
        "recipe", metavar="RECIPE", help="a name that 'viva recipes' lists, or path.py:PROTOCOL"
    )
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
    return top


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
