"""Has the `luce` command and `python -m luce`."""

import os
import signal
import sys


def main() -> None:
    """Runs the command line. What goes wrong while it is still being imported is one line as well."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: _quit())  # An import in its middle has nothing to clear away.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # luce multiplies little with numpy; one thread starts sooner.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # There is one text at a time: threads only take memory.
    try:
        from luce.cli.commands import main as run
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except MemoryError:
        _fail("out of memory", 1)
    except (ImportError, OSError) as error:
        _fail(f"luce cannot start: {' '.join(str(error).split())[:500]}", 1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    finally:  # All is told by now, and closed: another Ctrl-C just ends the process.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def _quit() -> None:
    os.write(2, b"Error: interrupted\n")
    os._exit(130)


def _fail(message: str, code: int) -> None:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
