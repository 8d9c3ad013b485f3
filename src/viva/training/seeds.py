"""Random streams as pure functions of where they are used.

Nothing of a run's randomness has to be saved: every seed is derived from the run's seed and the place that asks
for it (step, group, seat, call, attempt), so a resumed run draws what the uninterrupted one would have drawn.
"""

import hashlib

__all__ = ["derive_seed"]

_BITS = 31  # fits the signed 32-bit field that samplers take


def derive_seed(*parts: int | str) -> int:
    """A seed in ``[0, 2**31)`` that depends on every part and on nothing else.

    Parts are encoded with their type and length, so ``("a", "b")`` and ``("ab",)`` or ``1`` and ``"1"`` give
    unrelated seeds. The same on every machine and in every Python version.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return int.from_bytes(digest.digest(), "big") >> (64 - _BITS)
