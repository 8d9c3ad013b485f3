"""The policy that ``viva serve`` opens."""

from pathlib import Path
from typing import Any

import pytest

from viva.recipes.serve import ServeOptions, serve_model
from viva.run.folder import prepare_run_folder
from viva.serve import app


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "RoleColonRenderer"), ("chat_template", "ChatTemplateRenderer")]
)
def test_a_run_is_served_in_its_own_chat_format_if_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    """Regression: a run trained in another format than the model's own was served in the model's."""
    options = {"recipe": "critique_self_play", "model_name": "tiny", "renderer_name": "role_colon"}
    prepare_run_folder(tmp_path, behavior="raise", config=options).open()
    served: list[Any] = []

    def serve(_: Any, policy: Any, **__: Any) -> None:
        served.append(policy)

    monkeypatch.setattr(app, "serve", serve)
    serve_model(
        str(tmp_path),
        ServeOptions(port=0, checkpoint="base", renderer_name=given, device="cpu"),
        lambda _: None,
    )
    assert [type(policy.renderer).__name__ for policy in served] == [expected]
