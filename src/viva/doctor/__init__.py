"""Examination of an engine, before money is spent: whether it does what the API promises."""
