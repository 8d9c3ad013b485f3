"""Does an engine do what the API promises? Asked before money is spent, by `viva doctor` and by recipes."""
