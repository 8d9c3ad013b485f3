"""Supervised training before a run: a model learns to judge pairs, or to speak in the form of a protocol.

    viva train warmup examples=judge model_name=... train_prompts_path=problems.jsonl log_path=runs/judge
    viva train warmup examples=critique model_name=... train_prompts_path=prompts.jsonl log_path=runs/form
    viva train critique_self_play load_checkpoint_path=runs/form/state/weights/000040 ...

Examples are made once, by the model as it is at the start, and kept in the run's ``examples.jsonl``:

- ``judge``: pairs of a right and a wrong reply to a problem with a known answer, in both orders; the completion is the
  verdict. Wrong replies are the model's own. The right one is its own, too, or else the wrong one with the known answer
  in the place of its answer, so that form tells nothing.
- a protocol: conversations that the model plays with itself. Replies that could be read as their segment asks are
  completions as they are (rejection sampling); with ``scripted=true`` the others are replaced by a scripted one.
- a file: JSON lines with ``messages``, the last of which is the assistant's.

The loss is the cross-entropy of the completions' tokens; prompts are not trained.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.messages import counted
from viva.recipes.config import RecipeConfig
from viva.recipes.protocol import Game
from viva.recipes.reward import refuse_unused
from viva.run.files import note_written, read_json_lines, write_atomic
from viva.selfplay.check import find_protocol
from viva.selfplay.user_code import source_digests

if TYPE_CHECKING:
    from viva.recipes.common import OpenRun
    from viva.recipes.demonstrations import Pair
    from viva.recipes.plan import Plan
    from viva.training.loop import Evaluator, Training

EXAMPLES = "examples.jsonl"
JUDGE = "judge"
"""The examples of a judge, and their name."""
_UNUSED = (
    *("num_epochs", "max_staleness", "stream_updates"),
    *("loss_fn", "loss_fn_config", "num_substeps", "kl_penalty_coef"),
)


@chz.chz
class Config(RecipeConfig):
    """Options of a warm-up."""

    examples: str = chz.field(
        default=JUDGE,
        doc="what is learned: judge, a protocol (critique, round_robin, path.py:PROTOCOL), or a .jsonl file",
    )
    samples: int = chz.field(
        default=4, doc="replies to each problem, or conversations about each prompt, to make examples of"
    )
    judge_mode: Literal["logprob", "verdict"] = chz.field(
        default="logprob",
        doc="judge: learn the label alone, or a whole verdict whose reasoning is the right reply",
    )
    scripted: bool = chz.field(
        default=False, doc="a protocol: scripted replies in the place of those that cannot be read"
    )
    prompts: dict[str, str] | None = chz.field(default=None, doc="a protocol: its words, as in other recipes")
    batch_size: int | None = chz.field(default=32, doc="examples per step")
    max_steps: int | None = chz.field(default=40, doc="steps of the warm-up")
    eval_every: int = chz.field(default=10, doc="steps between evaluations; 0 never evaluates")
    log_path: str = "runs/warmup"

    def game(self) -> Game:
        """The protocol to learn, without a reward; `ValueError` if it cannot be found or played."""
        from viva.recipes.demonstrations import Unpaid

        protocol = find_protocol(self.examples, self.num_agents)
        if self.personas is not None:
            protocol = replace(protocol, personas=self.personas)
        protocol = replace(protocol, on_failure="continue")
        protocol = protocol if self.prompts is None else protocol.with_prompts(self.prompts)
        protocol.check()
        return Game(protocol=protocol, reward=Unpaid(), num_agents=self.num_agents)

    @property
    def is_protocol(self) -> bool:
        """Whether a protocol is learned."""
        return self.examples != JUDGE and not self.examples.endswith(".jsonl")

    def make_plan(self) -> Plan:
        """Check all options and load the prompts."""
        from viva.recipes.demonstrations import read_messages
        from viva.recipes.plan import BatchUnit, at_least, plan_run

        at_least(self, {"samples": 1})
        refuse_unused(self, _UNUSED, "the loss of a warm-up is cross-entropy, and its length is max_steps")
        if self.max_steps is None:
            raise ValueError("max_steps says how long a warm-up is; give a number")
        if not self.is_protocol and (self.scripted or self.prompts is not None):
            raise ValueError(
                f"scripted and prompts are for protocols; leave them out with examples={self.examples}"
            )
        if self.examples != JUDGE and self.judge_mode != "logprob":
            raise ValueError(
                f"judge_mode={self.judge_mode} is for examples=judge; leave it out with examples={self.examples}"
            )
        if self.is_protocol:
            self.game()
        elif self.examples != JUDGE:
            read_messages(self.examples)
        plan = plan_run(
            self,
            recipe="warmup",
            summary=f"supervised, {self.examples}",
            record={"user_code": source_digests(self.examples)},
            unit=BatchUnit(samples=1, name="1", groups="examples"),
        )
        if self.examples == JUDGE and all(item.answer is None for item in plan.order.items):
            raise ValueError(
                "examples=judge needs problems with known answers, and none has one; give them in the key answer"
            )
        return plan

    async def build_training(self, plan: Plan, opened: OpenRun) -> Training:
        """The loop's parts for an open run; makes the examples, unless the run has them."""
        from viva.judging.judge import JudgeOptions, PolicyRef
        from viva.recipes.demonstrations import JudgeEvaluator, Pair
        from viva.recipes.loop import make_training
        from viva.training.data import Example, ExampleDataset, PromptOrder
        from viva.training.followers import Current

        path = opened.folder.path / EXAMPLES
        if not path.exists():
            await _make(self, plan, opened, path)
        kept = list(read_json_lines(path))
        examples = tuple(Example.of(each) for each in kept if "completion" in each)
        pairs = tuple(Pair(**each["pair"]) for each in kept if "pair" in each)
        talking = PolicyRef(timeout_s=self.policy_timeout_s)
        evaluators: list[Evaluator] = []
        if pairs:
            judge = JudgeOptions(mode=self.judge_mode, max_tokens=self.max_tokens)
            evaluators = [JudgeEvaluator(pairs=pairs, renderer=opened.renderer, options=judge)]
        make_builder = None
        if self.is_protocol:
            make_builder = self.game().factory(opened.renderer, plan.check.is_right, voter_policy=talking)
        return await make_training(
            plan,
            opened,
            make_builder,
            followers=[Current(talking)],
            dataset=ExampleDataset(
                order=PromptOrder(
                    items=examples,
                    seed=self.seed,
                    groups_per_batch=plan.order.groups_per_batch,
                    num_groups=plan.order.num_groups,
                )
            ),
            evaluators=evaluators,
        )


async def _make(config: Config, plan: Plan, opened: OpenRun, path: Path) -> None:
    """Write the examples, and the pairs that a judge is tested on."""
    from viva.recipes.common import say
    from viva.recipes.demonstrations import (
        file_example,
        judged_pairs,
        played_examples,
        read_messages,
        verdicts,
    )
    from viva.sdk import settled

    pairs: list[Pair] = []
    if config.examples.endswith(".jsonl"):
        examples = [file_example(opened.renderer, messages) for messages in read_messages(config.examples)]
    else:
        sampler = await settled(opened.client.save_weights_and_get_sampling_client())
        if config.is_protocol:
            examples = await played_examples(
                plan, opened, sampler, config.game, samples=config.samples, scripted=config.scripted
            )
        else:
            ask = partial(judged_pairs, plan, opened, sampler, samples=config.samples)
            train = await ask(plan.order.items, what="training problems")
            examples = [each for pair in train for each in verdicts(opened.renderer, pair, config.judge_mode)]
            if config.eval_every and plan.test:
                pairs = await ask(plan.test, what="test problems")
    if not examples:
        raise ValueError(
            "no example could be made: no reply was wrong, finished, and right with the known answer in it (judge), or "
            "none could be read (a protocol). Raise max_tokens or samples, change the words (prompts, "
            "question_template), or use scripted=true or a file"
        )
    lines = [each.record() for each in examples] + [{"pair": vars(pair)} for pair in pairs]
    write_atomic(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    note_written([path])
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(each.kind for each in examples).items())
    say(f"{counted(len(examples), 'example')} in {path}: {kinds}")
