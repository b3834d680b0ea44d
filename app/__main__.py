"""The entry point. Without a subcommand it opens the window; subcommands never import Qt.

Exit status: 0 done, 1 failed, 2 wrong usage; after a signal 128 plus its number: 130 for Ctrl-C,
143 for SIGTERM, 129 for SIGHUP.
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
except ValueError as error:  # an environment variable, such as DRAFTSCOPE_CPU
    output.tell(f"error: {error}.")
    sys.exit(EXIT_USAGE)

_REMEDY = "Check the path, its rights and the room on the disk."


def program() -> int:
    """`main` as a process of its own: nothing is freed at the end of a command, which would take a
    tenth of a second with torch loaded."""
    leaving: list[int] = []
    atexit.register(_leave, leaving)  # registered first, so that it is called last
    status = EXIT_INTERRUPTED
    with suppress(KeyboardInterrupt):  # before `main` handles it, or after
        status = main()
    if "PySide6" not in sys.modules:  # Qt writes settings when its objects are destroyed
        leaving.append(status)
    return status


def _leave(status: list[int]) -> None:
    if status:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or missing
                stream.flush()
        os._exit(status[0])


@output.guarded_streams()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; errors that a user can act on are printed as one line on stderr."""
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
    except BrokenPipeError:  # the reader of a pipe has gone: nothing to report
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
    except Exception as error:  # a bug of ours; its words may come from a file
        if str(error).startswith("DRAFTSCOPE_"):  # or an environment variable
            output.tell(f"error: {error}.")
            return EXIT_USAGE
        if failure := _of_device(error):
            output.tell(f"error: {failure}")
        else:
            traceback.print_exc()
        return EXIT_FAILED
    finally:
        output.end()


def _of_device(error: Exception) -> DraftscopeError | None:
    """What an error of torch or Triton outside a run says of the device, if anything."""
    if "torch" not in sys.modules or not isinstance(error, RuntimeError):
        return None
    torch, device = import_module("torch"), import_module("engine.machine.device")
    here = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_initialized()
        else device.CPU
    )
    found: DraftscopeError | None = device.meaning_of(error, here, "The passes")
    return found


class _Postponed(ModuleType):
    """A module that is imported when an attribute of it is read, or one of the functions that torch
    binds itself is called."""

    def __getattr__(self, name: str) -> object:
        if name in _TAKEN and sys.modules["torch"].__spec__._initializing:  # type: ignore[union-attr]
            return lambda *args, **kwargs: getattr(self, name)(*args, **kwargs)
        if name.startswith("__") and name != "__all__":  # code that walks all modules reads these
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
"""Modules that torch and gguf import for others: a third of torch's. They are imported on first
use."""

_TAKEN = "cond", "tqdm", "vmap", "while_loop"
"""Functions that torch binds from such modules; they import them when called."""


class _ShorterTorch(MetaPathFinder, Loader):
    """Skips a third of `import torch`: the registration of shape functions for torch.compile and
    torch.export, which are not used here, and the modules of _UNUSED.

    It also lets threads that wait for each other in GNU's OpenMP, which torch loads, sleep after
    half a millisecond instead of 15: next to other work they waste its time, and a start of 3.5
    seconds took 5.9. Child processes do not inherit that.
    """

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
        # it would import torch._prims.rng_prims, which needs torch.Generator's metaclass
        set_metaclass = sys.modules["torch._C"]._set_generator_metaclass
        set_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


_shorter_torch = _ShorterTorch()


def shorten_torch() -> None:
    """Shorten the import of torch; no effect once it is imported."""
    if "torch" not in sys.modules and _shorter_torch not in sys.meta_path:
        sys.meta_path.insert(0, _shorter_torch)


def _dispatch(argv: list[str]) -> int:
    shorten_torch()
    name, words = split_command(argv)
    with collections_wait():
        module = import_module(module_of(name))
    parser = parser_of(name)
    # intermixed: options may stand between positionals, some of which are optional. It must not be
    # interrupted, because it would not restore its parser
    came: list[int] = []
    with on_signal(came.append):
        args = parser.parse_intermixed_args(words)
    if came:
        interrupt(came[0])
    args.words = argv
    check_outputs(parser, args)
    if not name:  # the window ends in its own way
        return int(module.run(args))
    # a command that also writes files continues if nothing can be printed
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
