"""Viva: train language models by letting them argue, judge one another and learn from better versions of themselves."""

__all__ = ["__version__"]

__version__ = "0.1.0"
