"""Token ids of a GGUF file by Viva's tokenizer and by llama.cpp, on 10,000 texts of many scripts.

    python benchmarks/gguf_ids.py model.gguf [python=/path/to/an/environment/with/xllamacpp/bin/python]

Texts are drawn from blocks of Unicode and from words, code, numbers and white space of many languages, seed 0. Prints
how many differ, and the first of them.
"""

import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

from viva.engine.gguf import gguf_folder

BLOCKS = (
    *(
        (0x20, 0x7E),
        (0xA0, 0x17F),
        (0x370, 0x3FF),
        (0x400, 0x4FF),
        (0x530, 0x58F),
        (0x590, 0x5FF),
        (0x600, 0x6FF),
    ),
    *((0x900, 0x97F), (0x980, 0x9FF), (0xE00, 0xE7F), (0x10A0, 0x10FF), (0x1200, 0x137F), (0x2000, 0x206F)),
    *(
        (0x2070, 0x209F),
        (0x2150, 0x218F),
        (0x2200, 0x22FF),
        (0x2500, 0x257F),
        (0x3040, 0x30FF),
        (0x4E00, 0x9FFF),
    ),
    *((0xAC00, 0xD7A3), (0x1D400, 0x1D7FF), (0x1F300, 0x1F64F)),
)
TEXT = (
    "the of apple don't it's we'll I'M THEY'RE naïve Größe café 12 345.67 1,000 x=3; def foo(self): return "
    "{'a': [1, 2]} ... !? -- != <= a.b/c?d=e #tag @me 50% $5 привет мир γειά שלום مرحبا नमस्ते สวัสดี 你好 "
    "世界 こんにちは 안녕하세요 🙂 👩‍👩‍👧 é ½ x² _under_ CamelCase 0x1F 3.14e-10 'S 'LL"
)
WORDS = TEXT.split(" ")
SPACES = ("  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u00a0", "\u3000", "\u200b")
BY_LLAMA_CPP = """
import json, sys, urllib.request
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel, options.cpuparams.n_threads = sys.argv[1], 1024, 1, 1
server = xllamacpp.Server(options)
def ids(text):
    body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
    address = server.listening_address + "/tokenize"
    return json.load(urllib.request.urlopen(urllib.request.Request(address, body)))["tokens"]
print("ANSWER" + json.dumps([ids(text) for text in json.load(sys.stdin)]))
"""


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    pools = [
        [
            chr(code)
            for code in range(first, last + 1)
            if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")
        ]
        for first, last in BLOCKS
    ]
    texts: dict[str, None] = {}
    while len(texts) < count:
        kind, length = rng.random(), rng.randint(1, 50)
        if kind < 0.4:
            text = "".join(rng.choice(rng.choice(pools)) for _ in range(length))
        elif kind < 0.6:
            pool = rng.choice(pools)
            text = "".join(rng.choice([rng.choice(pool)] * 4 + [" "]) for _ in range(length))
        else:
            text = rng.choice(["", " "]).join(
                rng.choice([*WORDS, *SPACES]) for _ in range(rng.randint(1, 15))
            )
        texts[text] = None
    return list(texts)


def main() -> None:
    from transformers import AutoTokenizer

    file = Path(sys.argv[1])
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    texts = make_texts(10_000)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(file))
    command = [options.get("python", sys.executable), "-c", BY_LLAMA_CPP, str(file)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.partition("ANSWER")[2])
    ours = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    different = [text for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]
    print(
        f"{file.name}: {len(texts)} texts, {sum(map(len, ours))} ids; {len(different)} texts have other ids"
    )
    for text in different[:5]:
        print(repr(text))


if __name__ == "__main__":
    main()
