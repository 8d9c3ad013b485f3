"""The options that every recipe has; a recipe's own ``Config`` extends `RecipeConfig`.

They mean the same in every recipe. All that can be wrong with them is reported before a model is loaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import chz
from chz.blueprint import (
    Blueprint,
    ConstructionException,
    EntrypointHelpException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)

from viva.conversation.messages import did_you_mean
from viva.run.secrets import guard_tracebacks, printable

if TYPE_CHECKING:
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.training.loop import Training
    from viva.training.sampling import Sampling

DEFAULT_DATAPOINTS = 131072
"""Trajectories of a run whose length is not given."""
QUESTION_TEMPLATE = 'what is asked, with the prompt in it, like "{question} Give only the final number."'
"""Meaning of the option ``question_template``, wherever there is one."""

_FREE_OPTIONS = frozenset(
    {
        "base_url",
        "behavior_if_exists",
        "hf_streaming",
        "log_path",
        "max_steps",
        "max_training_datapoints",
        "num_epochs",
        "save_every",
        "tokens_every",
        "trackers",
        "ttl_seconds",
        "wandb_name",
        "wandb_project",
    }
)


@chz.chz
class DataOptions:
    """Sources of prompts. Those to train on are joined in the order list, file, data set."""

    train_prompts: list[str] | None = chz.field(default=None, doc='a list of prompts, like ["a", "b"]')
    train_prompts_path: str | None = chz.field(
        default=None,
        doc="JSONL with query, prompt, text or question; answer optional; or reasoning_gym:FAMILY,option=value",
    )
    test_prompts_path: str | None = chz.field(
        default=None,
        doc="JSONL of the test set, or reasoning_gym:FAMILY; default: of that family, other problems",
    )
    hf_dataset_name: str | None = chz.field(default=None, doc="Hugging Face data set, folder or file")
    hf_dataset_name_config: str | None = None
    hf_dataset_revision: str | None = chz.field(default=None, doc="branch, tag or commit on the hub")
    hf_streaming: bool = chz.field(
        default=False, doc="fetch the first max_train_samples and max_test_samples rows only"
    )
    hf_prompt_column: str = "query"
    hf_answer_column: str | None = None
    hf_train_split: str = "train"
    hf_test_split: str | None = chz.field(default=None, doc="test, if there is one")
    question_template: str | None = chz.field(default=None, doc=QUESTION_TEMPLATE)
    max_train_samples: int | None = None
    max_test_samples: int | None = 100


@chz.chz
class RecipeConfig(DataOptions):
    """Options of model, conversations, training, data, logging and engine."""

    model_name: str = chz.field(default="tiny", doc="hub name, model folder, or tiny (the built-in policy)")
    model_revision: str | None = chz.field(default=None, doc="branch, tag or commit of a model on the hub")
    renderer_name: str | None = chz.field(default=None, doc="chat format; recognised by default")
    system_prompt: str | None = chz.field(
        default=None, doc="system message before questions that are asked directly; none by default"
    )
    lora_rank: int = chz.field(default=32, doc="rank of the adapter; 0 trains all weights")

    num_agents: int = chz.field(default=3, doc="agents in each conversation")
    grader: str = chz.field(
        default="math",
        doc="who is right, where answers are known: math, exact, choice, module:FUNCTION or path.py:FUNCTION",
    )
    on_failure: Literal["void", "continue"] = chz.field(
        default="void", doc="when an agent fails: play the conversation again, or score the others"
    )
    personas: dict[int, str] | None = chz.field(default=None, doc='persona texts, like {0: "...", 1: "..."}')

    batch_size: int | None = chz.field(
        default=None, doc="agent trajectories per step; default: the largest multiple of num_agents up to 128"
    )
    learning_rate: float | None = chz.field(default=None, doc="found from the model by default")
    max_tokens: int = chz.field(default=512, doc="longest reply")
    temperature: float = chz.field(default=1.0, doc="of the agents' replies")
    num_substeps: int = chz.field(default=1, doc="optimiser steps per batch")
    max_training_datapoints: int = chz.field(
        default=DEFAULT_DATAPOINTS, doc="agent trajectories of the whole run"
    )
    num_epochs: float | None = chz.field(
        default=None, doc="passes over the training prompts, instead of max_training_datapoints"
    )
    max_steps: int | None = chz.field(default=None, doc="stop after so many steps at most")
    max_staleness: int = chz.field(
        default=0, doc="remote engines: updates by which rollouts may run ahead, sampling while it trains"
    )
    stream_updates: bool = chz.field(
        default=False, doc="remote engines: train on conversations while others are still played"
    )
    loss_fn: Literal["importance_sampling", "ppo", "cispo", "dro"] = "importance_sampling"
    loss_fn_config: dict[str, float] | None = chz.field(default=None, doc="like {'clip_low_threshold': 0.8}")
    grad_clip_norm: float = chz.field(default=0.0, doc="largest gradient norm; 0 does not clip")
    kl_penalty_coef: float = chz.field(default=0.0, doc="weight of the KL penalty to the policy at the start")
    max_retries: int = chz.field(default=1, doc="how often a failed conversation is played again")
    policy_timeout_s: float | None = chz.field(
        default=None, doc="longest time for one reply or comparison; off by default"
    )
    seed: int = 0

    log_path: str
    behavior_if_exists: Literal["ask", "delete", "resume", "raise"] = "ask"
    eval_every: int = chz.field(default=5, doc="steps between evaluations; 0 never evaluates")
    eval_temperature: float | None = chz.field(default=None, doc="of direct answers; default: temperature")
    eval_greedy: bool = chz.field(default=True, doc="also ask test prompts at temperature 0")
    eval_samples: int = chz.field(default=4, doc="direct answers to a test prompt: n of pass@k and maj@k")
    eval_judge: str | None = chz.field(
        default=None,
        doc="who compares test answers with those before training: initial (default where no answer is known), another "
        "model, a run, or none",
    )
    num_test_conversations: int = chz.field(default=8, doc="test prompts that are also talked about")
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0 saves at the end only")
    tokens_every: int = chz.field(
        default=10,
        doc="steps between those that keep the tokens of a conversation for viva view; 0 keeps none",
    )
    trackers: list[str] = chz.field(
        default_factory=lambda: ["console"],
        doc="of console, tensorboard, trackio, wandb; with a project as wandb:PROJECT",
    )
    wandb_project: str | None = chz.field(default=None, doc="the same as wandb:PROJECT among the trackers")
    wandb_name: str | None = chz.field(
        default=None, doc="the run's name in Weights & Biases; default: the folder's"
    )

    engine: Literal["local", "remote"] | None = chz.field(
        default=None,
        doc="default: remote with base_url, or with TINKER_API_KEY set and a model from the hub; else local",
    )
    base_url: str | None = chz.field(default=None, doc="a server that speaks Tinker's protocol")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="start from these weights, like tinker://..., with a fresh optimiser"
    )
    ttl_seconds: int | None = chz.field(
        default=None, doc="a remote engine may delete checkpoints after this; the last and the best it keeps"
    )
    device: str | None = chz.field(default=None, doc="cpu or cuda; a GPU if there is one")
    precision: Literal["float32", "fast", "bfloat16"] = "float32"

    def make_plan(self) -> Plan:
        """Check all options and load the prompts, not the model; `ValueError` for anything the user has to fix."""
        raise NotImplementedError

    @property
    def direct_temperature(self) -> float:
        """The temperature of direct answers to test prompts."""
        return self.temperature if self.eval_temperature is None else self.eval_temperature

    def free_options(self) -> frozenset[str]:
        """Options that do not change what any step computes; a resumed run may set them anew."""
        # with rollouts that run ahead, it says which steps wait for the update before them
        return _FREE_OPTIONS - ({"save_every"} if self.max_staleness else set())

    def sampling(self, context_window: int | None) -> Sampling:
        """Settings of the agents' replies, with a model that can hold so many tokens."""
        from viva.training.sampling import Sampling

        return Sampling(
            seed=self.seed,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            context_window=context_window,
            timeout_s=self.policy_timeout_s,
            max_retries=self.max_retries,
        )

    async def build_training(self, plan: Plan, opened: OpenRun) -> Training:
        """The loop's parts for an open run."""
        raise NotImplementedError


ConfigT = TypeVar("ConfigT")

_MISTAKES = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
    ValueError,  # not of the form key=value
    TypeError,  # a Python value of another kind
)


def parse_options(
    config_class: type[ConfigT],
    argv: Sequence[str] | None,
    recipe: str | None = None,
    *,
    beside: type | None = None,
) -> ConfigT:
    """Options from a command line; from now on a traceback tells no secrets.

    Args:
        config_class: A class made with ``chz.chz``, such as a recipe's ``Config``.
        argv: ``key=value`` each; ``None`` for the process's. ``config=FILE`` stands for the options in a YAML or JSON
            file, such as a run's own ``config.json``; what is given beside it wins.
        recipe: The recipe's name, if a file must be of the same one.
        beside: Another class, whose options a file may hold, too.

    Raises:
        SystemExit: 0 after ``--help``, 2 after a mistake; what was wrong is on the error stream then.
    """
    guard_tracebacks()
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        check_arguments(arguments, config_class)
        files = [argument for argument in arguments if argument.lstrip("-").startswith("config=")]
        given = [argument for argument in arguments if argument not in files]
        blueprint = Blueprint(config_class)
        for file in files:
            path = file.partition("=")[2]
            blueprint = blueprint.apply(read_options(path, config_class, recipe, beside), layer_name=path)
        config = blueprint.make_from_argv(given, allow_hyphens=True)
        check_kinds(config)
        return config
    except EntrypointHelpException as told:
        sys.stdout.write(f"{str(told).rstrip()}\n")
        raise SystemExit(0) from None
    except _MISTAKES as error:
        sys.stderr.write(f"error: {told_mistake(error, config_class)}\n")
        raise SystemExit(2) from None


def option_name(argument: str) -> str:
    """The option that an argument like ``name=value`` or ``name.key=value`` gives."""
    return argument.partition("=")[0].lstrip("-").partition(".")[0]


def make_options(config_class: type[ConfigT], values: Mapping[str, object]) -> ConfigT:
    """Options from Python values; `ValueError` if a name is unknown or a value of the wrong kind."""
    known = chz.chz_fields(config_class)
    for name in values:
        if name not in known:
            raise ValueError(unknown_option(name, config_class))
    try:
        config = Blueprint(config_class).apply(fitting(values, config_class)).make()
        check_kinds(config)
    except _MISTAKES as error:
        raise ValueError(told_mistake(error, config_class)) from error
    return config


def read_options(
    source: str | Path | Mapping[str, object],
    config_class: type,
    recipe: str | None,
    beside: type | None = None,
) -> dict[str, Any]:
    """The options of a class among those in a YAML or JSON file, or by name, which may hold the class `beside`'s, too.

    A run's ``config.json`` must be of `recipe`; what it records beside options is left out, and ``behavior_if_exists``.

    Raises:
        ValueError: If the file cannot be read, is of another recipe, or has an unknown name.
    """
    values, known = _read_mapping(source), chz.chz_fields(config_class)
    is_record = "prompts_digest" in values  # of a run, no order to delete or resume that one
    if is_record:
        values.pop("behavior_if_exists", None)
    of = values.pop("recipe", None)
    if of is not None and recipe is not None and of != recipe:
        raise ValueError(f"{_named(source)} is of the recipe {of}; run that one, or give another file")
    if not is_record:
        classes = [config_class] if beside is None else [config_class, beside]
        if unknown := [name for name in values if all(name not in chz.chz_fields(each) for each in classes)]:
            raise ValueError(f"{_named(source)}: {unknown_option(unknown[0], *classes)}")
    return fitting({name: value for name, value in values.items() if name in known}, config_class)


def recipe_of(source: str | Path | Mapping[str, object]) -> str | None:
    """The recipe that options name, as a run's ``config.json`` does; `ValueError` if a file cannot be read."""
    found = _read_mapping(source).get("recipe")
    return found if isinstance(found, str) else None


def _named(source: str | Path | Mapping[str, object]) -> str:
    return "config" if isinstance(source, Mapping) else f"config={source}"


def _read_mapping(source: str | Path | Mapping[str, object]) -> dict[str, object]:
    import yaml

    found: object = source
    if not isinstance(source, Mapping):
        try:
            found = yaml.safe_load(Path(source).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{_named(source)} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) for name in cast(Mapping[object, object], found)
    ):
        raise ValueError(
            f"{_named(source)} must hold options, like 'max_steps: 20'; got {type(found).__name__}"
        )
    return dict(cast(Mapping[str, object], found))


def fitting(values: Mapping[str, object], config_class: type) -> dict[str, Any]:
    """Values with the numbers that JSON and people write differently: 1 for 1.0, and "0" for 0 as a key."""
    fields = chz.chz_fields(config_class)
    return {
        name: _fit(value, fields[name].final_type, (fields[name].metadata or {}).get("read"))
        for name, value in values.items()
        # a run keeps the text of this file beside its path
        if name != "judge_prompt_path" or values.get("judge_prompt") is None or value is None
    }


def _fit(value: object, kind: object, read: Callable[[object], object] | None) -> object:
    if value is not None and read is not None:
        return read(value)
    kinds = get_args(kind) or (kind,)
    if isinstance(value, str) and float in kinds and str not in kinds:
        try:
            return float(value)  # 2e-4 is text to YAML
        except ValueError:
            return value
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    for part in kinds:
        if isinstance(value, Mapping) and get_origin(part) is dict and get_args(part)[0] is int:
            pairs = cast(Mapping[object, object], value).items()
            return {int(str(key)) if str(key).isdecimal() else key: each for key, each in pairs}
    return list(cast(Sequence[object], value)) if isinstance(value, tuple) else value


_UNKNOWN = re.compile(r"Extraneous argument '([^']*)'")
_UNREADABLE = re.compile(r"Could not interpret argument (.*) provided for param '([^']*)'", re.DOTALL)
_MISSING = re.compile(r"Missing required arguments? for parameters?\(s\): (.*)")
_WORDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SAMPLES: dict[object, str] = {int: "8", float: "0.5", str: '"a"'}
_ELSEWHERE = dict.fromkeys(
    ("policies", "judge_member"),
    "this recipe has one policy; several talk in conversation_preference_rl, critique_self_play and protocols",
)
_LONGEST_VALUE = 200
_NAME = re.compile(r"(?:--)?(\w[\w.-]*)")


def check_arguments(argv: Sequence[str], config_class: type) -> None:
    """Refuse arguments that are not of the form ``name=value``, and options that are given twice.

    With ``--help`` among them nothing else counts.
    """
    if "--help" in argv:
        return
    seen: dict[str, str] = {}
    for argument in argv:
        typed, equals, _ = argument.partition("=")
        name = _NAME.fullmatch(typed)
        if not equals or name is None:
            raise ValueError(_no_option(argument, config_class))
        if name.group(1) in seen:
            raise ValueError(
                f"{name.group(1)} is given twice, as {_short(seen[name.group(1)])} and {_short(argument)}; leave one "
                "of them out"
            )
        seen[name.group(1)] = argument
        check_home(argument)


def check_home(argument: str) -> None:
    """Refuse a path, alone or behind ``name=``, that begins with ``~`` and names nobody's folder."""
    value = argument.partition("=")[2] or argument
    if value.startswith("~") and not set(value) & set(" \n") and os.path.expanduser(value) == value:
        raise ValueError(
            f"{_short(argument)} begins with the name of a user who has no folder here; write ~/... for your own "
            "folder, or the whole path"
        )


def check_kinds(config: object) -> None:
    """Refuse lists and pairs that are none: a text that reads as Python's ``lambda`` is called by the reader."""
    for name, field in chz.chz_fields(config).items():
        value = getattr(config, name)
        kinds = [get_origin(part) or part for part in _parts(field.final_type)]
        takes_text = str in kinds and isinstance(value, str)
        for kind in (list, dict):
            if kind in kinds and value is not None and not takes_text and not isinstance(value, kind):
                raise ValueError(f"{name} must be {_allowed(field.final_type)}; got {value!r:.80}")


def _no_option(argument: str, config_class: type) -> str:
    fields = chz.chz_fields(config_class)
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    close = [name] if name in fields else get_close_matches(name, fields, n=1)
    hint = f" Did you mean {close[0]}=VALUE, without a space?" if close else ""
    return f"{_short(repr(argument))} is no option of the form name=value.{hint} --help lists all options"


def told_mistake(error: BaseException, config_class: type) -> str:
    """One line for the user about what ``chz`` raised when it read the options of a class."""
    text = str(error).strip()
    fields = chz.chz_fields(config_class)
    if found := _UNKNOWN.match(text):
        told = unknown_option(found.group(1), config_class)
    elif (found := _UNREADABLE.match(text)) and found.group(2) in fields:
        value, name = found.groups()
        kind = fields[name].final_type
        told = f"{name} must be {_allowed(kind)}; got {_short(value)}{_near(value, kind)}"
    elif text.startswith("Expected '") and (name := text.split("'")[1]) in fields:
        kind = fields[name].final_type
        told = f"{name} must be {_allowed(kind)}; got a value of the kind {text.rpartition(', got ')[2]}"
    elif found := _MISSING.match(text):
        told = f"the option {found.group(1)} is needed; --help lists all options"
    else:
        told = _short(text.partition("\n")[0])
    return printable(told)


def unknown_option(name: str, *config_classes: type) -> str:
    """One line about a name that is no option of these classes, with the nearest one."""
    if name in _ELSEWHERE:
        return f"unknown option {name!r}: {_ELSEWHERE[name]}"
    known = [each for config_class in config_classes for each in chz.chz_fields(config_class)]
    return f"unknown option {name!r}.{did_you_mean(name, known)} --help lists all options"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."


def _parts(kind: object) -> list[object]:
    """The types that a type allows, without ``None``."""
    if get_origin(kind) in (Union, UnionType):
        return [part for part in get_args(kind) if part is not NoneType]
    return [kind]


def _choices(kind: object) -> list[str]:
    return [str(choice) for part in _parts(kind) if get_origin(part) is Literal for choice in get_args(part)]


def _allowed(kind: object) -> str:
    parts = _parts(kind)
    choices = _choices(kind)
    if choices:
        words = f"one of {', '.join(choices)}"
    else:
        words = " or ".join(_words(part) for part in parts)
    return f"{words}, or left out" if NoneType in get_args(kind) else words


def _words(kind: object) -> str:
    arguments = get_args(kind)
    if get_origin(kind) is list:
        sample = _SAMPLES.get(arguments[0], "...")
        return f"a list, like [{sample}, {sample}]"
    if get_origin(kind) is dict:
        key = "0" if arguments[0] is int else '"name"'
        values = _parts(arguments[1])
        what = " or ".join(_WORDS.get(value, str(value)) for value in values)
        return f"pairs of {_WORDS[arguments[0]]} and {what}, like {{{key}: {_SAMPLES[values[0]]}}}"
    return _WORDS.get(kind, str(kind))


def _near(value: str, kind: object) -> str:
    hint = did_you_mean(value.strip("'\""), _choices(kind))
    return f".{hint}" if hint else ""
