"""Kernel files of an engine's package, imported without the rest of the engine."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import torch

from engine.errors import KernelPackageError
from engine.plain_text import size_text

ARCHIVES = (".whl", ".tar.gz")
_MOST_UNPACKED = 256 * 2**20


class Stub:
    """Replaces what a kernel file uses of its engine: false, zero, callable, a base class."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        only = args[0] if len(args) == 1 and not kwargs else None
        # as a decorator it returns its argument
        return only if callable(only) and not isinstance(only, Stub) else Stub(f"{self.__name__}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def __or__(self, other: object) -> type:
        return object

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __index__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __lt__(self, other: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__


class NoPlatform:
    """Answers no to every question about the platform."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: False


class PlanBuilder:
    """A base class that plans batches, as far as an engine's builder needs it."""

    def __class_getitem__(cls, of: object) -> type:
        return cls

    def __init__(self, spec: object, layers: object, config: object, device: object) -> None:
        self.kv_cache_spec, self.vllm_config, self.device = spec, config, device

    def _init_reorder_batch_threshold(self, *_: object) -> None:
        """Do not reorder batches."""


class _StubModule(ModuleType):
    __getattr__ = Stub.__getattr__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of one package: those under `kept` from their files, the others as stubs."""

    def __init__(self, root: Path, table: Any, values: dict[str, Any]) -> None:
        self.root, self.table, self.values = root, table, values
        self.top = table.package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self.top:
            return None
        place = self.root.joinpath(*name.split("."))
        if any(name == kept or name.startswith(f"{kept}.") for kept in self.table.kept):
            file = place.with_suffix(".py")
            if name in self.table.packages:
                file = place / "__init__.py"
            if file.is_file():
                return importlib.util.spec_from_file_location(name, file)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in self.values.items():
            holder, _, attribute = name.rpartition(".")
            if holder == module.__name__:
                setattr(module, attribute, value)


class _Missing(_Finder):
    """Stubs for other packages that a kernel file imports and that are not installed."""

    def __init__(self, top: str) -> None:
        self.top = top

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        importer = sys._getframe(1)
        while importer.f_globals.get("__name__", "").startswith("importlib") and importer.f_back:
            importer = importer.f_back
        if importer.f_globals.get("__name__", "").split(".")[0] != self.top:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class Package:
    """A package whose kernel modules can be imported. `version` is empty if not recorded."""

    def __init__(self, name: str, root: Path, version: str) -> None:
        self.name, self.root, self.version = name, root, version
        self._imported: dict[str, ModuleType] = {}
        self._traced_ranges: Sequence[str] = ()
        self._values: dict[str, Any] = {}

    def check_holds(self, modules: Sequence[str]) -> None:
        """Raises KernelPackageError if other modules have files, but none of these."""
        places = [self.root.joinpath(*name.split(".")) for name in modules]
        others = (one for one in (self.root / self.name).rglob("*.py") if one.stem != "__init__")
        has_any = any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)
        if not has_any and any(others):
            raise KernelPackageError(
                f"{self.name} {self.version} has no file of kernels, such as {modules[0]}.",
                "Give the package with the kernels (flash-linear-attention's are in fla-core), "
                "in a version that `draftscope help conform` lists.",
            )

    def module(self, name: str) -> ModuleType:
        """Import one of the kept modules.

        Raises KernelPackageError if the package has no such file.
        """
        if name not in self._imported:
            if not self.root.joinpath(*name.split(".")).with_suffix(".py").is_file():
                raise KernelPackageError(
                    f"{self.name} {self.version} has no {name}: its kernels have moved.",
                    "Give a version that `draftscope help conform` lists, or an adapter of your "
                    "own (MODULE:FUNCTION).",
                )
            self._imported[name] = importlib.import_module(name)
            for value in (value for value in self._values if value.rpartition(".")[0] == name):
                setattr(self._imported[name], value.rpartition(".")[2], self._values[value])
            if interpreted():
                own = [n for n in sys.modules if n.split(".")[0] == self.name]
                fit_interpreter(sys.modules[n] for n in own)
                for traced in set(self._traced_ranges) & set(own):
                    vars(sys.modules[traced])["range"] = _traced_range
        return self._imported[name]

    @contextmanager
    def imports(self, table: Any) -> Iterator[None]:
        """Make the modules kept by an adapter's table (adapters.Engine) importable."""
        values = self._values = table.values
        self._traced_ranges = table.traced_ranges
        if table.language:
            import triton
            import triton.language as tl

            known = {"triton": triton, "tl": tl, "HAS_TRITON": True}
            values = values | {f"{table.language}.{name}": value for name, value in known.items()}
        finders = [_Finder(self.root, table, values), _Missing(self.name)]
        sys.meta_path.insert(0, finders[0])
        sys.meta_path.append(finders[1])
        try:
            yield
        finally:
            for finder in finders:
                sys.meta_path.remove(finder)


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fit_interpreter(modules: Iterable[ModuleType]) -> None:
    """Let modules look up functions of triton.language at each call.

    Triton's interpreter replaces these functions while a kernel runs; a module's own binding (`exp
    = tl.exp`) would still be the compiler's.
    """
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner, Heuristics

    from engine.conform.interpreter_with_triton import mend

    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda index: nullcontext()  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        torch.cuda.device = lambda index: nullcontext()  # type: ignore[assignment, misc, return-value]
    mend()
    originals = {id(value): key for key, value in vars(tl).items() if callable(value)}
    for module in modules:
        for attribute, value in list(vars(module).items()):
            while isinstance(value, (Autotuner, Heuristics)):
                if isinstance(value, Autotuner):  # no autotuning here
                    value.configs = value.configs[:1]
                value = value.fn
            if id(value) in originals and hasattr(value, "__triton_builtin__"):
                setattr(module, attribute, partial(_called, tl, originals[id(value)]))


def _traced_range(*ends: Any) -> Iterator[Any]:
    import triton.language as tl

    return (tl.full((), i, tl.int32) for i in range(*map(int, ends)))


def _called(language: ModuleType, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(language, name)(*args, **kwargs)


def open_package(target: str, name: str) -> Package:
    """The package from a wheel, a source archive, a folder that holds it, or as installed.

    Raises KernelPackageError with what to give instead if it is in none of these.
    """
    path = Path(target)
    if path.name.endswith(ARCHIVES) and path.is_file():
        version = re.search(r"-(\d[^-]*?)(-|\.tar\.gz$)", path.name)
        return Package(name, _unpacked(path, name), version[1] if version else "")
    if path.is_dir():
        root = path if (path / name).is_dir() else path.parent
        if not (root / name).is_dir():
            raise KernelPackageError(
                f"{path} has no package {name}.", f"Give the folder that {name}/ is in."
            )
        return Package(name, root, _version(root, name))
    spec = importlib.util.find_spec(name) if target == name else None
    if spec is None or not spec.submodule_search_locations:
        raise KernelPackageError(
            f"{target} is neither a wheel, a source archive, a folder, nor an installed package.",
            f"`pip download --no-deps {name}` fetches a wheel; give its path.",
        )
    root = Path(next(iter(spec.submodule_search_locations))).parent
    return Package(name, root, _version(root, name))


def _version(root: Path, name: str) -> str:
    for info in sorted(root.glob("*.dist-info")):
        words = info.name.removesuffix(".dist-info").split("-")
        if words[0].replace("_", "").lower() in (
            *(name.replace("_", "") + end for end in ("", "core", "python")),
            "flashlinearattention",
        ):
            return words[-1]
    init = root / name / "__init__.py"
    text = init.read_text(errors="replace") if init.is_file() else ""
    written = re.search(r"""^__version__ *= *["']([\w.+-]{1,40})["']""", text, re.MULTILINE)
    return written[1] if written else ""


def _unpacked(archive: Path, name: str) -> Path:
    """Python files of a wheel or source archive in a folder that is deleted with this process."""
    folder = tempfile.TemporaryDirectory(prefix="draftscope-conform-")
    _KEPT_FOLDERS.append(folder)
    root, total = Path(folder.name), 0
    try:
        for file, size, read in _files(archive):
            parts = PurePosixPath(file).parts
            if parts[:1] != (name,) or not file.endswith(".py"):
                continue
            if ".." in parts:
                raise KernelPackageError(
                    f"{archive}: an entry is outside of the folder: {file}.", "Download it again."
                )
            total += size
            if total > _MOST_UNPACKED:
                raise KernelPackageError(
                    f"{archive}: its Python files take more than {size_text(_MOST_UNPACKED)}.",
                    "Unpack it, and give the folder.",
                )
            place = root.joinpath(*parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(read())
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise KernelPackageError(
            f"{archive} is not a readable wheel or source archive: {error}.", "Download it again."
        ) from error
    if not total:
        raise KernelPackageError(
            f"{archive} has no package {name}.", "Give the archive of the engine itself."
        )
    return root


def _files(archive: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Name, size and content of each file of a wheel, or in the only folder of a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                yield info.filename, info.file_size, partial(wheel.read, info)
    else:
        with tarfile.open(archive) as source:
            for member in source:
                content = source.extractfile(member)
                if content is not None and not member.issym():
                    yield member.name.partition("/")[2], member.size, content.read


_KEPT_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
