"""Comparisons become scores."""
