"""Whole systems of self-play, one file each."""
