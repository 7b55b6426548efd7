"""Has failures as exceptions: one class for each status of luce.h, each with its `code`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Error(Exception):
    """Any failure that luce reports. str() gives one line, and `code` is the
    luce_status that it stands for. `concerns` names what a remedy would have to give ("nextn_head",
    "chat_template", ...), so that the caller can say how to ask for it."""

    code = 10

    def __init__(self, message: str = "", concerns: str | None = None):
        super().__init__(message)
        self.concerns = concerns


class ArgumentError(Error):
    """An argument is out of range; nothing was done."""

    code = 1


class FileError(Error):
    """A file cannot be read or is malformed."""

    code = 2


class UnsupportedError(Error):
    """The file is well-formed, but luce cannot do what was asked with it."""

    code = 3


class OutOfMemory(Error):
    """There is not enough memory; the message gives needed and free."""

    code = 4


class ContextFull(Error):
    """The request does not fit into the context."""

    code = 5


class NumericError(Error):
    """Logits were not finite; the sequence is now failed."""

    code = 6


class StateError(Error):
    """The sequence is failed, the handle is closed, or the call is out of order."""

    code = 7


class Cancelled(Error):
    """A progress callback or Engine.cancel asked to stop."""

    code = 8


class DeviceError(Error):
    """The device or its driver failed."""

    code = 9


class Busy(Error):
    """As many requests wait as may. After `retry_after` seconds one of them should have ended."""

    def __init__(self, message: str = "", concerns: str | None = None, retry_after: int = 0):
        super().__init__(message, concerns)
        self.retry_after = retry_after


class TemplateFailed(Error):
    """A chat template refuses these messages, or fails at them; it may take others."""


class OutputError(Error):
    """What was to be printed cannot be written; nothing that follows could be."""


class PipeClosed(OutputError):
    """Nobody reads stdout any more, as behind `| head`."""


class InternalError(Error):
    """This is a defect of luce."""

    code = 10


BY_CODE: dict[int, type[Error]] = {
    kind.code: kind
    for kind in (
        ArgumentError,
        FileError,
        UnsupportedError,
        OutOfMemory,
        ContextFull,
        NumericError,
        StateError,
        Cancelled,
        DeviceError,
        InternalError,
    )
}


@contextmanager
def about(path: Path) -> Iterator[None]:
    """An error that is raised within names this file."""
    try:
        yield
    except Error as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}", error.concerns) from error
