"""The engine's errors: one sentence says what is wrong and where, another one the remedy."""

from __future__ import annotations

from pathlib import Path


class DraftscopeError(Exception):
    """Base class of errors that are shown to the user.

    message: one sentence, what is wrong and where. remedy: one sentence, what to do about it.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.message = message
        self.remedy = remedy


class ModelFileError(DraftscopeError):
    """A GGUF file that cannot be read. `place` names the key, tensor or byte offset; empty for the
    whole file."""

    def __init__(self, path: Path | str, place: str, what: str, remedy: str) -> None:
        super().__init__(": ".join(filter(None, (Path(path).name, place, what))) + ".", remedy)
        self.path = Path(path)
        self.place = place


class UnsupportedModelError(DraftscopeError):
    """A well-formed file whose model this engine cannot run."""


class LookupCacheError(DraftscopeError):
    """A lookup cache file that cannot be read or does not fit the model."""


class GrammarFileError(DraftscopeError):
    """A grammar or JSON schema that cannot be read or used. `place` names the line or the part."""

    def __init__(self, path: Path | str, place: str, what: str, remedy: str) -> None:
        super().__init__(f"{Path(path).name}: {place}: {what}.", remedy)
        self.path = Path(path)
        self.place = place


class VocabularyMismatchError(DraftscopeError):
    """A draft model whose vocabulary differs from the target's; the message names the rule."""


class ChatTemplateError(DraftscopeError):
    """A chat template that is broken, refuses its input, or asks for too much."""


class OptionError(DraftscopeError):
    """Options that contradict each other or the loaded model (usage error)."""


class KernelPackageError(OptionError):
    """A package, file or function that cannot be tested for conformance."""


class ContextFullError(DraftscopeError):
    """No cell is left for the next token."""


class RollbackRefusedError(DraftscopeError):
    """A rollback that the memory cannot perform exactly."""


class PeerLibraryError(DraftscopeError):
    """A llama.cpp library that cannot be used, or whose process has ended."""


class BisectError(DraftscopeError):
    """A bisection without a good and a bad end."""


class StateBlobError(DraftscopeError):
    """A saved state of llama.cpp in another format, or of another model."""


class NonFiniteError(DraftscopeError):
    """A model whose logits are not finite, so that no token can be chosen."""


class OutOfMemoryError(DraftscopeError):
    """The machine or the device is out of memory."""


class DeviceLostError(DraftscopeError):
    """A GPU that failed in a run and takes no further work from this process."""


class TraceFileError(DraftscopeError):
    """An exported trace or session file that cannot be read."""


def check_most(
    what: str, n: int, most: int, of: str, remedy: str = "Split it into several files."
) -> None:
    """Raises TraceFileError for a file, or part of it, that exceeds a limit of what is read."""
    if n > most:
        raise TraceFileError(f"{what} has more than {most:,} {of}.", remedy)


class ServerError(DraftscopeError):
    """A server that cannot be reached, refuses a request or answers with something else."""


class ApiKeyError(ServerError):
    """A server that needs an API key, or another one."""


class ServerModelError(ServerError):
    """A server with several models, or none, where the model is not named."""


class ServerTimeoutError(ServerError):
    """A server that was reached and then exceeded the user's time limit."""


class Cancelled(Exception):  # noqa: N818 - an outcome, not an error
    """Raised within long work after the user cancelled it; never shown as an error."""
