"""Ready-made training runs; each is a module run as ``python -m viva.recipes.<recipe>.train key=value ...``."""
