"""Compile all kernels of float32 for this processor, unless code of theirs is kept: the first run then need not.

python -m viva.engine.kernels
"""

import torch

from viva.engine.kernels import compile_all
from viva.threads import prepare_threads

if __name__ == "__main__":
    torch.set_num_threads(prepare_threads())  # one thread has code of its own
    compile_all()
