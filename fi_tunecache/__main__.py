"""``python -m fi_tunecache``, and the console script."""

import sys

__all__ = ["run"]


def run() -> None:
    """Run the command line; an interrupt while it is being imported is one line too."""
    try:
        from .cli import run as run_cli
    except KeyboardInterrupt:
        sys.stderr.write("fi-tunecache: interrupted; nothing was half-written\n")
        sys.exit(130)
    run_cli()


if __name__ == "__main__":
    run()
