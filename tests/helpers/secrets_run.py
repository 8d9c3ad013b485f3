"""A day's work with keys lying about: what is written and said here is searched for them by ``test_secrets``.

As a program it works in the working folder with all logging on, one step after another, and says how each one ended.
``crash`` as its argument is the one step that ends the process with a traceback; ``short`` leaves out ``viva doctor``.
"""

import http.server
import json
import logging
import os
import sys
import threading

from bad_world import run_command

from viva.recipes import loop
from viva.training import remote

RUN = (
    *(
        "train",
        "conversation_preference_rl",
        "model_name=model",
        "train_prompts_path=prompts.jsonl",
        "log_path=run",
    ),
    *("num_agents=2", "max_rounds=1", "batch_size=2", "max_tokens=8", "lora_rank=1", "learning_rate=0.001"),
    *(
        "test_prompts_path=prompts.jsonl",
        "judge_max_off_set_mass=1.0",
        "device=cpu",
        "tokens_every=1",
        "save_every=1",
        f'personas={{0: "Use {os.environ["GITHUB_PAT"]}.", 1: "Be brief."}}',
    ),
)


def run_with(*options):
    """`RUN` with these options, in the place of its own of the same name."""
    given = {option.partition("=")[0] for option in options}
    return (*(option for option in RUN if option.partition("=")[0] not in given), *options)


SECRET_URL = "secrets.invalid"
"""Host of the addresses with passwords that nobody answers at."""


class Echo(http.server.BaseHTTPRequestHandler):
    """A server that is well, and refuses everything else with an answer that holds what it was sent."""

    def do_GET(self):
        self.answer(200, {"status": "ok"})

    def do_POST(self):
        self.answer(400, {"detail": f"refused, with {dict(self.headers)} and {os.environ['SERVER_SECRET']}"})

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def steps(port):
    password = os.environ["ADDRESS_PASSWORD"]
    address = f"http://user:{password}@127.0.0.1:{port}"
    nobody = f"http://user:{password}@127.0.0.1:1"
    odd = f"http://user:{password}@{SECRET_URL}:port"
    trackers = f"trackers={os.environ['TRACKERS']}"
    folder = f"https://user:{password}@{SECRET_URL}/model?token={password}"
    again = run_with(trackers, "behavior_if_exists=resume")
    yield 0, run_with(trackers, "max_steps=1")
    yield 0, (*again, "max_steps=2")
    yield 2, (*again, "max_steps=3", "seed=5")
    yield 0, ("report", "run")
    yield 0, ("export", "run", "to=out")
    yield 0, ("eval", "run", "num_samples=1", "num_test_conversations=1", "output=result.json")
    yield None, ("doctor", "model_name=model", "device=cpu")
    yield 2, ("view", "run", "gone")
    for at in (address, nobody, odd):
        yield 2, run_with("log_path=remote", f"base_url={at}", "max_steps=1")
        yield 2, ("doctor", "model_name=model", f"base_url={at}")
        yield 2, ("eval", "run", "engine=remote", f"base_url={at}", "output=result.json")
    yield 2, run_with("log_path=local", "engine=local", f"base_url={address}")
    yield 2, run_with("log_path=other", f"model_name={folder}")
    yield 2, run_with("log_path=other", f"hf_dataset_name={folder}")
    yield 2, run_with("log_path=other", f"load_checkpoint_path={folder}")
    yield 2, run_with("log_path=other", f"renderer_name={folder}")
    yield 2, run_with("log_path=other", f"num_agents={folder}")
    yield 2, run_with("log_path=other", f"engine={folder}")
    yield 2, run_with("log_path=other", f"{folder}")
    yield 2, ("export", "run", "to=out2", f"model_name={folder}")


def crash():
    """An error that nobody expects, in the middle of training, with keys in its text and in its frames."""

    async def broken(_training):
        key = os.environ["LOCAL_TOKEN"]
        raise KeyError(f"{key} of https://user:{os.environ['ADDRESS_PASSWORD']}@{SECRET_URL}/")

    loop.train = broken
    run_command(run_with(f"trackers={os.environ['TRACKERS']}", "log_path=crashed", "max_steps=1"))


def main():
    logging.basicConfig(level=logging.DEBUG, filename="debug.log")
    if sys.argv[1:] == ["crash"]:
        crash()
    remote._FIRST_PAUSES_S = (0.0,)  # nobody comes later
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for number, (wanted, arguments) in enumerate(steps(server.server_port)):
        if sys.argv[1:] == ["short"] and arguments[0] == "doctor":
            continue
        status = run_command(arguments)
        is_right = status == wanted or (wanted is None and status in (0, 1))
        sys.stdout.write(f"{'ended' if is_right else 'WRONG'} {number} {arguments[0]} {status}\n")


if __name__ == "__main__":
    main()
