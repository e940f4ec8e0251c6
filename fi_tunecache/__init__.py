"""Tuned FlashInfer tactics from a registry, resolved for this GPU and software, with reasons."""

__version__ = "0.1.0"
