"""What the built-in policy can do before any training, measured through Viva's own engine, evaluator and judge.

    python benchmarks/builtin_policy.py [problems=500]

Direct accuracy on held-out problems at temperature 1; share of replies that are read as asked in a round-robin
conversation and in critique self-play; the judge's accuracy on pairs of one right and one wrong solution, in single
comparisons and over both orders; how often votes of a ranking are true; and accuracy before and after critique.
"""

import asyncio
import random
import sys
from collections.abc import Sequence

from viva.threads import prepare_threads


async def measure(num_problems: int) -> dict[str, float]:
    from viva.conversation.rendering import load_renderer
    from viva.engine import LocalServiceClient
    from viva.eval.direct import DirectEvaluator, DirectSampler
    from viva.judging.answers import is_correct
    from viva.judging.comparison import TournamentPattern
    from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
    from viva.rewards import peer_review, tournament
    from viva.selfplay.critique import critique_protocol
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
    from viva.selfplay.round_robin import round_robin_protocol
    from viva.tiny import model_path
    from viva.tiny.tasks import problems, worked_solution, wrong_solution
    from viva.training.data import PromptItem
    from viva.training.metrics import rollout_metrics
    from viva.training.rollouts import run_groups
    from viva.training.sampling import Sampling, SeatSampler

    held_out = problems("test", num_problems, seed=0)
    sampler = LocalServiceClient().create_sampling_client(base_model=str(model_path()))
    renderer = load_renderer(sampler.get_tokenizer(), model_name=str(model_path()))
    items = [PromptItem(question=problem.question, answer=str(problem.answer)) for problem in held_out]
    direct = await DirectEvaluator(
        items=items, direct=DirectSampler(renderer=renderer, sampling=Sampling(seed=0, max_tokens=72))
    )(sampler, 0)

    judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=sampler), renderer)
    rng = random.Random(0)
    tournaments = await asyncio.gather(
        *(
            judge.tournament(
                problem.question,
                {0: worked_solution(problem), 1: wrong_solution(problem, rng)},
                TournamentPattern.ALL_PAIRS_BOTH_WAYS,
                seed=0,
            )
            for problem in held_out
        )
    )
    single = [(c.score or 0.0) * (1 if c.first == 0 else -1) for t in tournaments for c in t]
    both = [sum((c.score or 0.0) * (1 if c.first == 0 else -1) for c in t) for t in tournaments]

    builders = [
        MultiAgentConversationEnvGroupBuilder(
            question=problem.question,
            renderer=renderer,
            protocol=round_robin_protocol(2),
            reward=tournament(),
            judge=judge,
        )
        for problem in held_out[: num_problems // 10]
    ]
    outcomes = await run_groups(
        builders, SeatSampler(sampler=sampler, sampling=Sampling(seed=0, max_tokens=72))
    )
    reviews = [
        MultiAgentConversationEnvGroupBuilder(
            question=problem.question,
            answer=str(problem.answer),
            grader=is_correct,
            renderer=renderer,
            protocol=critique_protocol(4),
            reward=peer_review(),
            judge=judge,
            num_agents=4,
        )
        for problem in held_out[: num_problems // 5]
    ]
    reviewed = rollout_metrics(
        await run_groups(reviews, SeatSampler(sampler=sampler, sampling=Sampling(seed=0, max_tokens=80)))
    )
    return {
        "direct accuracy": direct["test/direct_accuracy"],
        "judge right, one order": sum(score < 0 for score in single) / len(single),
        "judge right, both orders": sum(score < 0 for score in both) / len(both),
        "replies parsed, round robin": rollout_metrics(outcomes)["parse/ok"],
        "replies parsed, critique": 1.0 - reviewed["parse/unstructured"],
        "votes true, blind ranking": reviewed["judge/ranking/accuracy"],
        "votes true, verdict": reviewed["judge/verdict/accuracy"],
        "right before critique": reviewed["correct/first"],
        "right after critique": reviewed["correct/final"],
        "right to wrong": reviewed["flip/right_to_wrong"],
        "wrong to right": reviewed["flip/wrong_to_right"],
    }


def main(argv: Sequence[str]) -> None:
    prepare_threads()
    given = dict(argument.split("=", 1) for argument in argv)
    for name, share in asyncio.run(measure(int(given.get("problems", "500")))).items():
        print(f"{name}: {100 * share:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
