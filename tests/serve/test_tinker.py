"""The server as the ``tinker`` SDK sees it, against the engine asked directly."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
from served_policies import TOKEN, Served, serving_policy, wait_for
from tiny_engine import ints, params, policy_datum, supervised

import viva
import viva.cli
from viva.engine import LocalServiceClient

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
)

TEXTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
ADAM = tinker.AdamParams(learning_rate=0.02)


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_policy(model, state_dir=tmp_path_factory.mktemp("states")) as server:
        yield server


@pytest.fixture
def remote(served: Served) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=served.address, api_key=TOKEN) as service:
        yield service


@pytest.fixture
def local(tmp_path: Path) -> LocalServiceClient:
    return LocalServiceClient(state_dir=tmp_path / "local")


def trainer(service: Any, model: str) -> Any:
    return service.create_lora_training_client(base_model=model, rank=4, seed=3).result()


def trained(service: Any, model: str) -> tuple[Any, list[Any]]:
    """A client after two steps, and what it answered."""
    client = trainer(service, model)
    answers: list[Any] = []
    for _ in range(2):
        answers.append(
            client.forward_backward([supervised(text) for text in TEXTS], "cross_entropy").result()
        )
        answers.append(client.optim_step(ADAM).result())
    answers.append(client.forward([policy_datum(TEXTS[0])], "ppo", {"clip_low_threshold": 0.5}).result())
    return client, answers


def assert_same(one: Any, other: Any) -> None:
    """That two answers hold the same numbers."""
    metrics = {name.removesuffix(":mean"): value for name, value in one.metrics.items()}
    assert metrics == pytest.approx({n.removesuffix(":mean"): v for n, v in other.metrics.items()}, rel=1e-6)
    for record, expected in zip(
        getattr(one, "loss_fn_outputs", []), getattr(other, "loss_fn_outputs", []), strict=True
    ):
        assert record.keys() == expected.keys()
        for name, tensor in record.items():
            assert tensor.to_numpy().shape == expected[name].to_numpy().shape
            np.testing.assert_allclose(tensor.to_numpy(), expected[name].to_numpy(), rtol=1e-5)


def test_training_and_sampling_give_what_they_give_in_python(
    remote: tinker.ServiceClient, local: LocalServiceClient, model: str
) -> None:
    client, answers = trained(remote, model)
    own, expected = trained(local, model)
    for answer, value in zip(answers, expected, strict=True):
        assert_same(answer, value)
    assert client.get_info().lora_rank == 4
    assert client.get_tokenizer().get_vocab() == own.get_tokenizer().get_vocab()
    asked: dict[str, Any] = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 3,
    }
    answer, value = (
        each.save_weights_and_get_sampling_client()
        .result()
        .sample(ints([1, 2, 3]), 3, params(seed=4, max_tokens=6, temperature=0.8), **asked)
        .result()
        for each in (client, own)
    )
    assert [each.tokens for each in answer.sequences] == [each.tokens for each in value.sequences]
    assert len({each.sequence_id for each in answer.sequences}) == 3
    for sequence, same in zip(answer.sequences, value.sequences, strict=True):
        np.testing.assert_allclose(sequence.logprobs_np, same.logprobs_np, rtol=1e-5)
        np.testing.assert_array_equal(sequence.topk_logprobs_np.token_ids, same.topk_logprobs_np.token_ids)
        assert sequence.stop_reason == same.stop_reason
    np.testing.assert_allclose(answer.prompt_logprobs_np, value.prompt_logprobs_np, rtol=1e-5)
    np.testing.assert_array_equal(
        answer.topk_prompt_logprobs_np.token_ids, value.topk_prompt_logprobs_np.token_ids
    )


def test_chosen_tokens_of_a_prompt_are_scored(
    remote: tinker.ServiceClient, local: LocalServiceClient, model: str
) -> None:
    targets = tinker.TensorData.from_numpy(np.array([[7, -1], [-1, 9]]))
    answer, value = (
        service.create_sampling_client(base_model=model)
        .result()
        .sample(ints([1, 2, 3]), 1, params(max_tokens=1), target_prompt_logprobs=targets)
        .result()
        .target_prompt_logprobs
        for service in (remote, local)
    )
    np.testing.assert_allclose(answer.to_numpy(), value.to_numpy(), rtol=1e-5)


def test_a_saved_state_goes_on_as_the_client_that_saved_it(remote: tinker.ServiceClient, model: str) -> None:
    client, _ = trained(remote, model)
    path = client.save_state("here").result().path
    assert path.startswith("tinker://")
    restored = remote.create_training_client_from_state_with_optimizer(path).result()
    for each in (client, restored):
        each.forward_backward([supervised(TEXTS[0])], "cross_entropy").result()
        each.optim_step(ADAM).result()
    one, other = (
        each.forward([supervised(TEXTS[1])], "cross_entropy").result() for each in (client, restored)
    )
    assert_same(one, other)


def test_an_address_of_saved_weights_holds_after_a_restart(model: str, tmp_path: Path) -> None:
    losses = []
    for path in (None, "tinker://client-000000/weights/here"):
        with (
            serving_policy(model, state_dir=tmp_path) as server,
            tinker.ServiceClient(base_url=server.address, api_key=TOKEN) as service,
        ):
            if path is None:
                client, _ = trained(service, model)
                assert client.save_state("here").result().path == "tinker://client-000000/weights/here"
            else:
                client = service.create_training_client_from_state(path).result()
            losses.append(client.forward([supervised(TEXTS[0])], "cross_entropy").result())
    assert_same(*losses)


def test_agents_talk_to_what_a_trainer_saved_last(
    remote: tinker.ServiceClient, served: Served, model: str
) -> None:
    client = trainer(remote, model)
    seen = []
    for _ in range(2):
        client.forward_backward([supervised(text) for text in TEXTS], "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=0.3)).result()
        path = client.save_weights_for_sampler("live").result().path
        answer = served.client().completions.create(
            model=path, prompt=[1, 2], seed=3, max_tokens=9, extra_body={"return_token_ids": True}
        )
        sampler = remote.create_sampling_client(model_path=path).result()
        params = tinker.SamplingParams(seed=3, max_tokens=9)
        expected = sampler.sample(ints([1, 2]), 1, params).result().sequences[0].tokens
        assert answer.choices[0].token_ids == expected
        seen.append(expected)
    assert seen[0] != seen[1]
    with pytest.raises(openai.NotFoundError, match="there are no saved weights at tinker://"):
        served.client().completions.create(model=path.replace("live", "dead"), prompt="x")


def test_saved_samplers_are_opened_known_and_deleted(
    remote: tinker.ServiceClient, served: Served, model: str
) -> None:
    client, _ = trained(remote, model)
    path = client.save_weights_for_sampler("there").result().path
    sampler = remote.create_sampling_client(model_path=path).result()
    live = client.save_weights_and_get_sampling_client().result()
    one, other = (each.sample(ints([5]), 1, params(seed=1)).result().sequences[0] for each in (sampler, live))
    assert one.tokens == other.tokens
    rest = tinker.RestClient(base_url=served.address, api_key=TOKEN)
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="there are no saved weights at tinker://"):
        remote.create_sampling_client(model_path=path).result()


def test_a_loss_of_ones_own_is_trained(
    remote: tinker.ServiceClient, local: LocalServiceClient, model: str
) -> None:
    def loss(_: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        return sum((each**2).sum() for each in logprobs), {"mine": 1.0}

    answers = []
    for service in (remote, local):
        client = trainer(service, model)
        answer = client.forward_backward_custom([supervised(text) for text in TEXTS], loss).result()
        client.optim_step(ADAM).result()
        answers += [
            answer.metrics["loss:sum"],
            client.forward([supervised(TEXTS[0])], "cross_entropy").result(),
        ]
    assert answers[0] == pytest.approx(answers[2], rel=1e-5)
    assert_same(answers[1], answers[3])


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda client: client.forward_backward([supervised([1, 2])], "no_such_loss"), "no_such_loss"),
        (lambda client: client.forward_backward([supervised([1, 9999])], "cross_entropy"), "9999"),
        (lambda client: client.optim_step(ADAM), "gradient"),
        (lambda client: client.save_state("../up"), "up"),
    ],
)
def test_a_refusal_of_the_engine_reaches_the_client_and_the_next_request_is_done(
    remote: tinker.ServiceClient, model: str, ask: Any, complaint: str
) -> None:
    client = trainer(remote, model)
    with pytest.raises(tinker.RequestFailedError, match=complaint):
        ask(client).result()
    assert client.forward([supervised([1, 2])], "cross_entropy").result().metrics["loss:sum"] > 0


def test_another_model_is_refused(remote: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.NotFoundError, match="model 'another/model' is not served here"):
        remote.create_lora_training_client(base_model="another/model").result()


@pytest.mark.parametrize(
    "path", ["tinker://x/weights/y", "tinker://client-000000/weights/..", "/etc", "tinker://"]
)
def test_a_path_that_no_saving_returned_is_refused(served: Served, path: str) -> None:
    answer = post(served, "weights_info", {"tinker_path": path})
    assert answer.status_code == 400
    assert "as saving returned it" in answer.json()["detail"]


def post(served: Served, name: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{served.address}/api/v1/{name}", json=body, headers={"X-API-Key": TOKEN}, timeout=60)


def test_a_request_that_is_sent_again_is_done_once_and_one_out_of_turn_waits(
    served: Served, remote: tinker.ServiceClient, model: str
) -> None:
    client = trainer(remote, model)
    client.forward_backward([supervised(TEXTS[0])], "cross_entropy").result()
    step = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.02}}
    early = post(served, "optim_step", step | {"seq_id": 3})
    assert (early.status_code, early.json()["detail"]) == (
        409,
        "request 3 of this model is out of turn; the next is 2",
    )
    names = {post(served, "optim_step", step).json()["request_id"] for _ in range(3)}
    (name,) = names
    results = [post(served, "retrieve_future", {"request_id": name}).json() for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["metrics"]["grad_norm"] > 0


def test_what_is_cancelled_leaves_the_batch(served: Served, remote: tinker.ServiceClient, model: str) -> None:
    sampler = remote.create_sampling_client(base_model=model).result()
    future = sampler.sample(ints([1]), 256, params(max_tokens=250))
    wait_for(served.sequences)
    with served.engine_at_rest():
        (request,) = {sequence.request for sequence in served.sequences()}
    future.future().cancel()
    wait_for(request.future.done)
    assert request.future.cancelled()


def test_the_end_of_a_session_frees_its_models(served: Served, model: str) -> None:
    with tinker.ServiceClient(base_url=served.address, api_key=TOKEN) as service:
        model_id = trainer(service, model).model_id
        assert post(served, "get_info", {"model_id": model_id}).status_code == 200
    gone = post(served, "get_info", {"model_id": model_id})
    assert gone.status_code == 404
    assert "its session is over" in gone.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"\xff\xff", b"{}"])
def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    headers = {"X-API-Key": TOKEN, "Content-Type": "application/x-protobuf"}
    for name in ("forward_backward", "create_model"):
        answer = httpx.post(f"{served.address}/api/v1/{name}", content=body, headers=headers)
        assert answer.status_code in (400, 404)
        assert answer.json()["detail"]


def test_a_missing_key_is_told_with_its_remedy(
    served: Served, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert viva.cli.main(["doctor", f"base_url={served.address}", f"model_name={model}"]) == 2
    told = capsys.readouterr().err
    assert "answered 401" in told
    assert "set TINKER_API_KEY to a valid one" in told


@pytest.mark.slow
def test_the_doctor_has_a_yes_for_every_question(
    served: Served,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)
    options = [f"base_url={served.address}", f"model_name={model}", "tolerance=0.001", "lora_rank=4"]
    assert viva.cli.main(["doctor", *options, f"report={tmp_path}/served"]) == 0, capsys.readouterr().out
    record = json.loads((tmp_path / "served.json").read_text())
    assert record["conformant"]
    assert record["engine"] == f"the server at {served.address}"
    assert TOKEN not in json.dumps(record) + (tmp_path / "served.md").read_text()


@pytest.mark.slow
def test_a_run_over_the_server_is_the_run_in_this_process(
    served: Served, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)
    talk = viva.Protocol(
        rounds=[viva.Round("say", "Say something.", [])],
        reward=lambda talk: {0: 1.0, 1: len(talk.turns[0].text)},
    )
    rows = []
    for name, options in (("there", {"base_url": served.address}), ("here", {"engine": "local"})):
        run = viva.train(
            talk,
            model=model,
            prompts=["a", "b"],
            num_agents=2,
            batch_size=4,
            steps=2,
            max_tokens=8,
            lora_rank=4,
            learning_rate=1e-2,
            log_path=str(tmp_path / name),
            **options,
        )
        rows.append(run.metrics.rename(columns=lambda column: column.removesuffix(":mean")))
    there, here = rows
    names = [name for name in here if name.startswith(("reward/", "optim/", "rollout/")) and name in there]
    assert len(names) > 20
    assert there["optim/grad_norm"].max() > 0
    for name in names:
        np.testing.assert_allclose(there[name], here[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_several_policies_over_the_server_go_on_exactly_and_are_those_of_this_process(
    served: Served, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each trained member is a training client of the server, with an optimiser and a state of its own."""
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)
    talk = viva.Protocol(
        rounds=[viva.Round("say", "Say something.", [])],
        reward=lambda talk: {0: len(talk.turns[1].text), 1: len(talk.turns[0].text)},
    )

    def rows(name: str, steps: int, **options: Any) -> Any:
        run = viva.train(
            talk,
            model=model,
            prompts=["a", "b"],
            num_agents=2,
            policies="per_agent",
            batch_size=4,
            steps=steps,
            max_tokens=8,
            lora_rank=4,
            learning_rate=1e-2,
            save_every=1,
            log_path=str(tmp_path / name),
            **options,
        )
        return run.metrics.rename(columns=lambda column: column.removesuffix(":mean"))

    there = {"base_url": served.address}
    rows("stopped", 1, **there)
    resumed = rows("stopped", 2, behavior_if_exists="resume", **there)
    whole, here = rows("whole", 2, **there), rows("here", 2, engine="local")
    kinds = ("reward/", "rollout/", "optim/", "agent_0/optim/", "agent_1/optim/")
    for other in (resumed, here):
        names = [name for name in other if name.startswith(kinds) and name in whole]
        assert {"agent_0/optim/grad_norm", "agent_1/optim/grad_norm"} <= set(names)
        for name in names:
            np.testing.assert_allclose(whole[name], other[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert all(whole[f"agent_{number}/optim/grad_norm"].max() > 0 for number in (0, 1))
