"""The options of ``viva eval``, and the recipes' options that they come down to.

What an option of a recipe means here is what it means there; what is not given is as in the run that is evaluated, or
the recipe's default where the target is no run.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import chz

from viva.recipes.config import RecipeConfig, fitting

KINDS = ("direct", "conversation", "critique", "protocol")

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)

_DEFAULT_CONVERSATIONS = 24
"""Where the target is no run: the recipes' own default serves to watch a run, not to measure it."""


@chz.chz
class EvalOptions:
    """Options of viva eval."""

    checkpoint: str | None = chz.field(
        default=None,
        doc="of a run: last, best, base (untrained), a name like 000020; default: what it ended with",
    )
    against: str | None = chz.field(default=None, doc="compare with this run, model or result file")
    against_checkpoint: str | None = chz.field(
        default=None, doc="of the other run; of the same one if against is left out"
    )
    kinds: list[str] | None = chz.field(
        default=None,
        doc="of direct, conversation, critique, protocol; default: direct, and what the run trained",
    )
    num_samples: int = chz.field(default=1, doc="direct answers to each problem: n of pass@k and maj@k")
    equal_tokens: bool = chz.field(
        default=True, doc="also ask directly as often as the tokens of each conversation allow"
    )
    grader: str = chz.field(default="math", doc="math, exact, choice, module:FUNCTION or path.py:FUNCTION")
    resamples: int = chz.field(default=10000, doc="draws of the bootstrap")
    output: str | None = chz.field(
        default=None, doc="JSON file; default: a file in eval/ of the run's folder, or in runs/eval"
    )

    test_prompts_path: str | None = chz.field(default=None, doc="JSONL of the test set")
    hf_dataset_name: str | None = chz.field(default=None, doc="Hugging Face data set, folder or file")
    hf_dataset_name_config: str | None = None
    hf_dataset_revision: str | None = chz.field(default=None, doc="branch, tag or commit on the hub")
    hf_streaming: bool | None = chz.field(default=None, doc="fetch the first max_test_samples rows only")
    hf_prompt_column: str | None = None
    hf_answer_column: str | None = None
    hf_test_split: str | None = chz.field(default=None, doc="test, if there is one")
    max_test_samples: int | None = chz.field(default=None, doc="use the first so many problems")
    num_test_conversations: int | None = chz.field(
        default=None, doc="problems that are also talked about; default: as in the run, else 24"
    )

    num_agents: int | None = None
    max_rounds: int | None = chz.field(default=None, doc="conversation: rounds")
    preset: Literal["paper", "robust"] | None = chz.field(default=None, doc="critique: how scores are fitted")
    max_tokens: int | None = chz.field(default=None, doc="longest reply")
    temperature: float | None = chz.field(default=None, doc="of the agents' replies")
    eval_temperature: float | None = chz.field(default=None, doc="of direct answers; default: temperature")
    seed: int | None = None

    renderer_name: str | None = chz.field(default=None, doc="chat format; recognised by default")
    model_name: str | None = chz.field(default=None, doc="base model of an adapter or of remote weights")
    engine: Literal["local", "remote"] | None = None
    base_url: str | None = None
    device: str | None = None
    precision: Literal["float32", "fast", "bfloat16"] | None = None


_SHARED = frozenset(
    {
        *("test_prompts_path", "hf_dataset_name", "hf_dataset_name_config", "hf_prompt_column"),
        *(
            "hf_dataset_revision",
            "hf_streaming",
            "hf_answer_column",
            "hf_test_split",
            "max_test_samples",
            "num_test_conversations",
            "num_agents",
        ),
        *("max_rounds", "preset", "max_tokens", "temperature", "eval_temperature", "seed"),
    }
)
"""Options that stand for a recipe's of the same name."""

_READING = (
    *("hf_dataset_name_config", "hf_dataset_revision", "hf_streaming"),
    *("hf_prompt_column", "hf_answer_column", "hf_test_split"),
)
_DEFAULTS = RecipeConfig(log_path="")


def check_options(options: EvalOptions) -> None:
    """Reject what is out of range.

    Raises:
        ValueError: See above.
    """
    for kind in options.kinds or ():
        if kind not in KINDS:
            raise ValueError(f"kinds must be of {', '.join(KINDS)}; got {kind!r}")
    if options.kinds == []:
        raise ValueError(f"kinds must name at least one of {', '.join(KINDS)}")
    smallest = {
        "num_samples": 1,
        "resamples": 100,
        "max_test_samples": 1,
        "num_test_conversations": 1,
        "max_tokens": 1,
    }
    for name, bound in smallest.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise ValueError(f"{name} must be {bound} or more; got {value}")
    for name in ("temperature", "eval_temperature"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be 0 or more; got {value}")


def stored_options(config_class: type[ConfigT], stored: Mapping[str, Any]) -> ConfigT:
    """A recipe's options as ``config.json`` holds them; what the recipe does not know any more is left out.

    Args:
        config_class: The recipe's ``Config``.
        stored: The file's content; empty where the target is no run.
    """
    known = fitting(
        {name: stored[name] for name in chz.chz_fields(config_class) if name in stored}, config_class
    )
    defaults: dict[str, Any] = {"log_path": ""}
    if not stored:
        defaults["num_test_conversations"] = _DEFAULT_CONVERSATIONS
    return config_class(**(defaults | known))


def recipe_options(config: ConfigT, options: EvalOptions) -> ConfigT:
    """A recipe's options with what was given to ``viva eval`` in their place."""
    fields = chz.chz_fields(config)
    given = {
        name: value
        for name, value in chz.asdict(options).items()
        if name in _SHARED and name in fields and value is not None
    }
    if "test_prompts_path" in given and "hf_dataset_name" not in given:
        given["hf_dataset_name"] = None  # another test set, not one more
    if "hf_dataset_name" in given:
        given = {"test_prompts_path": None} | given
    if given.get("hf_dataset_name", config.hf_dataset_name) != config.hf_dataset_name:
        # how to read the run's own data set says nothing about another one
        given = {name: getattr(_DEFAULTS, name) for name in _READING} | given
    return chz.replace(config, **given)
