"""Commands in processes of their own, forked from one that has loaded what they need: a start would take seconds."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "datasets",
        "peft",
        "transformers.models.qwen3.modeling_qwen3",
        "tinker_cookbook.checkpoint_utils",
        "tinker_cookbook.model_info",
        "tinker_cookbook.renderers",
        "tinker_cookbook.rl.data_processing",
        "tinker_cookbook.supervised.data",
        "tinker_cookbook.tokenizer_utils",
        "tinker_cookbook.utils.ml_log",
        "viva.cli",
        "viva.engine",
        "viva.recipes.programs",
    ]
)


def run(arguments: list[str], folder: Path, log: Path) -> None:
    """What such a process does: the command ``viva`` in a folder; all that it says is in the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as for python -m
    import viva.cli

    sys.exit(viva.cli.main(arguments))


def start(arguments: list[str], folder: Path, log: Path) -> multiprocessing.process.BaseProcess:
    """The command under way; it finds models and data sets in its folder, and nothing elsewhere."""
    process = SERVER.Process(target=run, args=(arguments, folder, log))
    with pytest.MonkeyPatch.context() as patch:  # the first call starts the server, whose imports read these
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", "cache")
        process.start()
    return process
