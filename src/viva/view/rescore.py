"""Scoring the stored conversations of a run by other rules, without playing them again.

Transcripts of critique self-play are scored as in training (`viva.rewards.review.score_review`) by the run's own rules
with what the options change in them; with ``reward=NAME``, those of any kind by that reward as far as transcripts
suffice, or with ``reward=all`` by each. The result stands beside the rewards that were paid. A judge or scorer is asked
only where one is given (`rescore_with`); else one conversation is in memory at a time.
"""

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias, cast

import chz

from viva.conversation.coordinator import gather_or_cancel
from viva.judging.ballots import ballot_accuracy
from viva.judging.endpoint import EndpointStoppedError
from viva.judging.records import ConversationRecord, Transcript
from viva.judging.remembered import RememberingJudge
from viva.rewards import NAMES, Reward, find_reward
from viva.rewards.base import NO_MODELS, UNPAID, Models
from viva.rewards.critique import stored_votes
from viva.rewards.review import ReviewRules, ReviewVotes, review_rules, score_review, stored_rules
from viva.run.files import TOKENS_FILE, parse_line
from viva.selfplay.user_code import reward_named
from viva.view.conversation import solution_logprobs
from viva.view.files import GrowingFile, Row, iter_transcripts
from viva.view.log_check import check_log
from viva.view.rescoring import Rescoring, Rewards, Scored, mean_of

_Found: TypeAlias = dict[str, Scored | str]
"""Values of a conversation by stream or reward; a text says why there are none."""

_ASKED_AT_ONCE = 16
"""Conversations about which a judge or scorer is asked at once."""

ALL = "all"
"""Stands for all rewards."""
_STREAMS = ("r_sol", "r_meta", "r_diag", "total")


@chz.chz
class RescoreOptions:
    """Options of rescore; what is not given stays as it was in the run."""

    reward: str | None = chz.field(
        default=None,
        doc="another reward by name, path.py:FUNCTION, or all: each that the transcripts suffice for, side by side",
    )
    preset: Literal["paper", "robust"] | None = chz.field(
        default=None, doc="all choices and the weights of this preset, but for prior_precision"
    )
    fit: Literal["separate", "joint"] | None = chz.field(
        default=None, doc="initial and revised solutions each on a scale of their own, or on one"
    )
    meta: Literal["majority", "leave_one_out"] | None = chz.field(
        default=None, doc="r_meta: agreement with all votes, or with those of the others"
    )
    diag: Literal["sum", "mean"] | None = chz.field(default=None, doc="r_diag over the targets of a critic")
    noise_floor: float | None = chz.field(
        default=None, doc="gains smaller than so many standard errors pay nothing"
    )
    solution_floor: float | None = chz.field(
        default=None, doc="solutions that differ by fewer standard errors all earn the mean of their scores"
    )
    identical: Literal["apart", "one_item"] | None = chz.field(
        default=None, doc="solutions with the same words: two items, or one"
    )
    prior_precision: float | None = chz.field(default=None, doc="of the Bradley-Terry fit, above 0")
    reward_weights: dict[str, float] | None = chz.field(
        default=None, doc="weights of r_sol, r_meta and r_diag; those that are not named stay"
    )


def rescore(run_dir: str | Path, options: RescoreOptions) -> Rescoring:
    """Score the conversations of a run's folder again; nobody is asked anything.

    Raises:
        ValueError: If the folder holds no conversation that can be scored, a stored value is damaged, an option is
            out of range, a fit fails, or a joint fit has nothing that links the two rounds.
    """
    return asyncio.run(rescore_with(run_dir, options, named_rewards(options)))


async def rescore_with(
    run_dir: str | Path, options: RescoreOptions, rewards: Mapping[str, Reward], models: Models = NO_MODELS
) -> Rescoring:
    """`rescore` with rewards by their rows in the table, and a judge or scorer that is asked anew.

    Several conversations are asked about at once. Raises as `rescore`; what engines raise passes through.
    """
    changed_rules(ReviewRules(), options)  # a mistake in the options is no fault of a stored conversation
    result = new_rescoring(rewards, is_whole=options.reward == ALL)
    torn: list[str] = []
    stored = iter_transcripts(run_dir, torn)
    if any(reward.needs_logprobs for reward in rewards.values()):
        stored = with_logprobs(run_dir, stored)
    at_once = 1 if models == NO_MODELS else _ASKED_AT_ONCE
    while some := list(islice(stored, at_once)):
        await score_some(result, some, options, rewards, models)
    if not result.num_conversations:
        raise ValueError(_nothing(str(run_dir), result, is_named=bool(rewards)))
    result.is_torn = bool(torn)
    return result


def new_rescoring(rewards: Mapping[str, Reward], *, is_whole: bool) -> Rescoring:
    """A rescoring of no conversation yet; without rewards it is one by the rules of critique self-play."""
    return Rescoring(rewards={name: [] for name in rewards or _STREAMS}, is_whole=is_whole)


async def score_some(
    result: Rescoring,
    stored: Iterable[tuple[str, Transcript]],
    options: RescoreOptions,
    rewards: Mapping[str, Reward],
    models: Models = NO_MODELS,
) -> None:
    """Add transcripts, with their places, to a rescoring: all at once, and in their order.

    Raises:
        ValueError: Of the first that cannot be scored, with its place.
    """
    counted_in = [(where, each) for where, each in stored if _counts(result, each, rewards)]
    work = [_scored(where, each, options, rewards, models) for where, each in counted_in]
    for found in await gather_or_cancel(work):
        if isinstance(found, ValueError):
            raise found
        for name, scored in found.items():
            if isinstance(scored, str):
                result.unpaid.setdefault(name, scored)
            else:
                result.rewards[name].append(scored)


def _counts(result: Rescoring, transcript: Transcript, rewards: Mapping[str, Reward]) -> bool:
    """Whether a transcript is scored; it is counted in any case."""
    record = transcript.record
    if record is None or (not rewards and record.protocol != "critique_self_play"):
        result.num_other += 1
    elif transcript.void or not (record.rewards if rewards else record.streams):
        result.num_void += 1
    elif not result.is_whole and record.logprobs is None and any(r.needs_logprobs for r in rewards.values()):
        result.num_without_tokens += 1
    else:
        result.num_conversations += 1
        return True
    return False


async def _scored(
    where: str,
    transcript: Transcript,
    options: RescoreOptions,
    rewards: Mapping[str, Reward],
    models: Models,
) -> _Found | ValueError:
    """A conversation's values, or the error of one that cannot be scored."""
    record = cast(ConversationRecord, transcript.record)
    seed = random.Random(f"{transcript.step}/{transcript.group}").getrandbits(31)
    try:
        if not rewards:
            rules = changed_rules(stored_rules(record), options)
            return _by_rules(record, rules, await stored_votes(record, rules, seed, models.judge))
        return await _by_rewards(record, rewards, seed, models, is_whole=options.reward == ALL)
    except UNPAID as error:
        problem, cause = f"{where}: {error}", error
    except (LookupError, TypeError) as error:
        problem, cause = (
            f"{where}: no such conversation can have been held ({type(error).__name__}: {error}); the file is "
            "damaged or was changed. Put it back from a copy, or take this line out",
            error,
        )
    told = ValueError(problem)
    told.__cause__ = cause
    return told


async def _by_rewards(
    record: ConversationRecord, rewards: Mapping[str, Reward], seed: int, models: Models, *, is_whole: bool
) -> _Found:
    """A conversation's values by rewards; of all rewards, why one could not be computed stands in its place."""
    right = {agent: float(is_right) for agent, is_right in (record.correct or {}).items()}
    if models.judge is not None:  # rewards have much the same compared
        models = models._replace(judge=RememberingJudge(models.judge))
    found: _Found = {}
    for name, reward in rewards.items():
        try:
            found[name] = record.rewards, await reward.stored_pay(record, seed, models), right
        except EndpointStoppedError:  # nothing more can be asked
            raise
        except UNPAID as error:
            if not is_whole:
                raise
            found[name] = str(error)
    return found


def _by_rules(record: ConversationRecord, rules: ReviewRules, votes: ReviewVotes) -> _Found:
    """A conversation's values by the rules of critique self-play, by stream."""
    scores = score_review(votes, rules)
    truth = _truth(record, votes)
    found: _Found = {}
    for name, new in zip(_STREAMS, (scores.r_sol, scores.r_meta, scores.r_diag, scores.totals), strict=True):
        old = {agent: streams.get(name) for agent, streams in record.streams.items()}
        found[name] = old, new, truth.get(name, {})
    return found


def _nothing(run_dir: str, result: Rescoring, *, is_named: bool) -> str:
    """The message of a run without a conversation to score."""
    if result.num_without_tokens:
        return (
            f"{run_dir!r} kept the tokens of no conversation, and this reward needs their sampling logprobs; give "
            "tokens_every=1 to a run whose conversations are to be scored by it"
        )
    others = "without a record. Give another folder."
    if not is_named:
        others = "not critique self-play. Give the folder of a run of critique_self_play, or reward=NAME."
    return (
        f"{run_dir!r} has no conversation to score again: {result.num_void} were void, and {result.num_other} "
        f"{others}"
    )


def with_logprobs(
    run_dir: str | Path, stored: Iterable[tuple[str, Transcript]]
) -> Iterator[tuple[str, Transcript]]:
    """Transcripts with the logprobs of their final solutions, where the run kept tokens; a torn line is left out.

    Raises:
        ValueError: If ``tokens.jsonl`` is damaged.
    """
    file = GrowingFile(Path(run_dir) / TOKENS_FILE)
    check_log(Path(run_dir), TOKENS_FILE)
    places: dict[tuple[object, object], int] = {}
    for offset, line in file.new_lines():
        row = _token_row(file, line)
        places[row.get("step"), row.get("group")] = offset
    for where, transcript in stored:
        offset = places.get((transcript.step, transcript.group))
        row = None if offset is None else _token_row(file, file.line_at(offset))
        yield where, transcript_with_logprobs(transcript, row)


def _token_row(file: GrowingFile, line: bytes) -> Row:
    try:
        return parse_line(line)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}. The file is damaged; restore or cut it.") from error


def transcript_with_logprobs(transcript: Transcript, tokens: Row | None) -> Transcript:
    """A transcript with the logprobs of its final solutions, if the tokens of all of them were kept."""
    record = transcript.record
    if tokens is None or record is None:
        return transcript
    logprobs = solution_logprobs(tokens, record)
    if not logprobs.keys() >= record.conversation().final_solutions.keys():
        return transcript
    return transcript.model_copy(update={"record": record.model_copy(update={"logprobs": logprobs})})


def named_rewards(options: RescoreOptions) -> dict[str, Reward]:
    """The rewards that are named, by their rows in the table; none: those of critique self-play, by the rules.

    Raises:
        ValueError: If there is no such reward, or rules of the other kind are given with it.
    """
    if options.reward is None:
        return {}
    rules = [name for name, value in chz.asdict(options).items() if value is not None and name != "reward"]
    if rules:
        raise ValueError(f"{', '.join(rules)} are rules of critique self-play; leave them out beside reward")
    if options.reward == ALL:
        return {name: find_reward(name) for name in NAMES}
    return {"total": reward_named(options.reward)}


def changed_rules(stored: ReviewRules, options: RescoreOptions) -> ReviewRules:
    """Rules with what the options change in them; a `ValueError` if a value is out of range."""
    chosen = stored
    if options.preset is not None:
        chosen = replace(review_rules(options.preset), prior_precision=stored.prior_precision)
    changes: dict[str, object] = {
        name: value
        for name, value in chz.asdict(options).items()
        if value is not None and name not in ("preset", "reward", "reward_weights")
    }
    return replace(chosen, **changes, weights={**chosen.weights, **(options.reward_weights or {})})


def _truth(record: ConversationRecord, votes: ReviewVotes) -> dict[str, Rewards]:
    """The truth that each reward should follow, by stream and agent; empty where no answer is known."""
    after, before = record.correct, record.correct_initial
    if after is None or before is None:
        return {}
    right = {agent: float(is_right) for agent, is_right in after.items()}
    mended = {agent: float(not before[agent] and after[agent]) for agent in after.keys() & before.keys()}
    return {
        "r_sol": right,
        "r_meta": {voter: ballot_accuracy({voter: own}, after) for voter, own in votes.final.items()},
        "r_diag": {
            critic: mean_of([mended[agent] for agent in targets if agent in mended])
            for critic, targets in votes.targets.items()
        },
        "total": right,
    }
