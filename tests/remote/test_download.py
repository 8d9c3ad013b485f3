"""Weights of a remote run are fetched from the server's archive, and nothing else of it is."""

import io
import json
import tarfile
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tinker
import web_servers
from safetensors.numpy import save_file
from web_servers import QuietHandler

from viva.engine.checkpoint import read_state
from viva.run.export import fetch_adapter, staged_adapter

STATE = "tinker://run/weights/000003"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def archive(members):
    """A tar.gz of (name, bytes) or, for a link, (name, target)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


@contextmanager
def serving(content):
    class Handler(QuietHandler):
        def do_GET(self):
            content(self) if callable(content) else self.answer(200, content)

    with web_servers.serving(Handler) as port:
        yield f"http://127.0.0.1:{port}/archive"


class Server:
    """Saves a state for sampling, and says where its archive is."""

    def __init__(self, answer, *, path="tinker://run2/sampler_weights/{}"):
        self.answer, self.path, self.asked = answer, path, []

    def create_training_client_from_state(self, path):
        self.asked.append(path)
        return self

    async def save_weights_for_sampler(self, name, ttl_seconds):
        self.asked.append(ttl_seconds)
        return SimpleNamespace(path=self.path.format("x"))

    def create_rest_client(self):
        return self

    async def get_checkpoint_archive_url_async(self, run, checkpoint):
        self.asked.append((run, checkpoint))
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(url=self.answer)


async def fetched(content, folder):
    with serving(content) as url:
        return await fetch_adapter(Server(url), STATE, folder, base_url="http://s")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("tinker://run2/sampler_weights/{}", ("run2", "sampler_weights/x")),
        ("tinker://run2/{}", ("run2", "x")),
    ],
    ids=["tinker", "skyrl"],
)
async def test_the_state_is_saved_for_sampling_and_its_archive_read(tmp_path, path, names):
    with serving(archive([(f"./{CONFIG}", b"{}"), (f"deep/{TENSORS}", b"t")])) as url:
        server = Server(url, path=path)
        folder = await fetch_adapter(server, STATE, tmp_path / "a", base_url="http://s")
    assert server.asked == [STATE, 3600, names]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {CONFIG: b"{}", TENSORS: b"t"}


HOSTILE = [
    ("../evil.txt", b"out"),
    ("/tmp/evil.txt", b"out"),
    ("..\\evil.txt", b"out"),
    ("link", "/etc"),
    ("link/evil.txt", b"out"),
    (CONFIG, "/etc/passwd"),
    (f"../../{TENSORS}", b"t"),
    (f"/abs/{CONFIG}", b"{}"),
]


async def test_no_name_or_link_of_an_archive_is_followed(tmp_path):
    folder = await fetched(archive(HOSTILE), tmp_path / "in" / "a")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert files == {f"in/a/{CONFIG}", f"in/a/{TENSORS}"}
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert (folder / CONFIG).read_bytes() == b"{}"


WHOLE = archive([(CONFIG, b"{}"), (TENSORS, bytes(5000))])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no archive", "could not be read"),
        (WHOLE[: len(WHOLE) // 2], "could not be read"),
        (archive([(CONFIG, b"{}")]), f"it holds no {TENSORS}"),
        (archive([(CONFIG, b"{}"), (f"b/{CONFIG}", b"{}")]), f"it holds {CONFIG} twice"),
        (archive([(CONFIG, "elsewhere"), (TENSORS, b"t")]), f"it holds no {CONFIG}"),
    ],
    ids=["no archive", "half", "no weights", "twice", "a link"],
)
async def test_an_archive_that_is_none_is_refused(tmp_path, content, told):
    with pytest.raises(ValueError, match=f"the archive of {STATE} could not be read: .*") as error:
        await fetched(content, tmp_path / "a")
    assert told in str(error.value)


async def test_an_answer_that_breaks_off_and_an_address_that_is_none_are_told(tmp_path):
    def break_off(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"ffff\r\n" + WHOLE)

    with serving(break_off) as url, pytest.raises(ValueError, match=r"could not be read: .*Export again"):
        await fetch_adapter(Server(url), STATE, tmp_path / "a", base_url="http://s")
    told = r"could not be read: .*control characters.*signature=\*\*\*"
    with pytest.raises(ValueError, match=told):
        await fetch_adapter(
            Server("http://127.0.0.1/a b?signature=abc"), STATE, tmp_path / "b", base_url="http://s"
        )


async def test_a_file_of_this_machine_is_no_archive(tmp_path):
    (tmp_path / "x").write_bytes(WHOLE)
    with pytest.raises(ValueError, match="which is no web address"):
        await fetch_adapter(Server(f"file://{tmp_path}/x"), STATE, tmp_path / "a", base_url="http://s")


@pytest.mark.parametrize(
    ("base_url", "told"), [("http://s", "--checkpoints-base"), (None, "see your runs on its web page")]
)
async def test_a_server_without_archives_says_what_to_do(tmp_path, base_url, told):
    request = httpx.Request("GET", "http://s/archive")
    refused = tinker.NotFoundError("Not Found", response=httpx.Response(404, request=request), body=None)
    with pytest.raises(ValueError, match=f"does not give the weights of {STATE} away .*{told}"):
        await fetch_adapter(Server(refused), STATE, tmp_path / "a", base_url=base_url)


def test_an_adapter_that_does_not_name_its_layers_is_completed(tmp_path):
    names = [f"base_model.model.model.layers.{n}.self_attn.{kind}_proj" for n in (0, 1) for kind in "qv"]
    tensors = {f"{name}.lora_{side}.weight": np.zeros((2, 2), np.float32) for name in names for side in "AB"}
    adapter = tmp_path / "a"
    adapter.mkdir()
    save_file(tensors, adapter / TENSORS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 32.0, "bias": "none", "target_modules": None}
    (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "/server/model"}))
    staged = staged_adapter(adapter, tmp_path / "s", "someone/Model@v2")
    told = json.loads((staged / CONFIG).read_text())
    assert (told["target_modules"], told["task_type"]) == (["q_proj", "v_proj"], "CAUSAL_LM")
    assert (told["base_model_name_or_path"], told["revision"]) == ("someone/Model", "v2")
    assert read_state(str(staged)).base_model == "someone/Model@v2"
