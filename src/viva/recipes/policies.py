"""Several policies in one run, as an option of recipes of conversations: who is trained, and who only takes part.

Weights of a member that is not trained: ``initial`` (what the run begins with), ``past:K`` (a trained member as it was
after the last multiple of K steps), ``league:K`` (in each conversation one of its `LEAGUE` newest past selves, drawn by
the seed), or the name of weights: a run, ``RUN@CHECKPOINT``, an adapter, another model with the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viva.conversation.messages import did_you_mean
from viva.conversation.roles import Roles
from viva.eval.direct import DirectEvaluator
from viva.judging.judge import SamplingClient
from viva.recipes.common import OpenRun
from viva.recipes.evaluation.target import Target, find_target, open_policy
from viva.rewards.base import Reward
from viva.run.checkpoints import member_state
from viva.sdk import TrainingClient, settled
from viva.training.console import Begin
from viva.training.followers import NEVER, PastSelves
from viva.training.members import Members
from viva.training.sampling import member_of
from viva.training.service import EngineConfig

if TYPE_CHECKING:
    from viva.recipes.plan import Plan

LEAGUE = 8
"""Past selves of a league."""
_CRITIC = "critic"
_RECORD = "member_weights"
"""A key of ``config.json``: digests of other weights by member; a path may hold others by the time of a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWeights:
    """Weights that the trained member `of` had: of the `most` newest multiples of `every` steps."""

    of: str
    every: int
    most: int


def past_weights(name: str, roles: Roles) -> PastWeights | None:
    """The past selves that a member's weights name; ``None`` if they are others.

    Raises:
        ValueError: If their form is wrong, or nobody trained has that name.
    """
    text, main = roles.weights[name], roles.trained[0]
    kind, *rest = text.split(":")
    if kind == "initial" and not rest:
        return PastWeights(of=main, every=NEVER, most=1)
    if kind not in ("past", "league"):
        return None
    form = f"policies: {name} has the weights {text!r}; give {kind}:STEPS, like {kind}:20"
    if not rest or not rest[0].isdecimal() or int(rest[0]) < 1 or len(rest) > 2:
        raise ValueError(f"{form}, with 1 step or more")
    if len(rest) == 1 and len(roles.trained) > 1:
        raise ValueError(f"{form}:{main}, since more than one member is trained")
    of = rest[1] if len(rest) == 2 else main
    if of not in roles.trained:
        raise ValueError(
            f"policies: {name} has the weights {text!r}, and {of!r} is not trained; trained are "
            f"{', '.join(roles.trained)}.{did_you_mean(of, roles.trained)}"
        )
    return PastWeights(of=of, every=int(rest[0]), most=1 if kind == "past" else LEAGUE)


def other_weights(name: str, roles: Roles, engine: EngineConfig) -> Target:
    """The weights of a member that are no past self of the run's own.

    Raises:
        ValueError: If there are none, or they lie where the engine cannot read them.
    """
    text = roles.weights[name]
    path, at, checkpoint = text.rpartition("@")
    if not at or "://" in text or not Path(path).expanduser().is_dir():
        path, checkpoint = text, ""
    known = ("trained", "initial", "past:20", "league:20")
    try:
        target = find_target(path, checkpoint=checkpoint or None)
    except ValueError as error:
        raise ValueError(
            f"policies: {name} has the weights {text!r}, which are no {', '.join(known)} and nothing to load: {error}"
        ) from error
    if target.weights is None and not Path(path).exists() and "/" not in path and path != "tiny":
        raise ValueError(
            f"policies: {name} has the weights {text!r}; allowed: {', '.join(known)}, a run, RUN@CHECKPOINT, an "
            f"adapter or a model.{did_you_mean(text, known)}"
        )
    target.check_readable(engine, f"policies: {name}, {text!r},")
    return target


def judging_member(roles: Roles, named: str | None) -> str:
    """The member whose weights judge: the named one, else ``critic``, else the main one."""
    if named is None:
        return _CRITIC if _CRITIC in roles.weights else roles.trained[0]
    if named not in roles.weights:
        raise ValueError(
            f"judge_member must be one of {', '.join(roles.weights)}; got {named!r}."
            f"{did_you_mean(named, roles.weights)}"
        )
    return named


def with_checked_policies(plan: Plan, roles: Roles | None, reward: Reward, judge_member: str | None) -> Plan:
    """The plan of a run whose policies can be had; ``config.json`` keeps digests of the weights that it reads.

    Raises:
        ValueError: If a policy cannot be had, or an option would change nothing.
    """
    judge = reward.judge
    is_own = judge is not None and judge.model is None and judge.endpoint is None
    asks = is_own or (reward.scorer is not None and reward.scorer.model is None)
    if judge_member is not None and (roles is None or not asks):
        why = "policies=shared" if roles is None else f"the reward {reward.name} asks no policy of the run"
        raise ValueError(f"judge_member={judge_member} would change nothing: {why}; leave it out")
    if roles is None:
        return plan
    if plan.config.stream_updates:
        raise ValueError(
            "stream_updates trains one policy while groups are played; with several use max_staleness"
        )
    judging = judging_member(roles, judge_member)
    if judging in roles.frozen and judge is not None and judge.policy in ("every", "ema"):
        raise ValueError(
            f"judge={judge.policy} follows a policy that is trained, and {judging} is not; give "
            f"judge_member={roles.trained[0]}, or judge=current for {judging} as it is"
        )
    digests: dict[str, str] = {}
    num_policies = len(roles.weights)
    for name in roles.frozen:
        past = past_weights(name, roles)
        if past is None:
            found = other_weights(name, roles, plan.engine).digest
            digests |= {} if found is None else {name: found}
        else:
            num_policies += past.most - 1
    told = ", ".join(f"{name} {weights}" for name, weights in roles.weights.items())
    record = {**plan.record, _RECORD: digests} if digests else plan.record
    summary = f"{plan.summary}; policies: {told}{_asked_in_words(reward, judging)}"
    return replace(plan, record=record, summary=summary, num_policies=num_policies)


def _asked_in_words(reward: Reward, member: str) -> str:
    """Who judges or scores, a member of the run or another model; empty where nobody does."""
    asked = reward.judge or reward.scorer
    if asked is None:
        return ""
    role, endpoint = ("scorer", None) if reward.judge is None else ("judge", reward.judge.endpoint)
    other = asked.model if endpoint is None else endpoint.model
    if other is not None:
        return f"; {role}: {other}"
    return f"; {role}: {member}{'' if asked.policy == 'current' else f' ({asked.policy})'}"


async def open_members(roles: Roles, plan: Plan, opened: OpenRun) -> Members:
    """The policies of a run where it begins or goes on; the main one is open already.

    Raises:
        ValueError: If weights cannot be read, or have other tokens.
    """
    main, *others = roles.trained
    trained = {main: opened.client} | {name: await _open_trained(name, plan, opened) for name in others}
    frozen = {name: await _open_frozen(name, roles, trained, plan, opened) for name in roles.frozen}
    return Members(trained=trained, frozen=frozen)


async def _open_trained(name: str, plan: Plan, opened: OpenRun) -> TrainingClient:
    """A member's training client: its state beside the checkpoint, else weights as the main policy's were."""
    if opened.resume_from is None:
        return await plan.open_start(opened.service)
    path = opened.folder.checkpoints.resolve(opened.resume_from, member_state(name))
    return await plan.open_state(opened.service, path)


async def _open_frozen(
    name: str, roles: Roles, trained: Mapping[str, TrainingClient], plan: Plan, opened: OpenRun
) -> SamplingClient | PastSelves:
    journal, past = opened.folder.journal, past_weights(name, roles)
    if past is None:
        return journal.client(await _open_other(name, roles, plan, opened), f"member {name}")
    if past.every == NEVER and plan.load_checkpoint_path is None:
        client = await settled(opened.service.create_sampling_client(base_model=plan.model))
        return journal.client(client, f"member {name}")
    whose, client = f"member {name}", trained[past.of]
    return opened.past_selves(
        client, plan, name=f"past-{name}", whose=whose, every=past.every, most=past.most
    )


async def _open_other(name: str, roles: Roles, plan: Plan, opened: OpenRun) -> SamplingClient:
    target = other_weights(name, roles, plan.engine)
    other = await open_policy(target, plan.engine, renderer_name=plan.renderer_name, service=opened.service)
    own: Any = opened.client.get_tokenizer()
    its: Any = other.renderer.tokenizer
    if own.get_vocab() != its.get_vocab():
        raise ValueError(
            f"policies: {name} has the weights {roles.weights[name]!r} of a model with other tokens than {plan.model}; "
            "agents read one another's prompts in one format, so give a model of the same family"
        )
    return other.client


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvaluator:
    """Measures a member as `inner` measures the main policy; metrics begin with its name."""

    inner: DirectEvaluator
    name: str

    async def __call__(self, sampler: SamplingClient, step: int, begin: Begin) -> Mapping[str, float]:
        """Metrics with the member's name."""
        metrics = await self.inner(member_of(sampler, self.name), step, begin)
        return {f"{self.name}/{key}": value for key, value in metrics.items()}
