"""Protocols of conversations: turns, what each agent sees, and the reading of replies."""
