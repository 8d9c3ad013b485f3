"""``viva eval`` and ``viva screen``: their options, and the recipes' options that they come down to.

A recipe's option means the same here. One that is not given is as in the run that is evaluated, or the recipe's default
where the target is no run.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import chz

from viva.recipes.config import QUESTION_TEMPLATE, RecipeConfig, fitting
from viva.recipes.reward import JudgeConfig, criteria_field

KINDS = ("direct", "conversation", "critique", "protocol")

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)

_DEFAULT_CONVERSATIONS = 24
"""For targets that are no run: the recipes' own default serves to watch a run, not to measure it."""


@chz.chz
class OpenedOptions:
    """Weights that are asked, and the engine that they are opened with."""

    checkpoint: str | None = chz.field(
        default=None,
        doc="of a run: last, best, base (untrained), a name like 000020; default: what it ended with",
    )
    renderer_name: str | None = chz.field(default=None, doc="chat format; recognised by default")
    model_name: str | None = chz.field(default=None, doc="base model of an adapter or of remote weights")
    engine: Literal["local", "remote"] | None = None
    base_url: str | None = None
    device: str | None = None
    precision: Literal["float32", "fast", "bfloat16"] | None = None


@chz.chz
class JudgedOptions(JudgeConfig, OpenedOptions):
    """Judges that are asked about what policies said, and their engines."""

    judge: str | None = None
    criteria: dict[str, float] | None = criteria_field("asked of every answer, too")


@chz.chz
class EvalOptions(JudgedOptions):
    """Options of viva eval."""

    against: str | None = chz.field(
        default=None, doc="compare with this run, model or result file; base: the run's model before training"
    )
    against_checkpoint: str | None = chz.field(
        default=None, doc="of the other run; of the same one if against is left out"
    )
    judge: str | None = chz.field(
        default=None,
        doc="who compares the answers: base, current, a model, a run, https://host/v1, or [A,B]; default: base",
    )
    kinds: list[str] | None = chz.field(
        default=None,
        doc="of direct, conversation, critique, protocol; default: direct, and what the run trained",
    )
    num_samples: int | None = chz.field(
        default=None,
        doc="direct answers to each problem, n of pass@k and maj@k; default: as in the run, else 4, of a judge 1",
    )
    equal_tokens: bool = chz.field(
        default=True, doc="also ask directly as often as the tokens of each conversation allow"
    )
    grader: str | None = chz.field(
        default=None,
        doc="math, exact, choice, module:FUNCTION or path.py:FUNCTION; default: as in the run, else math",
    )
    resamples: int = chz.field(default=10000, doc="draws of the bootstrap")
    output: str | None = chz.field(
        default=None, doc="JSON file; default: a file in eval/ of the run's folder, or in runs/eval"
    )

    test_prompts_path: str | None = chz.field(
        default=None, doc="JSONL of the test set, or reasoning_gym:FAMILY"
    )
    hf_dataset_name: str | None = chz.field(default=None, doc="Hugging Face data set, folder or file")
    hf_dataset_name_config: str | None = None
    hf_dataset_revision: str | None = chz.field(default=None, doc="branch, tag or commit on the hub")
    hf_streaming: bool | None = chz.field(default=None, doc="fetch the first max_test_samples rows only")
    hf_prompt_column: str | None = None
    hf_answer_column: str | None = None
    hf_test_split: str | None = chz.field(default=None, doc="test, if there is one")
    question_template: str | None = chz.field(default=None, doc=QUESTION_TEMPLATE)
    system_prompt: str | None = chz.field(default=None, doc="system message before direct questions")
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
    eval_greedy: bool | None = chz.field(
        default=None, doc="also ask each problem once at temperature 0; default: as in the run, else yes"
    )
    seed: int | None = None


@chz.chz
class ScreenOptions(OpenedOptions):
    """Options of viva screen. With `recipe`, those that the recipe has, too, are the recipe's, with its defaults."""

    recipe: str | None = chz.field(
        default=None,
        doc="screen as this recipe, or path.py:PROTOCOL, asks and talks: its own options go beside these",
    )
    num_problems: int = chz.field(default=100, doc="problems that are asked, the first of the task")
    num_samples: int = chz.field(default=8, doc="tries at every problem, beside the greedy one")
    temperature: float = chz.field(default=1.0, doc="of the tries; that of training")
    max_tokens: int = chz.field(default=256, doc="longest reply")
    question_template: str | None = chz.field(default=None, doc=QUESTION_TEMPLATE)
    system_prompt: str | None = chz.field(default=None, doc="system message before every question")
    num_pairs: int = chz.field(
        default=100, doc="problems of which a pair of answers is judged; 0 judges none"
    )
    judge_answers_first: bool = chz.field(
        default=False, doc="the model answers the problem itself, and judges answers behind its own"
    )
    rewards: list[str] = chz.field(
        default_factory=lambda: ["majority", "judge_answer", "log_probability", "shuffled"],
        doc="rewards of solutions that are held against the truth",
    )
    criteria: dict[str, float] | None = criteria_field(
        "rubric among the rewards, by default that an answer is right"
    )
    conversations: int = chz.field(
        default=0, doc="problems, the first ones, that are also talked about in every kind of conversation"
    )
    kinds: list[str] = chz.field(
        default_factory=lambda: ["conversation", "critique"], doc="of conversation, critique"
    )
    num_agents: int = chz.field(default=3, doc="in every conversation")
    max_rounds: int = chz.field(default=2, doc="of conversation")
    grader: str = chz.field(default="math", doc="math, exact, choice, module:FUNCTION or path.py:FUNCTION")
    seed: int = 0
    resamples: int = chz.field(default=2000, doc="draws of the bootstrap")
    output: str | None = chz.field(default=None, doc="JSON file; default: a file in runs/screen")


JUDGE_OPTIONS = ("judge", "criteria", *chz.chz_fields(JudgeConfig))
"""Options of judges."""

_NOT_THE_RECIPES = frozenset({*chz.chz_fields(OpenedOptions), *JUDGE_OPTIONS})
"""Options whose recipes' namesakes say how the run was trained, not how it is evaluated."""

_READING = (
    *("hf_dataset_name_config", "hf_dataset_revision", "hf_streaming"),
    *("hf_prompt_column", "hf_answer_column", "hf_test_split"),
)
DEFAULTS = RecipeConfig(log_path="")
"""Options of all recipes, as none is given."""


def stored_options(config_class: type[ConfigT], stored: Mapping[str, object]) -> ConfigT:
    """A recipe's options from the content of ``config.json``, which is empty where the target is no run.

    Names that the recipe does not know any more are left out.
    """
    known = {name: stored[name] for name in chz.chz_fields(config_class) if name in stored}
    defaults: dict[str, Any] = {"log_path": ""}
    if not stored:
        defaults["num_test_conversations"] = _DEFAULT_CONVERSATIONS
    return config_class(**(defaults | fitting(known, config_class)))


def recipe_options(config: ConfigT, options: EvalOptions) -> ConfigT:
    """A recipe's options, with those given to ``viva eval`` in their place."""
    names = chz.chz_fields(config).keys() - _NOT_THE_RECIPES
    given = {
        name: value for name, value in chz.asdict(options).items() if name in names and value is not None
    }
    if options.num_samples is not None:
        given["eval_samples"] = options.num_samples
    if "test_prompts_path" in given and "hf_dataset_name" not in given:
        given["hf_dataset_name"] = None  # another test set, not one more
    if "hf_dataset_name" in given:
        given = {"test_prompts_path": None} | given
    if given.get("hf_dataset_name", config.hf_dataset_name) != config.hf_dataset_name:
        # how to read the run's own data set says nothing about another one
        given = {name: getattr(DEFAULTS, name) for name in _READING} | given
    return chz.replace(config, **given)
