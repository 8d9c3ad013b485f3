"""How the built-in policy (`viva.tiny`) is made: the text that it learns from, and its training."""
