"""Exact enumeration: the gradient that reaches the optimiser is that of the stated objective, segment by segment.

The policy is a table of logits, one row for every context. A game asks it for binary tokens; all outcomes are played,
weighted by their probability. Each goes the way of training (credit, advantages, datums, the engine's loss); the sum of
the gradients is compared with the derivative of the enumerated objective

    J_s = sum over outcomes of P(outcome) * w_s * (r_s - mean of r over the stream and round of s)

with respect to the rows of segment s alone.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import tinker
import torch
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from viva.engine.losses import LOSSES
from viva.judging.ballots import Preference, Tie
from viva.rewards.credit import GroupCredit, SpanCredit, stream_advantages
from viva.rewards.review import PRESETS, STREAMS, ReviewVotes, initial, revised, score_review
from viva.training.data_processing import assemble_training_data

CONTEXT = 2
"""Token ids below are what the policy says; this and those above name contexts."""


class Play:
    """One outcome: answers by a path of choices, then by 0, and notes who was asked what."""

    def __init__(self, path, num_seats):
        self.path, self.choices = path, []
        self.turns = [[] for _ in range(num_seats)]

    def ask(self, seat, owner, seen, done=lambda tokens: True):
        tokens = []
        while not tokens or not done(tokens):
            place = len(self.choices)
            self.choices.append(self.path[place] if place < len(self.path) else 0)
            tokens.append(self.choices[-1])
        self.turns[seat].append((owner, seen, tokens))
        return tuple(tokens)

    def next_path(self):
        path = list(self.choices)
        while path and path[-1] == 1:
            path.pop()
        return [*path[:-1], 1] if path else None


class Policy:
    """A row of two logits for every context, filled as contexts come up."""

    def __init__(self):
        self.rows, self.owners, self.contexts = {}, [], {}

    def row(self, owner, seen, before):
        key = (owner, seen, tuple(before))
        if key not in self.rows:
            self.rows[key] = len(self.owners)
            self.owners.append((owner, len(before)))
        return self.rows[key]

    def context(self, owner, seen):
        return self.contexts.setdefault((owner, seen), CONTEXT + len(self.contexts))

    def table(self):
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(len(self.owners), 2, generator=generator, dtype=torch.float64)
        return logits.requires_grad_()


def all_plays(game, num_seats):
    """All outcomes of a game, its results, and the policy's contexts."""
    policy, outcomes, path = Policy(), [], []
    while path is not None:
        play = Play(path, num_seats)
        outcomes.append((play, game(play)))
        path = play.next_path()
    for play, _ in outcomes:
        for turns in play.turns:
            for owner, seen, tokens in turns:
                policy.context(owner, seen)
                for place in range(len(tokens)):
                    policy.row(owner, seen, tokens[:place])
    return policy, outcomes


def tokens_of(policy, play):
    """(row, token) of everything that was said."""
    return [
        (policy.row(owner, seen, tokens[:place]), token)
        for turns in play.turns
        for owner, seen, tokens in turns
        for place, token in enumerate(tokens)
    ]


def probabilities(policy, outcomes, logprobs):
    said = [(index, *entry) for index, (play, _) in enumerate(outcomes) for entry in tokens_of(policy, play)]
    places, rows, tokens = (torch.tensor(column) for column in zip(*said, strict=True))
    return torch.zeros(len(outcomes), dtype=logprobs.dtype).index_add(0, places, logprobs[rows, tokens]).exp()


def trajectories(policy, play, logprobs):
    """Each seat's turns; every observation extends what came before."""
    result = []
    for turns in play.turns:
        transitions, history = [], []
        for owner, seen, tokens in turns:
            history = [*history, policy.context(owner, seen)]
            own = [
                float(logprobs[policy.row(owner, seen, tokens[:place]), token])
                for place, token in enumerate(tokens)
            ]
            transitions.append(
                Transition(
                    ob=tinker.ModelInput.from_ints(history),
                    ac=TokensWithLogprobs(tokens=tokens, maybe_logprobs=own),
                    reward=0.0,
                    episode_done=False,
                )
            )
            history = [*history, *tokens]
        result.append(Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty()))
    return result


def trained_tokens(policy, play, credit, logprobs):
    """(row, token, sampling logprob, advantage) of every target that the engine gets from one outcome."""
    trajectories_G = trajectories(policy, play, logprobs)
    counts = [[len(turn.ac.tokens) for turn in traj.transitions] for traj in trajectories_G]
    group = TrajectoryGroup(trajectories_G, [0.0] * len(counts), [{}] * len(counts))
    data_D, _ = assemble_training_data([group], [stream_advantages(credit, counts)])
    names = {id_: context for context, id_ in policy.contexts.items()}
    for datum in data_D:
        inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
        context, said = None, []
        for token, target, logprob, advantage in zip(
            datum.model_input.to_ints(),
            inputs["target_tokens"],
            inputs["logprobs"],
            inputs["advantages"],
            strict=True,
        ):
            context, said = (names[token], []) if token >= CONTEXT else (context, [*said, token])
            if target < CONTEXT:
                yield policy.row(*context, said), target, logprob, advantage
            else:
                assert advantage == 0.0


def gradient_of_training(policy, outcomes, table):
    """Minus the gradient of the engine's importance-sampling loss, in expectation over all outcomes."""
    logprobs = table.log_softmax(-1)
    fixed = logprobs.detach()
    chances = probabilities(policy, outcomes, fixed).tolist()
    entries = [
        (*entry, chance)
        for (play, credit), chance in zip(outcomes, chances, strict=True)
        for entry in trained_tokens(policy, play, credit, fixed)
    ]
    rows, tokens, sampled, advantages, weights = (
        torch.tensor(column) for column in zip(*entries, strict=True)
    )
    inputs = {"logprobs": sampled.double(), "advantages": advantages.double()}
    loss = LOSSES["importance_sampling"].per_token(logprobs[rows, tokens], inputs, {})
    return -torch.autograd.grad((weights.double() * loss).sum(), table)[0]


def gradient_of_objective(policy, outcomes, table, parts_of, segments):
    """For every segment, the derivative of its part of the objective in its own rows; 0 in all other rows.

    ``parts_of(credit)`` gives what each segment earns in one outcome; ``segments`` maps a row's owner to its segment.
    """
    parts = [parts_of(credit) for _, credit in outcomes]
    chances = probabilities(policy, outcomes, table.log_softmax(-1))
    result = torch.zeros_like(table)
    for segment in sorted({name for part in parts for name in part}):
        value = (chances * torch.tensor([part.get(segment, 0.0) for part in parts])).sum()
        (gradient,) = torch.autograd.grad(value, table, retain_graph=True)
        own = torch.tensor([segments(owner) == segment for owner in policy.owners])
        result[own] = gradient[own]
    return result


def above_the_mean(credit):
    """What each segment earns above the mean of its stream and round; a segment is (seat, turn, start)."""
    rewards = defaultdict(list)
    for span in credit.spans:
        rewards[span.stream, span.round_index].append(span.reward)
    return {
        (span.seat, span.transition, span.start): credit.weights[span.stream]
        * (span.reward - sum(peers := rewards[span.stream, span.round_index]) / len(peers))
        for span in credit.spans
    }


# A conversation of agents 0 and 1, seats 2 * agent + lane, beside a third agent that samples nothing.

AGENTS = (0, 1, 2)
TURNS = ({"propose": 0, "rank": 1, "revise": 2, "verdict": 3}, {"propose": 0, "revise": 1, "verdict": 2})
STAGES = ("propose", "critique", "revise", "verdict")


def preference(one, other, choice):
    return Preference(other, one) if choice else Preference(one, other)


def turn_of(stage, agent):
    return (2 * agent + 1, 0) if stage == "critique" else (2 * agent, TURNS[agent][stage])


def conversation(rules):
    @cache
    def scores(first, final, better, targets):
        return score_review(
            ReviewVotes(
                agents=AGENTS,
                initial={0: [first], 1: [Preference(0, 2)], 2: [Preference(1, 0)]},
                final=dict(enumerate(final)),
                across={
                    voter: [
                        Preference(revised(agent), initial(agent))
                        if improved
                        else Tie(revised(agent), initial(agent))
                        for agent, improved in enumerate(better)
                        if agent != voter
                    ]
                    for voter in AGENTS
                },
                targets=dict(enumerate(targets)),
            ),
            rules,
        )

    def game(play):
        proposals = [
            play.ask(0, ("propose", 0), (), lambda tokens: tokens[0] == 1 or len(tokens) == 2),
            play.ask(2, ("propose", 1), ()),
        ]
        first = play.ask(0, ("rank", 0), tuple(proposals))
        critiques = [play.ask(2 * agent + 1, ("critique", agent), tuple(proposals)) for agent in (0, 1)]
        revisions = tuple(
            play.ask(2 * agent, ("revise", agent), (proposals[agent], critiques[1 - agent]))
            for agent in (0, 1)
        )
        verdicts = [
            play.ask(0, ("verdict", 0), revisions, lambda tokens: len(tokens) == 2),
            play.ask(2, ("verdict", 1), revisions),
        ]
        result = scores(
            preference(1, 2, first[0]),
            (
                (preference(0, 1, verdicts[0][0]), preference(1, 2, verdicts[0][1])),
                (preference(0, 1, verdicts[1][0]), Preference(1, 2)),
                (Preference(0, 1), Preference(2, 1)),
            ),
            tuple(revision == (1,) for revision in revisions),
            tuple((1 - agent,) if critiques[agent] == (1,) else () for agent in (0, 1)),
        )
        spans = []
        for agent in (0, 1):
            earned = {
                "propose": ("r_sol", result.r_sol_initial[agent], proposals),
                "critique": ("r_diag", result.r_diag[agent] if critiques[agent] == (1,) else None, critiques),
                "revise": ("r_sol", result.r_sol[agent], revisions),
                "verdict": ("r_meta", result.r_meta[agent], verdicts),
            }
            for stage, (stream, reward, replies) in earned.items():
                seat, transition = turn_of(stage, agent)
                if reward is not None:
                    spans.append(
                        SpanCredit(
                            seat=seat,
                            transition=transition,
                            start=0,
                            stop=len(replies[agent]),
                            stream=stream,
                            round_index=STAGES.index(stage),
                            reward=reward,
                        )
                    )
        return GroupCredit(spans=tuple(spans), weights=rules.weights)

    return game


def segment_of_conversation(owner):
    (stage, agent), _ = owner
    return (*turn_of(stage, agent), 0)


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_the_gradient_of_critique_self_play_is_that_of_its_objective_segment_by_segment(preset):
    policy, outcomes = all_plays(conversation(replace(PRESETS[preset], weights=STREAMS)), num_seats=4)
    assert len(outcomes) == 3 * 2 * 2 * 4 * 4 * 8
    table = policy.table()
    trained = gradient_of_training(policy, outcomes, table)
    stated = gradient_of_objective(policy, outcomes, table, above_the_mean, segment_of_conversation)
    stages = defaultdict(list)
    for row, ((stage, _), _) in enumerate(policy.owners):
        stages[stage].append(row)
    for stage, rows in stages.items():
        torch.testing.assert_close(trained[rows], stated[rows], rtol=1e-4, atol=1e-7)
        if stage == "rank":
            assert not trained[rows].any()  # masked: exactly nothing
        else:
            assert stated[rows].abs().max() > 1e-4  # there is something to compare


# Three replies of three tokens, some of which are credited one by one, behind a token that earns nothing.


def three_replies(reward, places=(1, 2)):
    def game(play):
        replies = [play.ask(seat, ("reply", seat), (), lambda tokens: len(tokens) == 3) for seat in range(3)]
        spans = [
            SpanCredit(
                seat=seat,
                transition=0,
                start=place,
                stop=place + 1,
                stream="r_diag",
                round_index=1,
                reward=reward(replies, seat, place),
            )
            for seat in range(3)
            for place in places
        ]
        return GroupCredit(spans=tuple(spans), weights={"r_diag": 2.0})

    return game


def segment_of_reply(owner):
    (_, seat), place = owner
    return (seat, 0, place)


def entangled(replies, seat, place):
    """A reward to which everyone's tokens contribute."""
    said = [token for reply in replies for token in reply]
    return 0.3 * said[3 * seat + place] + 0.7 * said[(3 * seat + place + 2) % 9] * said[5] - 0.1 * sum(said)


def own_token(replies, seat, place):
    return (1.0 + seat) * replies[seat][place]


def test_spans_inside_a_reply_are_trained_each_on_its_own_reward():
    policy, outcomes = all_plays(three_replies(entangled), num_seats=3)
    table = policy.table()
    trained = gradient_of_training(policy, outcomes, table)
    stated = gradient_of_objective(policy, outcomes, table, above_the_mean, segment_of_reply)
    torch.testing.assert_close(trained, stated, rtol=1e-4, atol=1e-7)
    headers = [row for row, (_, place) in enumerate(policy.owners) if place == 0]
    assert not trained[headers].any()
    assert trained.abs().max() > 0.01


def test_the_baseline_shrinks_the_plain_gradient_by_one_over_n_where_rewards_do_not_interact():
    def plain(credit):
        return {(span.seat, span.transition, span.start): 2.0 * span.reward for span in credit.spans}

    policy, outcomes = all_plays(three_replies(own_token, places=(2,)), num_seats=3)
    table = policy.table()
    trained = gradient_of_training(policy, outcomes, table)
    stated = gradient_of_objective(policy, outcomes, table, plain, segment_of_reply)
    torch.testing.assert_close(trained, (1 - 1 / 3) * stated, rtol=1e-4, atol=1e-7)


def test_where_rewards_interact_a_span_also_trains_against_the_rewards_of_its_peers():
    def own_and_cross(credit):
        total = sum(span.reward for span in credit.spans)
        return {
            (span.seat, 0, span.start): 2.0 * ((1 - 1 / 6) * span.reward - (total - span.reward) / 6)
            for span in credit.spans
        }

    policy, outcomes = all_plays(three_replies(entangled), num_seats=3)
    table = policy.table()
    trained = gradient_of_training(policy, outcomes, table)
    stated = gradient_of_objective(policy, outcomes, table, own_and_cross, segment_of_reply)
    torch.testing.assert_close(trained, stated, rtol=1e-4, atol=1e-7)
