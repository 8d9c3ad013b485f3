"""Critique self-play (CoNL): propose, rank blindly and criticise, revise or defend, final verdict."""

__all__: list[str] = []
