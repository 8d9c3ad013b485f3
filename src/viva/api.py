"""The public face: training, evaluation and finished runs from Python."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast, overload

import chz

from viva.conversation.messages import listed
from viva.conversation.protocol import Protocol
from viva.judging.records import ConversationRecord, Transcript
from viva.recipes.config import make_options, read_options
from viva.recipes.programs import recipe_named
from viva.run.files import note_written, write_atomic
from viva.selfplay.user_code import remember
from viva.threads import prepare_threads

if TYPE_CHECKING:
    import pandas

    from viva.eval.records import Evaluation
    from viva.eval.screening import Screening
    from viva.rewards.base import Grader, Reward
    from viva.rewards.function import RewardFunction

ResultT = TypeVar("ResultT")
Prompts: TypeAlias = "str | Path | Sequence[str] | Sequence[Mapping[str, object]] | pandas.DataFrame"
"""A JSONL file or ``reasoning_gym:FAMILY``, questions, or rows (or a data frame) with ``query`` (or ``question``),
perhaps ``answer``."""


class Conversations(Sequence[ConversationRecord]):
    """Conversations of a run, in the order they were trained on; each is read when it is asked for.

    Of groups whose environment keeps no record only the rewards are known, by seat.
    """

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        # texts may hold other line breaks, and what follows the last one was not written to its end
        self._lines = text.split("\n")[:-1]
        self._path = path

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> ConversationRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[ConversationRecord]: ...
    def __getitem__(self, index: int | slice) -> ConversationRecord | list[ConversationRecord]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        row = Transcript.parse(f"{self._path}:{place + 1}", json.loads(self._lines[place]))
        if row.record is not None:
            return row.record
        paid = {seat: reward for seat, reward in enumerate(row.rewards or ()) if reward is not None}
        return ConversationRecord(question="", rewards=paid)


class Run:
    """A run's folder.

    Args:
        path: The folder, the run's ``log_path``.

    Raises:
        ValueError: If it holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()  # the working folder may change
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{self.path} holds no run (there is no config.json); give a run's log_path")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The run's options, as ``config.json`` keeps them."""
        return json.loads((self.path / "config.json").read_text(encoding="utf-8"))

    @property
    def metrics(self) -> pandas.DataFrame:
        """Metrics by step, one row for each line of ``metrics.jsonl``; the last may be an evaluation alone."""
        import pandas

        from viva.run.folder import RunFolder

        rows = RunFolder(self.path).log.metrics()
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    @property
    def conversations(self) -> Conversations:
        """Conversations with their verdicts and rewards, in the order they were trained on."""
        return Conversations(self.path / "transcripts.jsonl")

    def evaluate(
        self, test: Prompts | None = None, *, against: str | Path | Run | None = None, **options: Any
    ) -> Evaluation:
        """See `evaluate`."""
        return evaluate(self, test, against=against, **options)

    def export(self, **options: Any) -> list[Path]:
        """Write the trained adapter and the merged model, or that as a GGUF file, as ``viva export`` does.

        Args:
            **options: Those of ``viva export``: ``to`` (a folder, or ``trained.gguf``), ``checkpoint``, ``merge``,
                ``precision``, ...

        Returns:
            The folders written, or the file.

        Raises:
            ValueError: If an option is unknown, or there is nothing to export.
        """
        from viva.recipes.export import ExportOptions, export_run

        return export_run(self.path, make_options(ExportOptions, options))

    def report(self) -> Path:
        """Write ``report.html`` anew; its path."""
        from viva.view.report import write_report

        return write_report(self.path)


def load_run(path: str | Path) -> Run:
    """The run in a folder.

    Raises:
        ValueError: If it holds none.
    """
    return Run(path)


def train(
    recipe: str | Protocol,
    *,
    model: str | Path | None = None,
    prompts: Prompts | None = None,
    test: Prompts | None = None,
    reward: str | Reward | RewardFunction | None = None,
    grader: str | Grader | None = None,
    steps: int | None = None,
    config: str | Path | Mapping[str, object] | None = None,
    **options: Any,
) -> Run:
    """Train a model by a recipe or by a protocol of your own. In a notebook: ``await viva.train_async(...)``.

    Args:
        recipe: A name that ``viva recipes`` lists, a `Protocol`, or ``path.py:PROTOCOL``.
        model: ``tiny`` (the built-in policy, the default), a model's folder, a GGUF file, or its name on the hub.
        prompts: To train on. Rows given here are kept beside the run, in ``<log_path>.train-<digest>.jsonl``.
        test: To measure on while it trains.
        reward: Of a protocol: a name, one of `viva.rewards`, or a function of the `Conversation`; by default the
            protocol's own.
        grader: Tells whether a reply (first) gives the known answer (second): ``math``, ``exact``, ``choice``,
            ``path.py:FUNCTION`` or a function.
        steps: Number of training steps.
        config: Options in a YAML or JSON file, such as a run's ``config.json`` (all but its ``behavior_if_exists``), or
            by name; those that are given themselves win. The texts of a conversation are among them:
            ``config={"prompts": {"proposal": "..."}}``.
        **options: All others of the recipe, by name; ``viva train RECIPE --help`` lists them. Where the folder
            ``log_path`` holds a run, ``behavior_if_exists`` must say what becomes of it: ``resume``, ``delete`` or
            ``raise`` (the default here).

    Returns:
        The finished run.

    Raises:
        ValueError: If anything is wrong with the options, before a model is loaded.
        FailedRunError: If the run fails later; the message says how to go on.
        KeyboardInterrupt: If it was interrupted; its state is saved.
        RuntimeError: If an event loop runs already.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(
            train_async(
                recipe,
                model=model,
                prompts=prompts,
                test=test,
                reward=reward,
                grader=grader,
                steps=steps,
                config=config,
                **options,
            )
        )
    raise RuntimeError(
        "an event loop runs already, as in a notebook: use 'await viva.train_async(...)' there"
    )


async def train_async(
    recipe: str | Protocol,
    *,
    model: str | Path | None = None,
    prompts: Prompts | None = None,
    test: Prompts | None = None,
    reward: str | Reward | RewardFunction | None = None,
    grader: str | Grader | None = None,
    steps: int | None = None,
    config: str | Path | Mapping[str, object] | None = None,
    **options: Any,
) -> Run:
    """`train` where an event loop runs already, as in a notebook."""
    prepare_threads()
    given = _options(options)
    recipe, protocol = recipe_named(remember(recipe))
    given |= protocol
    named = {"model_name": None if model is None else str(model), "max_steps": steps}
    code = _options({"reward": reward, "grader": grader, "config": config})
    config = code.pop("config")
    named |= code
    sources = {"train_prompts_path": prompts, "test_prompts_path": test}
    if twice := [name for name, value in (named | sources).items() if value is not None and name in given]:
        raise ValueError(
            f"{twice[0]} is given twice (model, steps, prompts and test stand for model_name, max_steps, "
            "train_prompts_path and test_prompts_path); leave one of them out"
        )
    config_class = import_module(f"viva.recipes.{recipe}").Config
    named_config = {} if config is None else read_options(config, config_class, recipe)
    given |= {name: value for name, value in named.items() if value is not None}
    given = {"behavior_if_exists": "raise", **named_config, **given}
    chosen = make_options(config_class, given)
    place = chosen.log_path.rstrip("/")
    rows = _prompt_options("train", prompts, f"{place}.train") | _prompt_options(
        "test", test, f"{place}.test"
    )
    from viva.recipes.loop import run_recipe

    received = await run_recipe(chz.replace(chosen, **rows))
    if received is not None:
        raise KeyboardInterrupt(f"stopped by {received.name}; behavior_if_exists='resume' goes on")
    return Run(chosen.log_path)


def evaluate(
    policy: str | Path | Run,
    test: Prompts | None = None,
    *,
    against: str | Path | Run | None = None,
    **options: Any,
) -> Evaluation:
    """Measure a policy, as ``viva eval`` does, and print the tables.

    By known answers; or, where problems have none, by a judge that compares its answers with another policy's.

    Args:
        policy: A run, a model, an adapter, or the file of an earlier evaluation.
        test: Problems; by default the run's own test set.
        against: What it is compared with: another of those, or ``base`` for the run's model before training.
        **options: Those of ``viva eval``: ``judge`` (a name or several), ``num_samples``, ``eval_temperature``, ...

    Returns:
        The figures of the policy; files beside it hold every answer, and the comparison.

    Raises:
        ValueError: If anything is wrong with the options, and nothing was sampled; or if a judge answers nothing.
    """
    from viva.recipes.evaluation import EvalOptions
    from viva.recipes.evaluation.build import evaluate as measure

    prepare_threads()
    given = _options(options)
    name = _named(policy)
    if against == "base":
        given["against_checkpoint"] = "base"
    elif against is not None:
        given["against"] = _named(against)
    if isinstance(given.get("judge"), list):
        given["judge"] = ",".join(map(str, given["judge"]))
    chosen = make_options(EvalOptions, given)  # mistakes are told before rows are written
    place = f"{name}/eval" if isinstance(policy, Run) else "runs/eval"
    work = measure(name, chz.replace(chosen, **_prompt_options("test", test, f"{place}/problems")))
    text, evaluation = _run_apart(work)
    sys.stdout.write(text)
    return evaluation


def screen(policy: str | Path | Run, task: Prompts, **options: Any) -> Screening:
    """Tell which reward can teach a policy a task, as ``viva screen`` does, and print the tables.

    Args:
        policy: A run, a model or an adapter.
        task: Problems, with or without known answers.
        **options: Those of ``viva screen``: ``num_problems``, ``num_samples``, ``temperature``, ... With ``recipe=``, a
            name or a `Protocol`, also the recipe's own, as for `train`: ``reward``, ``judge``, ``config``, ...

    Returns:
        Figures, advice and every answer; a file holds the same.

    Raises:
        ValueError: If anything is wrong with the options; nothing was sampled then.
    """
    from viva.recipes.evaluation.planned import screen_options
    from viva.recipes.evaluation.screen import screen

    prepare_threads()
    planned = screen_options(_options(options))
    path = _prompt_options("train", task, "runs/screen/problems")["train_prompts_path"]
    return _run_apart(screen(_named(policy), path, *planned))


def _run_apart(work: Coroutine[object, None, ResultT]) -> ResultT:
    """The result of work in a loop of its own: the caller may have one that runs, as in a notebook.

    An interrupt of the wait, such as Ctrl-C, cancels the work.
    """
    begun: Future[asyncio.Task[Any] | None] = Future()

    async def cancellable() -> ResultT:
        begun.set_result(asyncio.current_task())
        return await work

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(asyncio.run, cancellable())
        try:
            return result.result()
        except (KeyboardInterrupt, SystemExit):
            if task := begun.result():
                with suppress(RuntimeError):  # it has just ended, and its loop is closed
                    task.get_loop().call_soon_threadsafe(task.cancel)
            raise


def _named(value: object) -> str:
    """The name of a run, a path, or a name."""
    return str(value.path if isinstance(value, Run) else value)


_CODE = (
    "protocol",
    "recipe",
    "reward",
    "conversation_reward",
    "grader",
    "strategies",
    "environment",
    "examples",
)
"""Options that take code of the user's own."""


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, those in ``config``, too; runs and paths by theirs, code by a target, and tuples as lists.

    Raises:
        ValueError: If code is given to an option that takes none.
    """

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [plain(name, each) for each in cast("Sequence[object]", value)]
        if isinstance(value, (Run, Path)):
            return _named(value)
        if name == "config" and isinstance(value, Mapping):
            return _options(cast("Mapping[str, object]", value))
        if name in _CODE and value is not None:
            return remember(value)
        if callable(value) or isinstance(value, Protocol):
            raise ValueError(
                f"{name} takes texts and numbers, no code; got {value!r:.100}. Options that take code of your own: "
                f"{', '.join(_CODE)}"
            )
        return value

    return {name: plain(name, value) for name, value in options.items()}


def _prompt_options(which: str, prompts: Prompts | None, place: str) -> dict[str, str]:
    """The options that say where prompts are.

    Rows are written to ``<place>-<digest>.jsonl``: other rows never stand in the place of those that a run reads.
    """
    if prompts is None:
        return {}
    if isinstance(prompts, (str, Path)):
        return {f"{which}_prompts_path": str(prompts)}
    lines = [_line(number, row) for number, row in enumerate(_rows(prompts), 1)]
    content = "".join(f"{line}\n" for line in lines)
    digest = blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    path = Path(f"{place}-{digest}.jsonl").expanduser()
    if not path.is_file():
        write_atomic(path, content)
        note_written([path])
    return {f"{which}_prompts_path": str(path)}


def _rows(prompts: Iterable[object]) -> list[object]:
    """Questions and rows; of a data frame its rows, without what is missing in them.

    Raises:
        ValueError: If they are a mapping, which is read by its keys.
    """
    if isinstance(prompts, Mapping):
        raise ValueError(
            "prompts must be a list of questions or rows, or a data frame; got a mapping with "
            f"{listed(map(str, cast('Mapping[object, object]', prompts)))}. Put a row into a list; of a DatasetDict "
            "give one split"
        )
    frames = sys.modules.get("pandas")  # who has a frame has loaded it
    if frames is None or not isinstance(prompts, frames.DataFrame):
        return list(prompts)
    # whole numbers, which are floats beside missing ones
    frame = cast("pandas.DataFrame", prompts).convert_dtypes().astype(object)
    return [row.dropna().to_dict() for _, row in frame.iterrows()]


def _line(number: int, row: object) -> str:
    """A row in JSON; `ValueError` if that is none."""
    try:
        fields = {"query": row} if isinstance(row, str) else dict(cast("Mapping[str, object]", row))
        return json.dumps(fields, ensure_ascii=False, default=_number)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"prompt {number} must be a text, or a row of texts and numbers; got {row!r:.200}"
        ) from error


def _number(value: object) -> int | float:
    """A number of another kind, such as numpy's, as JSON has it."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError
