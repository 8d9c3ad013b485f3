"""Agents discuss a prompt, judge their solutions in a tournament, and learn from win minus loss."""

__all__: list[str] = []
