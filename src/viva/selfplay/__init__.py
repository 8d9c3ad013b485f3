"""Whole systems of self-play, one file each."""

__all__: list[str] = []
