"""`multiplane`: one command for everything.

What is imported takes a moment. Ctrl-C in it ends the process as it ends any other, without a word.
"""

from __future__ import annotations

import signal


def run() -> None:
    """Run the command line; the console script's entry point."""
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from controlplane.cli import errors
    from controlplane.cli.app import app

    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with errors.explained():
        app(prog_name="multiplane")


if __name__ == "__main__":
    run()
