"""A run that is killed and resumed ends like one that was never stopped, to the bit; a signal ends it within seconds.

The runs are those of the recipes on the local engine, in processes that really die. The bulk is of a model with two
layers; a judge that names labels makes it learn.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from chat_server import ChatServer, chat_server, completion

from viva.model_files import SEAL

RECIPE = "1 kill and resume"
SEED = 8
SCRIPT = Path(__file__).parents[1] / "helpers" / "killed_run.py"
LIMIT_S = 5.0

CONVERSATION = {
    "num_agents": 2,
    "max_rounds": 1,
    "batch_size": 2,
    "max_tokens": 4,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "num_test_conversations": 0,
    "judge_max_off_set_mass": 1.0,
    "tournament_pattern": "all_pairs_one_way",
}
CRITIQUE = {
    "model_name": "tiny",
    "num_agents": 3,
    "batch_size": 6,
    "max_tokens": 40,
    "max_steps": 3,
    "num_test_conversations": 0,
}
MATH = {
    "model_name": "tiny",
    "strategies": "iid,prompt_augmentation",
    "group_size": 4,
    "batch_size": 16,
    "max_tokens": 32,
    "max_steps": 3,
    "samples_every": 1,
}
RECIPES = {
    "conversation_preference_rl": CONVERSATION,
    "critique_self_play": CRITIQUE,
    "math_efficiency": MATH,
    "conversation_preference_rl judged every 3 steps": CONVERSATION | {"judge": "every", "judge_every": 3},
    "conversation_preference_rl judged by an average": CONVERSATION | {"judge": "ema", "judge_decay": 0.5},
    # one question at a time, so that its answers are kept in the same order
    "conversation_preference_rl judged from outside": CONVERSATION
    | {"judge_model": "m", "judge_concurrency": 1, "judge_prices": "[1.0,2.0]"},
}
"""Options by recipe, whose name may have more words behind it."""
COMMON = {
    "device": "cpu",
    "lora_rank": 4,
    "eval_every": 2,
    "save_every": 2,
    "tokens_every": 2,
    "max_test_samples": 2,
    "behavior_if_exists": "resume",
}


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that was not stopped."""

    outcome: dict
    points: list
    seconds: float


class Server:
    """Does runs in forks of two processes that hash texts differently, in turns: what goes on is never the same one."""

    def __init__(self, processes, folder: Path, model: Path, judge: ChatServer) -> None:
        self.processes = itertools.cycle(processes)
        self.judge = judge
        self.folder = folder
        self.model = model
        self.wholes: dict[str, Whole] = {}

    def run(self, log_path: Path, recipe: str = "conversation_preference_rl", **ending) -> dict:
        """Begin or resume a run; how the process ended."""
        options = {
            "model_name": self.model,
            "train_prompts_path": self.folder / "problems.jsonl",
            "test_prompts_path": self.folder / "problems.jsonl",
            "log_path": log_path,
            **COMMON,
            **RECIPES[recipe],
        }
        if "judge_model" in options:
            options["judge"] = self.judge.url
        log = self.folder / "log.txt"
        log.unlink(missing_ok=True)
        log.touch()
        job = {
            "recipe": recipe.partition(" ")[0],
            "log": str(log),
            "options": {name: str(value) for name, value in options.items()},
        }
        process = next(self.processes)
        process.stdin.write(json.dumps(job | ending) + "\n")
        process.stdin.flush()
        ended = json.loads(process.stdout.readline())
        assert ended["code"] != 1, log.read_text()
        return ended | {"log": log.read_text()}

    def whole(self, recipe: str = "conversation_preference_rl") -> Whole:
        """The run that was not stopped."""
        if recipe not in self.wholes:
            name = recipe.replace(" ", "-")
            log_path = self.folder / f"whole-{name}"
            points = self.run(log_path, recipe, counts=True)["points"]
            again = self.folder / f"again-{name}"
            seconds = self.run(again, recipe)["seconds"]
            found = outcome(log_path)
            assert outcome(again) == found
            assert sum(row.get("optim/steps", 0) for row in found["metrics"]) >= 2
            self.wholes[recipe] = Whole(outcome=found, points=points, seconds=seconds)
        return self.wholes[recipe]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    lines = [json.dumps({"query": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(5)]
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n")
    model = make_model(folder / "model")
    with ExitStack() as stack:
        processes = [stack.enter_context(started(hash_seed)) for hash_seed in ("1", "2")]
        yield Server(processes, folder, model, stack.enter_context(chat_server(verdict)))
        for process in processes:
            process.stdin.close()


def verdict(request: dict, _: int):
    """The same verdict on the same solutions."""
    label = ("A", "B")[zlib.crc32(request["messages"][-1]["content"].encode()) % 2]
    return completion(json.dumps({"preference": label}))


def started(hash_seed: str) -> subprocess.Popen:
    """A process that does runs."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )


def make_model(folder: Path) -> Path:
    """Two layers with random weights behind the built-in policy's tokenizer, which begin every verdict with a label."""
    import torch
    import transformers

    from viva.tiny import model_path

    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path() / name, folder / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        rows, (a, b) = model.lm_head.weight, tokenizer.convert_tokens_to_ids(["A", "B"])
        rows[a] *= 8
        rows[b] = -rows[a]
    model.save_pretrained(folder)
    return folder


def outcome(log_path: Path) -> dict:
    """All that a run leaves, but for times."""
    files = sorted(path for path in log_path.rglob("*") if path.is_file())
    texts = {name: log_path / name for name in ("metrics.jsonl", "checkpoints.jsonl")}
    rows = {
        name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in texts.items()
    }
    for row in rows["checkpoints.jsonl"]:
        row.pop(SEAL, None)
        for part in ("log_sizes", "log_digests"):
            row[part].pop("metrics.jsonl")
    timed = {*texts.values(), log_path / "report.html", log_path / "config.json"}
    return {
        "files": [str(path.relative_to(log_path)) for path in files],
        "folders": sorted(str(path.relative_to(log_path)) for path in log_path.rglob("*") if path.is_dir()),
        "metrics": [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in rows["metrics.jsonl"]
        ],
        "checkpoints": rows["checkpoints.jsonl"],
        "digests": {
            str(path.relative_to(log_path)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path not in timed
        },
    }


class Trials:
    """Kills runs, resumes them and compares."""

    def __init__(self, server: Server, folder: Path, rng: random.Random, recipe: str) -> None:
        self.server = server
        self.folder = folder
        self.rng = rng
        self.recipe = recipe
        self.whole = server.whole(recipe)
        self.num_kills = 0
        self.num_again = 0

    def try_one(self, name: str, **ending) -> bool:
        """Kill, resume, perhaps kill again and resume again; whether the run was still there to be killed."""
        log_path = self.folder / name
        asked = self.server.judge.requests
        asked.clear()
        if self.server.run(log_path, self.recipe, **ending)["code"] == 0:
            shutil.rmtree(log_path)
            return False
        self.num_kills += 1
        num_kills = 1
        if self.rng.random() < 0.2:
            if self.rng.random() < 0.5:
                again = {"point": self.rng.randrange(60)}
            else:
                again = {"after_s": self.rng.uniform(0, 0.7 * self.whole.seconds)}
            num_kills += self.server.run(log_path, self.recipe, **again)["code"] != 0
        self.num_again += num_kills - 1
        assert self.server.run(log_path, self.recipe)["code"] == 0
        found = outcome(log_path)
        for part, value in self.whole.outcome.items():
            assert found[part] == value, (name, ending, part)
        num_questions = len({json.dumps(each["messages"]) for each in asked})
        assert len(asked) - num_questions <= num_kills, "an answer that had come was asked for again"
        shutil.rmtree(log_path)
        return True


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_killed_at_any_moment_ends_like_one_that_was_not(server, tmp_path, trials, ledger, recipe):
    main = recipe == "conversation_preference_rl"
    wanted = trials(short=3, full=300) if main else trials(short=int("judged" in recipe), full=10)
    if not wanted:
        pytest.skip("in the full form only")
    tried = Trials(server, tmp_path, random.Random(f"{SEED} {recipe}"), recipe)
    number = 0
    while tried.num_kills < wanted:
        tried.try_one(f"{number}", after_s=tried.rng.uniform(0, tried.whole.seconds))
        number += 1
        assert number < 10 * wanted, "almost every run ends before it is killed"
    ledger(
        RECIPE,
        f"SIGKILL at random instants: {recipe} resumes to the bit",
        trials=wanted,
        seed=SEED,
        figures=f"{tried.num_again} killed again while they resumed",
    )


def test_a_run_killed_at_a_durability_point_ends_like_one_that_was_not(server, tmp_path, trials, ledger):
    tried = Trials(server, tmp_path, random.Random(SEED), "conversation_preference_rl")
    names = tried.whole.points
    kinds = sorted({name.split()[1] for name in names})
    assert {"close", "fsync", "mkdir", "open", "rename", "replace", "unlink", "write"} <= set(kinds)
    points = range(len(names))
    count = trials(short=7, full=len(names))
    chosen = points if count == len(names) else sorted(tried.rng.sample(points, count))
    for point in chosen:
        assert tried.try_one(f"{point}", point=point), names[point]
    ledger(
        RECIPE,
        "SIGKILL before and after every call that changes a file",
        trials=len(chosen),
        seed=SEED,
        figures=f"{len(names)} points ({', '.join(kinds)}); {tried.num_again} killed again while they resumed",
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_run_in_seconds_and_it_resumes_exactly(server, tmp_path, trials, ledger, name):
    whole, rng = server.whole(), random.Random(f"{SEED} {name}")
    wanted, slowest, num_stopped = trials(short=1, full=20), 0.0, 0
    for number in range(10 * wanted):
        log_path = tmp_path / f"{number}"
        ended = server.run(log_path, signal=name, after_s=rng.uniform(0.3, 0.9) * whole.seconds)
        assert ended["code"] in (0, {"SIGTERM": 143, "SIGINT": 130}[name], -15, -2), ended
        slowest = max(slowest, ended["after_signal_s"])
        if ended["code"]:
            num_stopped += 1
            assert server.run(log_path)["code"] == 0
            found = outcome(log_path)
            assert (found["metrics"], last_state(found)) == (
                whole.outcome["metrics"],
                last_state(whole.outcome),
            )
        if num_stopped == wanted:
            break
    assert num_stopped == wanted, "almost every run ends before the signal, or does not hear it"
    assert slowest < LIMIT_S
    ledger(
        RECIPE,
        f"{name} ends a run within {LIMIT_S:g} s, and it resumes to the bit",
        trials=num_stopped,
        seed=SEED,
        figures=f"slowest {slowest:.1f} s",
    )


def last_state(found: dict) -> dict:
    """The final state and transcripts; which checkpoints are kept before depends on where the run was stopped."""
    last = found["checkpoints"][-1]["state_path"]
    return {
        name: digest
        for name, digest in found["digests"].items()
        if name.startswith((last, "adapter", "transcripts", "tokens"))
    }


@pytest.mark.parametrize(("part", "call"), [("update", 3), ("sampling", 30)])
def test_a_signal_is_heard_while_the_engine_computes(server, tmp_path, ledger, part, call):
    """One unit of work takes a minute; the process is gone within seconds, and nothing is lost."""
    ended = server.run(tmp_path, slow=[part, call], signal="SIGTERM", after_s=0.2)
    assert (ended["code"], ended["after_signal_s"] < LIMIT_S) == (143, True), ended
    assert "ended at once by SIGTERM; the run can be resumed" in ended["log"]
    resumed = server.run(tmp_path)
    if part == "update":
        assert "answers are taken from the journal: they were sampled before" in resumed["log"]
    assert outcome(tmp_path) == server.whole().outcome
    ledger(
        RECIPE,
        f"SIGTERM during a unit of {part} that takes a minute",
        trials=1,
        figures=f"gone after {ended['after_signal_s']:.1f} s",
    )


@pytest.mark.parametrize("what", ["logs are not cut back", "a bit of the journal is wrong"])
def test_the_comparison_sees_what_is_broken(server, tmp_path, what):
    whole = server.whole()
    writes = [place for place, name in enumerate(whole.points) if name == "before write metrics.jsonl"]
    # of the last step, whose transcripts are written already; what follows is the evaluation at the end
    assert server.run(tmp_path, point=writes[-2])["code"] == -9
    assert server.run(tmp_path, sabotage=what)["code"] in (0, 2)
    assert outcome(tmp_path) != whole.outcome


def test_a_finished_run_stays_as_it_is(server, tmp_path):
    for _ in range(2):
        assert server.run(tmp_path)["code"] == 0
        assert outcome(tmp_path) == server.whole().outcome
