"""Ready-made training runs: ``viva train RECIPE key=value ...`` runs one."""
