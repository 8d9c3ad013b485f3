"""Measuring a policy: direct answers, conversations, and what two checkpoints differ in."""
