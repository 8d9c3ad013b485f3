"""All three recipes through the SDK on a SkyRL server: they train, save, and go on after either side was killed."""

import json
import subprocess
import sys
import time

import pytest
from lossy_proxy import Fault, Proxy, named
from skyrl_server import SkyrlServer

RECIPES = {
    "conversation_preference_rl": {
        "num_agents": 2,
        "max_rounds": 1,
        "batch_size": 4,
        "tournament_pattern": "all_pairs_one_way",
        "judge_max_off_set_mass": 1.0,
    },
    "critique_self_play": {"num_agents": 2, "batch_size": 4},
    "math_efficiency": {"strategies": "iid,prompt_augmentation", "group_size": 4, "batch_size": 8},
}
OPTIONS = {"max_tokens": 8, "lora_rank": 4, "learning_rate": 1e-3, "eval_every": 0, "save_every": 1}
STEP_S = 1200


class Run:
    """A recipe's run in its own process."""

    def __init__(self, recipe, server, problems, folder):
        self.recipe, self.server, self.problems, self.folder = recipe, server, problems, folder

    def start(self, *, address=None, **options):
        given = {
            "model_name": self.server.model,
            "base_url": address or self.server.address,
            "train_prompts_path": self.problems,
            "log_path": self.folder,
            "behavior_if_exists": "resume",
        }
        options = OPTIONS | RECIPES[self.recipe] | given | options
        arguments = [f"{name}={value}" for name, value in options.items()]
        with (self.folder.parent / "client.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "viva.cli", "train", self.recipe, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def to_end(self, **options):
        code = self.start(**options).wait(STEP_S)
        return code, self.told()

    def told(self):
        return (self.folder.parent / "client.log").read_text(errors="replace")

    def rows(self, name):
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, process, is_so):
        """Wait for something while the process goes on."""
        deadline = time.monotonic() + STEP_S
        while not is_so():
            assert process.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)


def check_complete(run, num_steps):
    metrics = run.rows("metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(num_steps))
    gaps = [row["optim/logprob_gap_max"] for row in metrics if row["optim/steps"]]
    assert gaps, "nothing was trained"
    assert max(gaps) < 1e-3  # the sampler's and the trainer's logprobs, across HTTP
    *_, last = run.rows("checkpoints.jsonl")
    assert (last["next_step"], last["final"]) == (num_steps, True)
    assert last["state_path"].startswith("tinker://")


@pytest.fixture
def run(request, server, problems, tmp_path):
    return Run(getattr(request, "param", "math_efficiency"), server, problems, tmp_path / "run")


@pytest.mark.parametrize("run", RECIPES, indirect=True)
def test_a_recipe_goes_on_after_its_client_and_after_its_server_was_killed(run, server):
    client = run.start(max_steps=2)
    run.wait_for(client, lambda: any("state_path" in row for row in run.rows("checkpoints.jsonl")))
    client.kill()
    assert client.wait() == -9
    client = run.start(max_steps=2)
    run.wait_for(client, lambda: run.told().count("engine: the server at") == 2)  # it is about to sample
    server.kill()
    server.start()
    assert client.wait(STEP_S) == 1, run.told()
    assert "behavior_if_exists=resume" in run.told()
    assert len(run.rows("checkpoints.jsonl")) == 1
    code, told = run.to_end(max_steps=2)
    assert code == 0, told
    assert told.count("resuming") == 2
    check_complete(run, 2)


def test_a_new_run_starts_from_the_weights_of_another(run, problems, tmp_path):
    code, told = run.to_end(max_steps=2)
    assert code == 0, told
    *_, saved = run.rows("checkpoints.jsonl")
    other = Run(run.recipe, run.server, problems, tmp_path / "other" / "run")
    other.folder.parent.mkdir()
    code, told = other.to_end(max_steps=2, load_checkpoint_path=saved["state_path"])
    assert code == 0, told
    check_complete(other, 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss_fn": "dro"}, "the engine cannot do what this run needs"),
        (
            {"load_checkpoint_path": "tinker://nobody/weights/000001"},
            "answered 404.*check model_name and the path",
        ),
    ],
)
def test_what_the_server_cannot_do_is_refused_before_training(run, options, told):
    code, output = run.to_end(max_steps=1, **options)
    assert code == 2, output
    assert told.partition(".*")[0] in output
    assert told.rpartition(".*")[2] in output
    assert not run.rows("metrics.jsonl")


def test_a_lost_answer_to_a_step_is_noticed_and_nothing_of_it_is_kept(run, server):
    with Proxy(server.address, named({"optim_step": [Fault.LOST_ANSWER]})) as proxy:
        code, told = run.to_end(address=proxy.own_address, max_steps=2)
        assert proxy.seen["optim_step"] == 2  # the SDK asked again, and the server did it twice
    assert code == 1, told
    assert "applied an optimiser step twice" in told
    saved = [row["next_step"] for row in run.rows("checkpoints.jsonl")]
    assert (saved or [0])[-1] == len(run.rows("metrics.jsonl"))


def test_lost_answers_to_samples_and_gradients_change_nothing(run, server):
    lost = {"asample": [Fault.LOST_ANSWER] * 2, "forward_backward": [Fault.LOST_ANSWER]}
    with Proxy(server.address, named(lost)) as proxy:
        code, told = run.to_end(address=proxy.own_address, max_steps=2)
        assert proxy.done.total() == 3
    assert code == 0, told
    check_complete(run, 2)
    for row in run.rows("metrics.jsonl"):
        counted = [value for name, value in row.items() if name.endswith("/num_samples")]
        assert sum(counted) == RECIPES["math_efficiency"]["batch_size"]  # each sample once


def test_a_recipe_trains_on_a_server_of_two_workers(environment, model, problems, tmp_path):
    server = SkyrlServer(environment, model, tmp_path, workers=2)
    server.start()
    try:
        run = Run("math_efficiency", server, problems, tmp_path / "run")
        code, told = run.to_end(max_steps=2)
        assert code == 0, told
        check_complete(run, 2)
        assert len(server.others) == 1
        assert server.others[0].poll() is None  # it has worked all the time
        assert "entering command loop" in " ".join(server.log().split())
    finally:
        server.kill()
