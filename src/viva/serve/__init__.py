"""``viva serve``: the local engine over HTTP for agents, scripts and other processes."""
