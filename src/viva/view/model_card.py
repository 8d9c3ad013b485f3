"""The model card of exported weights: README.md with a YAML header, the run's configuration and what was measured.

The header's values are written as JSON, which is YAML, so no text of a user's can break out of it.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from viva.conversation.messages import counted
from viva.run.files import INDEX, METRICS_FILE
from viva.run.secrets import without_secrets
from viva.view.run_index import RunIndex
from viva.view.summary import ACCURACY, Gain, gain_of

_RESULTS = {
    ACCURACY: "right answers, asked directly",
    "test/direct_finish_rate": "finished answers, asked directly",
    "test/direct_reply_tokens": "tokens of a direct answer",
    "test/conversation/correct/first": "right in a conversation, at first",
    "test/conversation/correct/final": "right in a conversation, at its end",
    "test/conversation/correct/best": "right in a conversation, the solution with the highest score",
    "test/conversation/rank_correlation": "rank correlation of scores with being right",
}
"""Figures of an evaluation, where they were measured."""

_BUILT_IN = "tiny"
"""The base model that comes with Viva."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PRIVATE = ("base_url",)
"""Options that say where somebody's machines are."""
_PATHS = ("log_path", "train_prompts_path", "test_prompts_path", "judge_prompt_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Contents of a model card."""

    run: RunIndex
    num_steps: int
    """Training steps of the exported weights."""
    kind: Literal["adapter", "model", "gguf"]
    base_model: str
    """As the option ``model_name`` gives it."""
    precision: str
    file: str | None = None
    """Name of the GGUF file."""


def measurements(run: RunIndex, num_steps: int) -> dict[str, Gain]:
    """The change of each metric up to the last evaluation that is not later than the weights; none if damaged."""
    if _damage(run) is not None:
        return {}
    found = {metric: gain_of(run, metric, num_steps=num_steps) for metric in _RESULTS}
    return {metric: gain for metric, gain in found.items() if gain is not None}


def _damage(run: RunIndex) -> str | None:
    """Reasons not to trust the run's figures."""
    return next((problem for problem in run.problems if METRICS_FILE in problem or INDEX in problem), None)


def model_card(card: ModelCard) -> str:
    """The text of README.md; it tells no secrets."""
    found = measurements(card.run, card.num_steps)
    parts = [
        _header(card, found),
        f"# {_one_line(card.run.folder.resolve().name)}\n\n{_summary(card)}",
        f"## Use\n\n{_usage(card)}",
        f"## Measured\n\n{_table(card, found)}",
        f"## Configuration\n\nOptions of the run, paths by their last part:\n\n````json\n{_configuration(card)}\n````",
    ]
    return without_secrets("\n\n".join(parts) + "\n")


def _header(card: ModelCard, found: Mapping[str, Gain]) -> str:
    config = card.run.config
    recipe = str(config.get("recipe", "unknown"))
    fields: dict[str, object] = {}
    if _is_hub_name(card.base_model):
        fields["base_model"] = card.base_model
    fields["library_name"] = {"adapter": "peft", "model": "transformers", "gguf": "gguf"}[card.kind]
    fields["pipeline_tag"] = "text-generation"
    fields["tags"] = ["viva", "reinforcement-learning", recipe, *(["lora"] if card.kind == "adapter" else [])]
    data_set = config.get("hf_dataset_name")
    if isinstance(data_set, str) and _is_hub_name(data_set):
        fields["datasets"] = [data_set]
    if ACCURACY in found:
        fields["model-index"] = [_index(card, found[ACCURACY])]
    lines = [f"{name}: {json.dumps(value, ensure_ascii=True)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _index(card: ModelCard, accuracy: Gain) -> dict[str, object]:
    config = card.run.config
    name = str(config.get("hf_dataset_name") or "")
    tested = str(config.get("test_prompts_path") or name)
    data_set = {
        "type": name if _is_hub_name(name) and tested == name else "prompts",
        "name": _shown("hf_dataset_name", tested) or "test prompts of the run",
    }
    metric = {"type": "accuracy", "name": _RESULTS[ACCURACY], "value": accuracy.after}
    return {
        "name": card.run.folder.resolve().name,
        "results": [{"task": {"type": "text-generation"}, "dataset": data_set, "metrics": [metric]}],
    }


def _is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "run"


def _summary(card: ModelCard) -> str:
    what = "A LoRA adapter for" if card.kind == "adapter" else "A language model trained from"
    recipe = card.run.config.get("recipe", "unknown")
    weights = "weights" if card.kind == "gguf" else "base weights"
    return (
        f"{what} `{_model_name(card.base_model)}`, trained by the recipe `{recipe}` of Viva: "
        f"{counted(card.num_steps, 'training step')}, {card.precision} {weights}.{_digests(card)}"
    )


def _digests(card: ModelCard) -> str:
    """The base model's digests, where the run recorded them."""
    digests: Mapping[str, str] = card.run.config.get("base_digests") or {}
    told = ", ".join(f"{part} `{digest}`" for part, digest in digests.items() if part != "commit")
    commit = f" Its commit on the hub: `{digests['commit']}`." if "commit" in digests else ""
    return f"\n\nSHA-256 of the base model's files: {told}.{commit}" if told else ""


def _model_name(model: str) -> str:
    """A model's name; of a folder, its last part."""
    return model if _is_hub_name(model) else Path(model).name


def _usage(card: ModelCard) -> str:
    if card.kind == "gguf":
        file = shlex.quote(f"./{card.file}")
        return f"```bash\nllama-cli -m {file}\n```\n\nIn Ollama: `FROM {file}` in a Modelfile, then `ollama create`."
    if card.kind == "model":
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'model = AutoModelForCausalLM.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")'
        )
        return f"```python\n{code}\n```"
    revision = card.run.config.get("model_revision")
    pin = (
        "" if revision is None or not _is_hub_name(card.base_model) else f", revision={json.dumps(revision)}"
    )
    where, more = json.dumps(_model_name(card.base_model)), ""
    if card.base_model == _BUILT_IN:
        where, more = "str(model_path())", "\nfrom viva.tiny import model_path\n"
    elif not _is_hub_name(card.base_model):
        more = f"\n# {where} is the folder of the base model: give its path\n"
    code = (
        f"from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n{more}\n"
        f"base = AutoModelForCausalLM.from_pretrained({where}{pin})\n"
        'model = PeftModel.from_pretrained(base, ".")'
    )
    return (
        f"```python\n{code}\n```\n\n"
        "Do not merge it with `merge_and_unload` where the base model ties its output layer to its embeddings: the "
        "adapter changes the output layer alone. `viva export` writes the merged model, with the two apart."
    )


def _table(card: ModelCard, found: Mapping[str, Gain]) -> str:
    damage = _damage(card.run)
    if damage is not None:
        return f"No figures: {_one_line(damage)}"
    if not found:
        return "Nothing was measured on test prompts."
    rows = ["| on the run's test prompts | before | after | steps |", "|---|---|---|---|"]
    for metric, gain in found.items():
        # a run that was resumed with evaluation switched on has none of its beginning
        is_before = gain.first_step == 0 < gain.last_step
        before = _number(gain.before, gain.before_half_width) if is_before else ""
        after = _number(gain.after, gain.after_half_width)
        rows.append(f"| {_RESULTS[metric]} | {before} | {after} | {gain.last_step} |")
    notes = [
        "± is the 95 % interval, from the standard error over the prompts; without it, none was recorded."
    ]
    questions = dict(card.run.points("test/direct_questions"))
    if questions:
        notes.append(f"Direct answers: {max(questions.values()):.0f} prompts.")
    if any(gain.last_step < card.num_steps for gain in found.values()):
        notes.append("Figures of fewer steps than the weights have were measured earlier in the run.")
    return "\n".join(rows) + "\n\n" + " ".join(notes)


def _number(value: float, half_width: float | None) -> str:
    text = f"{value:.1f}" if abs(value) > 1 else f"{value:.3f}"
    return text if half_width is None else f"{text} ± {half_width:.3f}"


def _configuration(card: ModelCard) -> str:
    told = {
        name: value for name, value in card.run.config.items() if value is not None and name not in _PRIVATE
    }
    return json.dumps({name: _shown(name, value) for name, value in told.items()}, indent=2)


def _shown(name: str, value: object) -> object:
    if name == "train_prompts" and isinstance(value, list):
        return counted(len(value), "prompt")
    if name == "policies" and isinstance(value, dict):  # weights may be paths
        weights = cast(dict[str, str], value)
        return {member: _model_name(text) for member, text in weights.items()}
    is_path = name in _PATHS or (
        name in ("model_name", "hf_dataset_name", "judge", "eval_judge")
        and not _is_hub_name(str(value))
        and "://" not in str(value)
    )
    return Path(str(value)).name if is_path else value
