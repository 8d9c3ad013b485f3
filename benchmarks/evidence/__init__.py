"""The bench of rewards: what conversation really adds."""
