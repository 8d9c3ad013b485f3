"""Words for counts, in everything that people read."""

__all__ = ["counted"]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, which stands in the plural for everything but 1.

    Args:
        number: The count.
        noun: In the singular.
        plural: Where it is not the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
