"""Comparisons become scores."""

__all__: list[str] = []
