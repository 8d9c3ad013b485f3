"""A trained run as GGUF files of each precision, in llama.cpp: ids, chat template, greedy tokens and logprobs.

    viva export RUN to=FOLDER
    python benchmarks/gguf_greedy.py RUN FOLDER/model [python=/path/to/an/environment/with/xllamacpp/bin/python]

`xllamacpp` has llama.cpp built in, as a server in its own process. What it says is compared with the merged folder in
plain ``transformers``. Logprobs are those of the first token's 20 likeliest; keys and values are cached in float32.
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

import torch
from gguf_ids import make_texts

from viva.recipes.export import ExportOptions, export_run

QUESTIONS = (
    "What is the capital of France? Answer in one word.",
    "Tom has 7 apples and buys 5 more. How many apples does he have?",
    "Write a sentence about the sea.",
)
NUM_TOKENS = 40
BY_LLAMA_CPP = """
import json, sys, urllib.request
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel, options.cpuparams.n_threads = sys.argv[1], 1024, 1, 1
options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, asked = xllamacpp.Server(options), json.load(sys.stdin)
def ask(path, **body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    return json.load(urllib.request.urlopen(request))
said = {"ids": [ask("/tokenize", content=text, add_special=True)["tokens"] for text in asked["texts"]]}
said["prompts"] = [
    ask("/apply-template", messages=[{"role": "user", "content": each}])["prompt"] for each in asked["questions"]
]
said["replies"] = [
    ask("/completion", prompt=each, n_predict=asked["count"], temperature=0, return_tokens=True, n_probs=20)
    for each in asked["prompts"]
]
print("ANSWER" + json.dumps(said))
"""


def stock_answers(model: Any, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens, and logprobs of the first of them."""
    answers: list[tuple[list[int], torch.Tensor]] = []
    for prompt in prompts:
        ids, first = list(prompt), None
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                first = row if first is None else first
                ids.append(int(row.argmax()))
        assert first is not None
        answers.append((ids[len(prompt) :], first))
    return answers


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, folder = sys.argv[1:3]
    options = dict(argument.split("=", 1) for argument in sys.argv[3:])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = make_texts(500)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True
        )
        for each in QUESTIONS
    ]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    stock = stock_answers(AutoModelForCausalLM.from_pretrained(folder), prompts)
    asked = {"texts": texts, "questions": QUESTIONS, "prompts": prompts, "count": NUM_TOKENS}
    for precision in ("float32", "float16", "bfloat16", "q8_0"):
        with tempfile.TemporaryDirectory() as place:
            (file,) = export_run(run, ExportOptions(to=f"{place}/trained.gguf", precision=precision))
            command = [options.get("python", sys.executable), "-c", BY_LLAMA_CPP, str(file)]
            done = subprocess.run(
                command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
            )
            size = file.stat().st_size
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
        said = json.loads(line.removeprefix("ANSWER"))
        same_ids = sum(tokenizer.encode(text) == ids for text, ids in zip(texts, said["ids"], strict=True))
        greedy = [reply["tokens"] for reply in said["replies"]]
        same = sum(a == b for (ids, _), own in zip(stock, greedy, strict=True) for a, b in zip(ids, own))  # noqa: B905
        gap = max(
            abs(each["logprob"] - float(row[each["id"]]))
            for (_, row), reply in zip(stock, said["replies"], strict=True)
            for each in reply["completion_probabilities"][0]["top_logprobs"]
        )
        print(
            f"{precision}: {size / 1e6:.0f} MB; ids equal in {same_ids} of {len(texts)} texts; chat template "
            f"{'equal' if said['prompts'] == chats else 'differs'}; {same} of {sum(map(len, greedy))} greedy tokens "
            f"equal; largest gap of a logprob {gap:.2g}"
        )


if __name__ == "__main__":
    main()
