"""Adapters in PEFT's format that cannot be read are refused in words."""

import json

import pytest

from viva.run.export import staged_adapter

PLAIN = {"peft_type": "LORA", "lora_alpha": 32, "bias": "none", "base_model_name_or_path": "tiny"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(PLAIN), "needs its rank as r in adapter_config.json, 1 or more; got r=None"),
        (json.dumps(PLAIN | {"r": "8"}), "got r='8'"),
        (json.dumps(PLAIN | {"r": 0}), "got r=0"),
        (json.dumps(PLAIN | {"r": 8, "use_dora": True}), "has use_dora=True; .* merge it"),
        ("{", "adapter_config.json is damaged"),
        ("[]", "must hold an object"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(content, message, tmp_path):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        staged_adapter(tmp_path, tmp_path / "staged")
