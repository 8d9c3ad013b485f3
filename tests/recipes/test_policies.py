"""Several policies in whole runs on a random model: what each is trained on, what is left, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest
from random_models import make_model
from safetensors.numpy import load_file

from viva.recipes.conversation_preference_rl import Config as PreferenceConfig
from viva.recipes.critique_self_play import Config as CritiqueConfig
from viva.recipes.programs import train_recipe
from viva.recipes.protocol import Config as ProtocolConfig

COMMON = {
    "num_agents": 2,
    "batch_size": 4,
    "max_tokens": 8,
    "lora_rank": 4,
    "max_steps": 3,
    "learning_rate": 0.1,
    "eval_every": 0,
    "save_every": 2,
    "tokens_every": 1,
    "num_test_conversations": 1,
    "trackers": "[]",
}
OWN = """
from viva import Protocol, Round
from viva.conversation.protocol import Segment

def pay(conversation):
    said = {turn.agent_id: sum(turn.text.encode()) for turn in conversation.turns}
    return {agent: agent + (value % 97) / 97 for agent, value in said.items()}

def asked(text):
    return lambda view: f"{text} You are {view.persona}."

def made(first, second):
    rounds = [
        Round("ask", [Segment(name="question", instruction=asked("Ask."), role=first)], order="sequential"),
        Round("tell", [Segment(name="answer", instruction=asked("Tell."), role=second)], ["question"]),
    ]
    return Protocol(rounds=rounds, reward=pay, name="pairs")

RED, BLUE = made("red", "blue"), made("blue", "red")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    problems, own = folder / "problems.jsonl", folder / "own.py"
    problems.write_text("".join(f'{{"query": "{n} + 1?", "answer": {n + 1}}}\n' for n in range(4)))
    own.write_text(OWN)
    model = make_model(folder / "qwen3", "qwen3")
    return {
        "own": own,
        "given": {"model_name": model, "train_prompts_path": problems, "test_prompts_path": problems},
    }


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """Do a run of a user's protocol, or return the one that was done with these options; its folder."""
    done = {}

    def _run(policies, *, folder=None, protocol="RED", **options):
        told = policies if isinstance(policies, str) else json.dumps(policies)
        key = (told, protocol, *sorted((name, str(value)) for name, value in options.items()))
        if folder is None and key in done:
            return done[key]
        place = folder or tmp_path_factory.mktemp("run") / "run"
        everything = COMMON | files["given"] | {"protocol": f"{files['own']}:{protocol}", "log_path": place}
        everything |= {"policies": told} | options
        assert train_recipe("protocol", [f"{name}={value}" for name, value in everything.items()]) == 0
        return place if folder else done.setdefault(key, place)

    return _run


def lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(folder: Path):
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in lines(folder / "metrics.jsonl")
    ]


def adapters(folder: Path):
    """Bytes of all exported adapters, by place."""
    found = folder.rglob("adapter/adapter_model.safetensors")
    return {str(path.parent.relative_to(folder)): path.read_bytes() for path in found}


def left_by(folder: Path):
    return metrics_of(folder), lines(folder / "transcripts.jsonl"), adapters(folder)


def texts(folder: Path, step: int):
    """All that was said in a step."""
    rows = lines(folder / "transcripts.jsonl")
    return [[turn["text"] for turn in row["record"]["turns"]] for row in rows if row["step"] == step]


LEAGUE = {"agent_0": "trained", "agent_1": "league:1"}
PAST = {"agent_0": "trained", "agent_1": "past:2"}
ALONE = {"agent_0": "trained", "agent_1": "initial"}


def test_each_agent_learns_from_what_it_said_itself(run):
    folder = run("per_agent")
    assert sorted(adapters(folder)) == ["adapter", "members/agent_1/adapter"]
    assert len(set(adapters(folder).values())) == 2
    for row in metrics_of(folder):
        datums = [row[f"agent_{number}/optim/datums"] for number in (0, 1)]
        assert row["optim/datums"] == sum(datums)
        gaps = [row[f"agent_{n}/optim/logprob_gap_max"] for n in (0, 1) if datums[n]]
        assert all(gap < 1e-3 for gap in gaps), "sampler and trainer of a member are not the same policy"
        assert row["agent_0/sampled_tokens"] + row["agent_1/sampled_tokens"] == row["rollout/sampled_tokens"]
    assert sum(row["agent_1/optim/datums"] for row in metrics_of(folder)) > 0


def test_in_the_first_step_all_are_the_one_policy(run):
    """Adapters begin as nothing, and seeds belong to seats: who speaks makes no difference yet."""
    shared = run("shared")
    for policies in ("per_agent", "per_role", ALONE, LEAGUE):
        assert texts(run(policies), 0) == texts(shared, 0)
    assert any(texts(run("per_agent"), step) != texts(shared, step) for step in (1, 2))


def test_a_frozen_member_gets_no_gradient_and_stays_what_it_was(run):
    folder = run(ALONE)
    assert list(adapters(folder)) == ["adapter"]
    masks = {0: 0, 1: 0}
    for row in lines(folder / "tokens.jsonl"):
        for turn in row["turns"]:
            masks[turn["seat"]] += sum(turn["mask"])
    assert masks[0] > 0
    assert masks[1] == 0
    # a member that is never refreshed within the run is the initial policy
    assert left_by(run({"agent_0": "trained", "agent_1": "past:100"})) == left_by(folder)
    assert left_by(run(PAST)) != left_by(folder)


def test_the_trained_member_does_not_depend_on_whether_its_peer_is_trained_before_they_differ(run):
    """Both runs have the same first step; agent 0's first update is on the same tokens with the same advantages."""
    ours, theirs = metrics_of(run(ALONE))[0], metrics_of(run("per_agent"))[0]
    mine = {key: value for key, value in ours.items() if key.startswith("agent_0/optim/")}
    assert len(mine) > 5
    assert mine == {key: theirs[key] for key in mine}


@pytest.mark.parametrize("policies", ["per_role", LEAGUE], ids=["per_role", "league"])
def test_a_run_that_is_resumed_equals_one_that_was_never_stopped(run, tmp_path, policies):
    folder = tmp_path / "run"
    run(policies, folder=folder, max_steps=1)
    run(policies, folder=folder, behavior_if_exists="resume")
    assert left_by(folder) == left_by(run(policies))


def test_the_names_of_members_are_names(run):
    """Red asks and blue tells, or the other way round: the same run under other names."""
    red, blue = run("per_role", protocol="RED"), run("per_role", protocol="BLUE")
    other = {"red": "blue", "blue": "red"}

    def renamed(row):
        return {
            "/".join([other.get(head, head), *rest]): value
            for key, value in row.items()
            for head, *rest in [key.split("/")]
        }

    assert [renamed(row) for row in metrics_of(red)] == metrics_of(blue)
    assert metrics_of(red) != metrics_of(blue)
    places = {"adapter": "adapter", "members/blue/adapter": "members/red/adapter"}
    assert {places[place]: value for place, value in adapters(red).items()} == adapters(blue)


def test_a_league_meets_its_past_selves_and_keeps_what_checkpoints_need(run):
    folder = run(LEAGUE)
    index = lines(folder / "checkpoints.jsonl")
    assert [sorted(each["beside"]) for each in index] == [
        [f"past-agent_1-{n:06d}" for n in range(each["next_step"])] for each in index
    ]
    kept = sorted(path.name for path in (folder / "state" / "sampler_weights").iterdir())
    assert kept == [f"past-agent_1-{n:06d}" for n in range(3)]
    first = load_file(folder / "state/sampler_weights/past-agent_1-000000/adapter_model.safetensors")
    assert all(not value.any() for name, value in first.items() if "lora_B" in name)
    assert left_by(folder) != left_by(run(PAST))


def test_a_past_run_takes_part_as_the_policy_that_it_became(run):
    past = run(ALONE)
    last = run({"agent_0": "trained", "agent_1": f"{past}"}, max_steps=1)
    again = run({"agent_0": "trained", "agent_1": f"{past}@000003"}, max_steps=1)
    assert left_by(last) == left_by(again)
    earlier = run({"agent_0": "trained", "agent_1": f"{past}@2"}, max_steps=1)
    assert texts(last, 0) != texts(run(ALONE), 0)
    kept = [lines(folder / "tokens.jsonl") for folder in (last, earlier)]
    drawn = [[turn["sampling"] for turn in rows[0]["turns"] if turn["seat"] == 1] for rows in kept]
    assert drawn[0] != drawn[1]
    assert json.loads((last / "config.json").read_text())["member_weights"]["agent_1"]
    unknown = {"agent_0": "trained", "agent_1": f"{past}@2o"}
    with pytest.raises(ValueError, match=r"unknown checkpoint '2o'; allowed: last, 000002, 000003"):
        config(PreferenceConfig, policies=unknown).make_plan()


def test_every_member_is_evaluated(run):
    row = metrics_of(run("per_agent", max_steps=1, eval_every=1))[-1]
    assert {"test/direct_accuracy", "agent_1/test/direct_accuracy"} <= row.keys()
    assert any(key.startswith("test/conversation/") for key in row)


# options


def config(kind, **options):
    given = {"train_prompts": ["a", "b"], "model_name": "tiny", "num_agents": 2}
    return kind(**(given | options))


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("per_agents", "Did you mean 'per_agent'"),
        ({"agent_0": "trained", "agent_1": "inital"}, "Did you mean 'initial'"),
        ({"agent_0": "trained", "agent_1": "league"}, "give league:STEPS, like league:20"),
        ({"agent_0": "trained", "agent_1": "past:0"}, "with 1 step or more"),
        (
            {"agent_0": "trained", "agent_1": "past:5:agent_2"},
            r"'agent_2' is not trained.*Did you mean 'agent_0'",
        ),
        ({"agent_0": "trained", "agent_1": "./nowhere"}, "nothing to load"),
        ({"agent_0": "initial", "agent_1": "initial"}, "trains nobody"),
        (
            {"agent_0": "trained", "agent_1": "tinker://a/weights/b"},
            "with a remote engine, and engine=local cannot read them",
        ),
    ],
)
def test_policies_that_could_not_be_are_refused_before_anything_is_computed(policies, message):
    for kind in (PreferenceConfig, CritiqueConfig, partial(ProtocolConfig, protocol="round_robin")):
        with pytest.raises(ValueError, match=message):
            config(kind, policies=policies).make_plan()


def test_a_past_self_needs_to_know_whose(files):
    policies = {"agent_0": "trained", "agent_1": "trained", "others": "league:5"}
    with pytest.raises(ValueError, match="league:20:agent_0, since more than one member is trained"):
        config(PreferenceConfig, num_agents=3, policies=policies).make_plan()
    policies["others"] = "league:5:agent_1"
    assert (
        "others league:5:agent_1"
        in config(PreferenceConfig, num_agents=3, policies=policies).make_plan().summary
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge_member": "agent_1"}, "judge_member=agent_1 would change nothing: policies=shared"),
        (
            {"judge_member": "agent_1", "policies": "per_agent", "reward": "majority"},
            "asks no policy of the run",
        ),
        (
            {"judge_member": "agent_2", "policies": "per_agent"},
            r"must be one of agent_0, agent_1; got 'agent_2'",
        ),
        ({"policies": ALONE, "judge_member": "agent_1", "judge": "every"}, "and agent_1 is not"),
        (
            {
                "policies": "per_agent",
                "stream_updates": True,
                "engine": "remote",
                "base_url": "http://localhost:1",
            },
            "stream_updates trains one policy",
        ),
    ],
)
def test_options_that_do_not_go_with_the_policies_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(PreferenceConfig, **options).make_plan()


def test_votes_without_words_are_refused_since_they_ask_one_policy():
    with pytest.raises(ValueError, match="ballots=written"):
        config(CritiqueConfig, policies="per_role", ballots="labels").make_plan()


def test_the_plan_says_who_talks_and_who_judges():
    plan = config(CritiqueConfig, num_agents=4, policies="per_role").make_plan()
    assert plan.summary.endswith("policies: solver trained, critic trained; judge: critic")
    plan = config(PreferenceConfig, policies="per_agent", judge_member="agent_1").make_plan()
    assert plan.summary.endswith("judge: agent_1")
    for judge, told in (("initial", "judge: agent_0 (initial)"), ("tiny", "judge: tiny")):
        plan = config(PreferenceConfig, policies="per_agent", judge=judge).make_plan()
        assert plan.summary.endswith(told)
    for given, told in (({}, "scorer: agent_0 (initial)"), ({"scorer_model": "tiny"}, "tiny/model")):
        plan = config(PreferenceConfig, policies="per_agent", reward="peer_prediction", **given).make_plan()
        assert plan.summary.endswith(told)


def test_a_recipe_with_one_policy_says_where_there_are_several(capsys):
    with pytest.raises(SystemExit):
        train_recipe("math_efficiency", ["policies=per_agent"])
    assert "unknown option 'policies': this recipe has one policy; several talk in" in capsys.readouterr().err


def test_weights_of_members_are_no_paths_in_a_model_card():
    from viva.view.model_card import _shown

    told = {"agent_0": "trained", "agent_1": "/home/me/run@000003", "others": "league:20:agent_0"}
    assert _shown("policies", told) == told | {"agent_1": "run@000003"}
    assert _shown("policies", "per_agent") == "per_agent"
