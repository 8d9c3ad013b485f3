"""Options become a plan; mistakes are found here, before a model is loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import chz

from viva.conversation.messages import counted
from viva.conversation.protocol import persona
from viva.judging.answers import AnswerCheck
from viva.judging.judge import JudgeOptions
from viva.recipes.config import RecipeConfig
from viva.recipes.data import held_out_source, load_test_prompts
from viva.recipes.evaluation import KINDS, EvalOptions, OpenedOptions, recipe_options, stored_options
from viva.recipes.evaluation.planned import ANSWERING, CONVERSATIONS, KIND_OF
from viva.recipes.evaluation.target import OpenPolicy, Target, open_policy
from viva.recipes.judges import find_judge
from viva.recipes.plan import at_least, not_negative, positive
from viva.recipes.protocol import ConversationConfig
from viva.recipes.reward import ENDPOINT_BOUNDS
from viva.run.files import place_problem
from viva.selfplay.user_code import find_check, source_digests
from viva.tiny import model_path
from viva.training.data import PromptItem, derive_seed, prompts_digest
from viva.training.service import EngineConfig, Engines, choose_engine

_UNUSED = frozenset(
    {
        *("stop_at", "stop_on", "alarm_levels", "initial_judge_pairs"),
        *("reward_weights", "judge_prompt_path"),
        *ENDPOINT_BOUNDS,
    }
)
"""Recipes' options that have no part in what is said or scored."""
_BUILT_IN_PROBLEMS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """Questions, samples and grading; the same for all policies that are compared."""

    options: EvalOptions
    kinds: tuple[str, ...]
    shared: RecipeConfig
    """Options of direct answers, seeds and data."""
    conversations: dict[str, ConversationConfig]
    """By kind."""
    items: tuple[PromptItem, ...]
    """Problems with known answers; where a judge compares, all."""
    source: str
    """Origin of the problems, for the user."""
    num_unanswered: int
    """Problems left out for want of an answer."""
    check: AnswerCheck
    code: dict[str, str | None]
    """Digests of the user's own code that speaks, pays or grades, by the name under which options have it."""
    is_judged: bool
    """Whether a judge compares the direct answers of two policies."""

    @property
    def is_open(self) -> bool:
        """Whether some of the problems have no known answer."""
        return any(item.answer is None for item in self.items)

    @property
    def measured(self) -> str:
        """The number of problems, and their origin."""
        told = f"{counted(len(self.items), 'problem')} {self.source}"
        num_open = sum(item.answer is None for item in self.items)
        return f"{told}, {num_open} without a known answer" if num_open else told

    @property
    def talked_about(self) -> tuple[PromptItem, ...]:
        """Problems that are played as conversations."""
        return self.items[: self.shared.num_test_conversations]

    @property
    def record(self) -> dict[str, Any]:
        """All that decides what is sampled and how it is graded, ready for JSON."""
        shared = self.shared
        record: dict[str, Any] = {
            "kinds": list(self.kinds),
            "num_samples": shared.eval_samples,
            "equal_tokens": self.options.equal_tokens,
            "grader": self.check.name,
            "seed": shared.seed,
            "max_tokens": shared.max_tokens,
            "eval_temperature": shared.direct_temperature,
            "eval_greedy": shared.eval_greedy,
            "resamples": self.options.resamples,
        }
        if shared.system_prompt is not None:
            record["system_prompt"] = shared.system_prompt
        for kind, config in self.conversations.items():
            record[kind] = recipe_record(config, config.game().reward.judge)
            record[kind]["problems"] = len(self.talked_about)
        if self.code:
            record["user_code"] = self.code
        return record

    def edited(self, target: Target) -> list[str]:
        """Names of the user's own code that a run was trained with and that is another one now."""
        then = target.config.get("user_code") or {}
        return [name for name, digest in self.code.items() if then.get(name, digest) != digest]

    @property
    def digest(self) -> str:
        """Digest of the problems."""
        return prompts_digest(self.items)


def recipe_record(config: RecipeConfig, judge: JudgeOptions | None) -> dict[str, Any]:
    """All of a recipe's own options that decide what is said and scored, with its judge; ready for JSON."""
    own = sorted(set(chz.chz_fields(type(config))) - set(chz.chz_fields(RecipeConfig)))
    names = [*own, "num_agents", "personas", "on_failure", "temperature", "max_retries"]
    record = {name: getattr(config, name) for name in names if name not in _UNUSED}
    if judge is not None:
        record["judge_prompt"] = judge.system_prompt
    return record


def make_plan(target: Target, options: EvalOptions, *, is_compared: bool) -> EvalPlan:
    """Check all options and load the problems; a run's options are the defaults.

    Where two policies are compared and no answer is known, or a judge is named, a judge compares their answers.

    Raises:
        ValueError: For anything the user has to fix.
    """
    _check_options(options)
    check_output(options.output)
    recipe = str(target.config.get("recipe"))
    shared = recipe_options(stored_options(ANSWERING.get(recipe, RecipeConfig), target.config), options)
    default = ["direct"]
    if recipe in KIND_OF and shared.num_test_conversations > 0:
        default.append(KIND_OF[recipe])
    kinds = tuple(dict.fromkeys(options.kinds or default))
    if "protocol" in kinds and recipe != "protocol":
        raise ValueError(
            f"kinds=protocol needs a run that trained a protocol of its own; {target.name} is none"
        )
    conversations = {
        kind: recipe_options(stored_options(CONVERSATIONS[kind], target.config), options)
        for kind in kinds
        if kind != "direct"
    }
    for config in conversations.values():
        check_conversation(config)
        find_judge(config.game().reward.judge, engine_of(target, options))
    check = find_check(shared.grader) if options.grader is not None else _own_check(shared.grader)
    everything, source = _problems(shared, target, options)
    known = tuple(item for item in everything if item.answer is not None)
    is_judged = is_compared and (options.judge is not None or options.criteria is not None or not known)
    items = tuple(everything) if is_judged else known
    if not items:
        raise ValueError(_no_answers(shared, everything, source))
    if len(known) < len(items) and options.kinds is None:
        kinds, conversations = ("direct",), {}
    if is_judged:
        _check_judged_kinds(kinds, is_open=len(known) < len(items))
        shared = chz.replace(shared, eval_samples=options.num_samples or 1)  # a judge reads each twice
    for item in known:
        if why := check.refuses(item.answer or ""):
            raise ValueError(why)
    return EvalPlan(
        options=options,
        kinds=kinds,
        shared=shared,
        conversations=conversations,
        items=items,
        source=source,
        num_unanswered=len(everything) - len(items),
        check=check,
        code=_code_of(shared, conversations),
        is_judged=is_judged,
    )


def _code_of(shared: RecipeConfig, conversations: Mapping[str, ConversationConfig]) -> dict[str, str | None]:
    code = source_digests(shared.grader)
    for config in conversations.values():
        code |= cast(dict[str, str | None], config.record().get("user_code", {}))
    return code


def _own_check(grader: str) -> AnswerCheck:
    """The check by which the run was graded, where no other one is given."""
    try:
        return find_check(grader)
    except ValueError as error:
        raise ValueError(
            f"the run's grader cannot be had any more: {error}. Give another one, as in grader=math"
        ) from error


def _check_judged_kinds(kinds: tuple[str, ...], *, is_open: bool) -> None:
    if is_open and kinds != ("direct",):
        raise ValueError(
            f"kinds must be left out, or be direct, where a judge compares answers to problems without known ones; got "
            f"{', '.join(kinds)}: conversations are measured by known answers"
        )
    if "direct" not in kinds:
        raise ValueError(
            f"a judge compares direct answers; got kinds={', '.join(kinds)}: add direct, or leave out judge"
        )


def _no_answers(shared: RecipeConfig, everything: list[PromptItem], source: str) -> str:
    split = ", or its split (hf_test_split=...)" if shared.hf_dataset_name is not None else ""
    return (
        f"there is no problem with a known answer among the {len(everything)} {source}; give a test set with "
        f"some{split}, or have a judge compare the answers with another policy's: against=base, or "
        "against=RUN_OR_MODEL"
    )


def _check_options(options: EvalOptions) -> None:
    for kind in options.kinds or ():
        if kind not in KINDS:
            raise ValueError(f"kinds must be of {', '.join(KINDS)}; got {kind!r}")
    if options.kinds == []:
        raise ValueError(f"kinds must name at least one of {', '.join(KINDS)}")
    counts = ("num_samples", "max_test_samples", "num_test_conversations", "max_tokens")
    at_least(options, dict.fromkeys(counts, 1) | {"resamples": 100, "judge_max_tokens": 1})
    not_negative(options, "temperature", "eval_temperature")


def draws_seed(record: Mapping[str, Any]) -> int:
    """Seed of the bootstrap, from an evaluation's options: the same draws for every policy that is asked the same."""
    return derive_seed(int(record["seed"]), "bootstrap")


def check_output(name: str | None) -> None:
    """Refuse an ``output`` that could not be written, or not be recognised as a result file afterwards."""
    if name is None:
        return
    path = Path(name).expanduser()
    if not name.endswith(".json") or path.is_dir():
        raise ValueError(f"output must be a file that ends in .json, as in output=result.json; got {name!r}")
    check_place(path)


def content_digest(*content: object) -> str:
    """Eight letters that differ where the content does."""
    return blake2b(json.dumps(content).encode(), digest_size=4).hexdigest()


def result_path(folder: Path, name: str, *content: object) -> Path:
    """A result file; its name is shortened and simplified, so the digest of the content tells what it is of."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")
    return folder / f"{stem[-60:]}-{content_digest(*content)}.json"


def check_place(path: Path) -> None:
    """Refuse a result file in a folder that cannot be written to."""
    if problem := place_problem(path.parent):
        raise ValueError(f"{path} cannot be written: {path.parent} {problem}; give another output=FILE.json")


def check_conversation(config: ConversationConfig) -> None:
    """Refuse options of a conversation that cannot be played."""
    at_least(config, {"num_agents": 2, "num_test_conversations": 1, "max_tokens": 1, "max_retries": 0})
    positive(config, "policy_timeout_s")
    not_negative(config, "temperature")
    if config.personas is not None:
        persona(0, config.personas)
    config.game()


def _problems(shared: RecipeConfig, target: Target, options: EvalOptions) -> tuple[list[PromptItem], str]:
    """All problems, and where they are from."""
    if held_out_source(shared) is not None or shared.hf_dataset_name is not None:
        items = load_test_prompts(shared)
        split = "" if shared.hf_test_split is None else f", split {shared.hf_test_split}"
        hub = None if shared.hf_dataset_name is None else f"{shared.hf_dataset_name}{split}"
        return items, f"of {' and '.join(place for place in (held_out_source(shared), hub) if place)}"
    if target.folder is None and target.model == str(model_path()):
        from viva.tiny.tasks import problems

        count = options.max_test_samples or _BUILT_IN_PROBLEMS
        items = [
            PromptItem(question=problem.question, answer=str(problem.answer))
            for problem in problems("test", count, seed=0)
        ]
        return items, "of the built-in arithmetic, which the built-in policy was not raised on"
    raise ValueError(_no_test_set(target))


def _no_test_set(target: Target) -> str:
    problem = "there is no test set"
    if target.folder is not None:
        problem = (
            f"{target.folder} was trained without a test set, and its training prompts would not show a gain"
        )
    remedy = (
        "give test_prompts_path=... (JSONL with query and answer), or hf_dataset_name=... with hf_prompt_column and "
        "hf_answer_column"
    )
    if target.folder is not None and target.model == str(model_path()):
        remedy += f"; for the arithmetic of the built-in policy: viva eval tiny against={target.folder}"
    return f"{problem}: {remedy}"


def engine_of(target: Target, options: OpenedOptions) -> EngineConfig:
    """The engine as given, else as of the policy's run, else by `choose_engine`."""
    stored = target.config
    engine = options.engine or (
        "remote"
        if options.base_url or "://" in target.name
        else stored.get("engine") or choose_engine(None, base_url=None, model=target.model)
    )
    return EngineConfig(
        engine=engine,
        base_url=options.base_url or (stored.get("base_url") if engine == "remote" else None),
        device=options.device or stored.get("device"),
        precision=options.precision or stored.get("precision", "float32"),
    )


async def open_target(target: Target, options: OpenedOptions, engines: Engines) -> OpenPolicy:
    """A policy on its engine, with the renderer as given, else as of the policy's run."""
    engine = engine_of(target, options)
    renderer_name = options.renderer_name or target.config.get("renderer_name")
    return await open_policy(target, engine, renderer_name=renderer_name, service=engines.service(engine))
