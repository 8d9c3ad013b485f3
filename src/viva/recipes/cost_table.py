"""What ``viva cost`` prints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from viva.conversation.prompts import counted
from viva.recipes.cost import CostOptions, RecipeCost
from viva.scaling.counts import Passes
from viva.scaling.hardware import PRESETS, ModelShape, cache_bytes, read_shape, step_flops, step_time
from viva.tiny import model_path
from viva.training.learning_rate import cached_config


def cost_text(cost: RecipeCost, options: CostOptions) -> str:
    """Tokens of a step, then FLOPs, memory and hours of every model.

    Raises:
        ValueError: If a model or an assumption makes no sense.
    """
    shapes = [_shape(name) for name in options.model]
    update = "adapter" if cost.is_lora else "all weights"
    parts = [
        f"{cost.summary}; {update} trained",
        _lines([("tokens per step", "each by itself", "prefixes once", "saved"), *_token_rows(cost)]),
        _lines([("per step", "PFLOP", "with reuse", "cache GB", "with reuse"), *_work_rows(cost, shapes)]),
        _lines(
            [
                (
                    f"hours of {counted(options.steps, 'step')}",
                    "prefill",
                    "decode",
                    "score",
                    "train",
                    "all",
                    "without reuse",
                ),
                *(row for shape in shapes for row in _hour_rows(cost, shape, options)),
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _shape(name: str) -> ModelShape:
    """Of a preset, a folder, the built-in policy, or a hub's model that was loaded before."""
    if name == "tiny":
        return replace(read_shape(str(model_path())), name=name)
    found = None if name in PRESETS or Path(name).expanduser().is_dir() else cached_config(name)
    return read_shape(name) if found is None else replace(read_shape(str(found.parent)), name=name)


def _token_rows(cost: RecipeCost) -> list[tuple[str, ...]]:
    counts = cost.counts
    rows: list[tuple[str, ...]] = [
        (f"sampled, {counted(counts.num_calls, 'reply', 'replies')}", f"{counts.sampled:,.0f}", "", "")
    ]
    if counts.judged:
        rows.append((f"sampled, {counts.num_judge_calls} verdicts", f"{counts.judged:,.0f}", "", ""))
    rows.append(("prompts of agents", *_passes(counts.prompts)))
    if counts.num_judge_calls:
        rows.append(("prompts of the judge", *_passes(counts.judge_prompts)))
    if counts.scored.rows.tokens:
        rows.append(("scored before the update", *_passes(counts.scored)))
    rows.append((f"trained, {counts.num_datums} datums", *_passes(counts.trained)))
    return rows


def _passes(passes: Passes) -> tuple[str, str, str]:
    return f"{passes.rows.tokens:,.0f}", f"{passes.tree.tokens:,.0f}", f"{passes.saved:.0%}"


def _work_rows(cost: RecipeCost, shapes: Sequence[ModelShape]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for shape in shapes:
        flops = [step_flops(cost.counts, shape, reuse=reuse, is_lora=cost.is_lora) for reuse in (False, True)]
        cache = [
            cache_bytes(cost.calls, cost.counts.num_groups, shape, reuse=reuse) for reuse in (False, True)
        ]
        name = f"{shape.name}, {shape.parameters / 1e9:.3g} B parameters"
        rows.append(
            (name, *(f"{each / 1e15:,.1f}" for each in flops), *(f"{each / 1e9:,.1f}" for each in cache))
        )
    return rows


def _hour_rows(cost: RecipeCost, shape: ModelShape, options: CostOptions) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number in options.accelerators:
        times = [
            step_time(
                cost.calls,
                cost.counts,
                shape,
                number,
                assumptions=options.assumptions,
                reuse=reuse,
                is_lora=cost.is_lora,
            )
            for reuse in (True, False)
        ]
        title = f"{shape.name} on {number}"
        if times[0] is None or times[1] is None:
            rows.append((title, *["does not fit"] * 6))
            continue
        seconds = (
            times[0].prefill,
            times[0].decode,
            times[0].score,
            times[0].train,
            times[0].total,
            times[1].total,
        )
        rows.append((title, *(f"{each * options.steps / 3600:.2f}" for each in seconds)))
    return rows


def _lines(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in rows
    )
