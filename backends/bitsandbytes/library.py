"""Whether the library bitsandbytes is there, new enough, and works on this machine.

The config asks before a model is built, the doctor's checks ask the same functions, so both
say the same. Its native part loads lazily and fails at first use with an attribute error or
a page of advice; ``try_native`` runs something tiny instead and says what is wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from oot_quant.errors import LibraryBroken, LibraryMissing, LibraryTooOld, OotQuantError

from . import LIBRARY

NAME = LIBRARY.distribution
REINSTALL = f'python -m pip install --force-reinstall --no-deps "{NAME}>={LIBRARY.minimum}"'
COLUMNS = 64
TOLERANCE = 0.2
"""Largest error of one restored weight, as a share of the largest weight: half the widest gap
between two values of nf4 is 0.152, so more means wrong numbers."""


def require_library() -> None:
    """Raise unless bitsandbytes is there, new enough and, where that can be tried, works.

    Raises LibraryMissing, LibraryTooOld or LibraryBroken.
    """
    require_version()
    try_library()


def try_library() -> None:
    """Raise LibraryBroken or LibraryMissing unless bitsandbytes works; tried once a process.

    Importing bitsandbytes starts CUDA. A front end that has not done so must not, or vLLM
    can no longer fork its workers: there, nothing is tried. Workers use the device already.
    """
    if not _import_would_start_gpu():
        _try_once()


def require_version() -> str:
    """The installed version. Imports nothing unless there is no metadata.

    Raises LibraryMissing or LibraryTooOld.
    """
    found = installed_version()
    if found is None:
        raise _missing("no distribution of that name")
    try:
        old = Version(found) < Version(LIBRARY.minimum)
    except InvalidVersion:
        return found  # a build that numbers itself; try_native judges it
    if old:
        raise LibraryTooOld(
            f"{NAME} {found} is installed, {LIBRARY.minimum} or newer is needed",
            found=found,
            needed=f"{LIBRARY.minimum} or newer",
            fix=f"upgrade it: {LIBRARY.upgrade_command}",
        )
    return found


def installed_version() -> str | None:
    """The version of bitsandbytes from its metadata, or from the module if it has none."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(NAME), "__version__", None)


def load_native() -> str:
    """Load the native library as bitsandbytes would, and nothing else; returns its kind.

    The rest of bitsandbytes takes seconds to import (it compiles decorators), so a stand-in
    for the package lets the one module in that chooses and loads the library.

    Raises LibraryMissing or LibraryBroken.
    """
    if NAME in sys.modules:
        return _native_kind(_import(f"{NAME}.cextension"))
    try:
        spec = importlib.util.find_spec(NAME)
    except ImportError:
        spec = None
    if spec is None:
        raise _missing("the module cannot be imported")
    stand_in = ModuleType(NAME)
    stand_in.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[NAME] = stand_in
    try:
        return _native_kind(_import(f"{NAME}.cextension"))
    finally:
        for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
            del sys.modules[name]


def try_native(device: str = "cpu") -> float:
    """Quantize and restore one row of weights; returns the largest error of a weight.

    device: as torch names it; anything but ``cpu`` starts that device.

    Raises LibraryMissing if the module is not there, LibraryBroken if it cannot be imported,
    did not find its native library, fails, or gives wrong numbers.
    """
    bnb = _import(NAME)
    _native_kind(_import(f"{NAME}.cextension"))
    torch = importlib.import_module("torch")
    weight = torch.linspace(-1, 1, COLUMNS, device=device).reshape(1, COLUMNS)
    try:
        codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        restored = bnb.functional.dequantize_4bit(codes, state)
        error = float((restored - weight).abs().max())
    except Exception as raised:
        raise _broken(_first_words(raised), device) from raised
    if not error <= TOLERANCE:
        raise _broken(f"a restored weight is off by {error:.3g}, {TOLERANCE} is allowed", device)
    return error


@cache
def _try_once() -> None:
    torch = importlib.import_module("torch")
    try_native("cuda" if torch.cuda.is_initialized() else "cpu")


def _import_would_start_gpu() -> bool:
    if NAME in sys.modules:
        return False
    torch = importlib.import_module("torch")
    if torch.version.cuda or torch.version.hip:
        return not torch.cuda.is_initialized()
    has_xpu = bool(getattr(torch.version, "xpu", None))
    return has_xpu and not torch.xpu.is_initialized()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == NAME:
            raise _missing("the module cannot be imported") from error
        raise _broken(_first_words(error)) from error
    except Exception as error:
        raise _broken(_first_words(error)) from error


def _native_kind(cextension: Any) -> str:
    """The class of the native handle; the one that stands for a failed load is refused."""
    kind = type(cextension.lib).__name__
    if kind == "ErrorHandlerMockBNBNativeLibrary":
        raise _broken(getattr(cextension.lib, "error_msg", "") or "no native library was loaded")
    return kind


def _missing(found: str) -> OotQuantError:
    return LibraryMissing(
        f"{NAME} is not installed, {LIBRARY.minimum} or newer is needed",
        found=found,
        needed=f"{LIBRARY.minimum} or newer",
        fix=f'install it: python -m pip install "{NAME}>={LIBRARY.minimum}"',
    )


def _broken(reason: str, device: str = "") -> OotQuantError:
    where = f" on {device}" if device not in {"", "cpu"} else ""
    return LibraryBroken(
        f"{NAME} {installed_version()} is installed, but its native library does not work "
        f"with {_torch_build()}{where}",
        found=reason,
        needed=f"a native library of {NAME} that loads and computes here",
        fix=f"install it again (python -m {NAME} shows how it looks for the library): {REINSTALL}",
    )


def _torch_build() -> str:
    try:
        torch = importlib.import_module("torch")
    except Exception:  # noqa: BLE001 - only names the build in another error's text
        return "this torch"
    build = f" for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    build = f" for ROCm {torch.version.hip}" if torch.version.hip else build
    return f"torch {torch.__version__}{build}"


def _first_words(error: BaseException) -> str:
    """The first line of an error that says something; bitsandbytes starts with blank ones."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), '')}".rstrip(": ")
