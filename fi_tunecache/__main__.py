"""``python -m fi_tunecache``."""

from .cli import run

run()
