"""The one entry point. No subcommand opens the window; subcommands never import Qt.

Exit status: 0 done, 1 failed, 2 wrong usage; ended by a signal 128 and its number, that is 130
for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
"""

from __future__ import annotations

import sys

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
try:
    import atexit
    import os
    import re
    import traceback
    from collections.abc import Sequence
    from contextlib import suppress
    from importlib import import_module
    from importlib.abc import Loader, MetaPathFinder
    from importlib.machinery import ModuleSpec, PathFinder
    from pathlib import Path
    from types import ModuleType

    from app.cli import output
    from app.cli.option_lines import check_outputs, output_file
    from app.cli.output import Interrupted, interrupt, on_signal
    from app.cli.parser import module_of, parser_of, split_command
    from engine.errors import DraftscopeError, OptionError
    from engine.long_work import collections_wait
except KeyboardInterrupt:
    sys.exit(EXIT_INTERRUPTED)
except ValueError as error:  # a variable of the environment, such as DRAFTSCOPE_CPU
    output.tell(f"error: {error}.")
    sys.exit(EXIT_USAGE)

_REMEDY = "Check the path, its rights and the room on the disk."


def program() -> int:
    """`main` as a process of its own: nothing is freed at the end of a command, which would take
    a tenth of a second once torch is there."""
    leaving: list[int] = []
    atexit.register(_leave, leaving)  # before any other, so that it is called after all of them
    status = EXIT_INTERRUPTED
    with suppress(KeyboardInterrupt):  # before `main` heeds it, or after
        status = main()
    if "PySide6" not in sys.modules:  # Qt writes settings when its objects go
        leaving.append(status)
    return status


def _leave(status: list[int]) -> None:
    if status:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
                stream.flush()
        os._exit(status[0])


@output.guarded_streams()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; errors that a user can act on become one line on stderr."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as leaving:  # argparse: help, version, wrong usage
        return int(leaving.code or 0)
    except DraftscopeError as error:
        output.tell(f"error: {error}")
        return EXIT_USAGE if isinstance(error, OptionError) else EXIT_FAILED
    except KeyboardInterrupt as ending:
        output.tell("interrupted")
        return ending.status if isinstance(ending, Interrupted) else EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has gone: nothing more to say
        return EXIT_FAILED
    except MemoryError:
        output.tell(
            "error: There is not enough memory for this. Close other programs, or ask for less."
        )
        return EXIT_FAILED
    except OSError as error:
        named = f" ({str(error.filename)[:80]})" if error.filename else ""
        output.tell(f"error: The system refuses: {error.strerror or error}{named}. {_REMEDY}")
        return EXIT_FAILED
    except Exception as error:  # a fault of ours; its words may be a file's
        if str(error).startswith("DRAFTSCOPE_"):  # or a variable of the environment
            output.tell(f"error: {error}.")
            return EXIT_USAGE
        traceback.print_exc()
        return EXIT_FAILED
    finally:
        output.end()


class _Postponed(ModuleType):
    """A module that is read when something in it is asked for, or one of the functions called that
    torch has as its own, too."""

    def __getattr__(self, name: str) -> object:
        if name in _TAKEN and sys.modules["torch"].__spec__._initializing:  # type: ignore[union-attr]
            return lambda *args, **kwargs: getattr(self, name)(*args, **kwargs)
        if name.startswith("__") and name != "__all__":  # who looks at all modules asks for these
            raise AttributeError(name)
        later = self.__spec__.loader if self.__spec__ else None
        assert isinstance(later, _Later)
        self.__class__ = ModuleType  # type: ignore[assignment]
        later.loader.exec_module(self)
        return getattr(self, name)


class _Later(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Postponed


_UNUSED = re.compile(
    r"torch\.(_higher_order_ops|_strobelight|ao|compiler|distributed\._meta_registrations|distributions"
    r"|export|func|fx\.passes|hub|masked|nested"
    r"|nn\.(intrinsic|qat|quantizable|quantized)|optim|profiler|quantization|sparse|testing"
    r"|utils\.data)|torchgen\.model|unittest(\.mock)?|yaml"
)
"""What torch and gguf import for others: a third of torch's modules. They are there once they are
used."""

_TAKEN = "cond", "tqdm", "vmap", "while_loop"
"""Functions that torch takes from such modules for itself, which find them when called."""


class _ShorterTorch(MetaPathFinder, Loader):
    """Leaves a third of `import torch` out: the registration of what tells shapes of results to
    torch.compile and torch.export, which nothing here uses, and the modules of _UNUSED.

    And threads that wait for each other in GNU's OpenMP, which is loaded with torch, sleep after
    half a millisecond instead of 15: next to other work they take its time, and a start that
    is 3.5 seconds of it took 5.9. Programs that are started later do not inherit it."""

    _spins = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None, _: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch" and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
            os.environ["GOMP_SPINCOUNT"] = self._spins = "10000"
        if _UNUSED.fullmatch(name):
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Later(spec.loader)
            return spec
        return ModuleSpec(name, self) if name == "torch._meta_registrations" else None

    def exec_module(self, module: ModuleType) -> None:
        if self._spins:
            os.environ.pop("GOMP_SPINCOUNT", None)
        # it would import torch._prims.rng_prims, of which torch.Generator needs the metaclass
        set_metaclass = sys.modules["torch._C"]._set_generator_metaclass
        set_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


_shorter_torch = _ShorterTorch()


def shorten_torch() -> None:
    """Make the import of torch shorter; no effect once it is there."""
    if "torch" not in sys.modules and _shorter_torch not in sys.meta_path:
        sys.meta_path.insert(0, _shorter_torch)


def _dispatch(argv: list[str]) -> int:
    shorten_torch()
    name, words = split_command(argv)
    with collections_wait():
        module = import_module(module_of(name))
    parser = parser_of(name)
    # intermixed: options may stand between the positionals, some of which may be left out; it
    # cannot be interrupted half-way, where it fails to put its parser back
    came: list[int] = []
    with on_signal(came.append):
        args = parser.parse_intermixed_args(words)
    if came:
        interrupt(came[0])
    args.words = argv
    check_outputs(parser, args)
    if not name:  # the window has its own way to end
        return int(module.run(args))
    # a command that has more to do than to print goes on where nothing can be printed
    wanted = ("trace", "out", *(a.dest for a in parser._actions if a.type is output_file))
    has_files = any(isinstance(getattr(args, name, None), Path) for name in wanted)
    stdout = output.LastingStream.in_place_of("stdout") if has_files else None
    with on_signal(interrupt):
        status = int(module.run(args))
        output.flush()
    if stdout is not None and stdout.error is not None:
        raise stdout.error
    return status


if __name__ == "__main__":
    sys.exit(program())
