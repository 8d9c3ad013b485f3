"""The page's table of other rewards: the pay of each for the last conversations of a run.

Nobody is asked anything, and no code of the user's runs: these are the rewards that have names.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from viva.judging.records import Transcript
from viva.run.secrets import printable
from viva.view.rescore import (
    ALL,
    RescoreOptions,
    named_rewards,
    new_rescoring,
    score_some,
    transcript_with_logprobs,
)
from viva.view.rescoring import Rescoring
from viva.view.run_index import RunIndex

MOST = 200
"""Conversations that are used, the last ones: a run may have a hundred thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The last conversations of a run that earned something."""

    num_all: int
    """Such conversations of the whole run."""
    transcripts: Sequence[Transcript]
    damaged: Sequence[str]
    """Reasons why others could not be read."""

    @property
    def num_used(self) -> int:
        """Conversations that are looked at."""
        return len(self.transcripts) + len(self.damaged)


def stored_conversations(run: RunIndex) -> Stored:
    """The conversations for `other_rewards`; none where the source is no run."""
    earned = [each for each in run.entries.values() if each.has_record and not each.is_void]
    paid = [each for each in earned if each.reward_mean is not None] if run.kind == "run" else []
    last = sorted(paid, key=lambda each: (each.step, each.group))[-MOST:]
    transcripts: list[Transcript] = []
    damaged: list[str] = []
    for each in last:
        where = f"step {each.step}, group {each.group}"
        try:
            transcript = Transcript.parse(where, run.transcript(each.step, each.group) or {})
            transcripts.append(transcript_with_logprobs(transcript, run.tokens(each.step, each.group)))
        except ValueError as error:
            damaged.append(f"{where}: {error}")
    return Stored(num_all=len(paid), transcripts=transcripts, damaged=damaged)


def other_rewards(stored: Stored) -> dict[str, object]:
    """The table, ready for JSON.

    Returns:
        ``used`` and ``all`` (numbers of conversations), ``rows`` (see `viva.view.rescoring.RewardRow`), ``unpaid``
        (rewards that could not be computed for every conversation, and why) and ``left_out`` (why conversations could
        not be scored at all).
    """
    with ThreadPoolExecutor(1) as pool:  # the caller may have an event loop that runs, as training has
        result, damaged = pool.submit(asyncio.run, _scored(stored)).result()
    return {
        "used": stored.num_used,
        "all": stored.num_all,
        "rows": [asdict(each) for each in result.rows] if result.num_conversations else [],
        "unpaid": [
            {"rewards": ", ".join(names), "why": printable(why)} for why, names in result.reasons.items()
        ],
        "left_out": [printable(each) for each in (*stored.damaged, *damaged)],
    }


async def _scored(stored: Stored) -> tuple[Rescoring, list[str]]:
    """Rewards of all conversations, and those that cannot have been held."""
    options = RescoreOptions(reward=ALL)
    rewards = named_rewards(options)
    result = new_rescoring(rewards, is_whole=True)
    damaged: list[str] = []
    for each in stored.transcripts:
        try:
            await score_some(result, [(f"step {each.step}, group {each.group}", each)], options, rewards)
        except ValueError as error:
            damaged.append(str(error))
            result.num_conversations -= 1
    return result, damaged
