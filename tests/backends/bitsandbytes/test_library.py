"""Missing, too old, broken, or fine: what is said about the library bitsandbytes."""

import importlib.abc
import shlex
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from oot_quant.errors import LibraryBroken, LibraryMissing, LibraryTooOld
from oot_quant_backends.bitsandbytes import LIBRARY, library

MOCK = type("ErrorHandlerMockBNBNativeLibrary", (), {"error_msg": "libcudart.so.13: not found"})
NATIVE = type("CudaBNBNativeLibrary", (), {})


@pytest.fixture(autouse=True)
def tried_anew():
    library._try_once.cache_clear()
    yield
    library._try_once.cache_clear()


@pytest.fixture
def version(monkeypatch):
    """Make metadata tell a version; None for not installed."""

    def make(found):
        def answer(name):
            if found is None or name != "bitsandbytes":
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(library.metadata, "version", answer)

    return make


@pytest.fixture
def stub(monkeypatch):
    """A bitsandbytes made here, with a native handle and arithmetic of its own."""
    pytest.importorskip("torch")

    def make(native=NATIVE, restore=lambda codes, _: codes):
        package = ModuleType("bitsandbytes")
        package.functional = SimpleNamespace(
            quantize_4bit=lambda weight, **_: (weight, None), dequantize_4bit=restore
        )
        extension = ModuleType("bitsandbytes.cextension")
        extension.lib = native()
        monkeypatch.setitem(sys.modules, "bitsandbytes", package)
        monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", extension)
        return package

    return make


def command_of(error):
    return shlex.split(error.fix.split(": ")[-1])


def test_missing_names_the_version_that_is_needed_and_how_to_get_it(version, monkeypatch):
    version(None)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    with pytest.raises(LibraryMissing, match=r"bitsandbytes is not installed, 0\.50\.0") as raised:
        library.require_library()
    wanted = f"bitsandbytes>={LIBRARY.minimum}"
    assert command_of(raised.value) == ["python", "-m", "pip", "install", wanted]


@pytest.mark.parametrize("found", ["0.45.0", "0.49.9", "0.50.0.dev1"])
def test_too_old_is_not_called_missing(version, found):
    version(found)
    with pytest.raises(LibraryTooOld) as raised:
        library.require_library()
    assert f"bitsandbytes {found} is installed, 0.50.0 or newer is needed" in str(raised.value)
    assert command_of(raised.value)[:5] == ["python", "-m", "pip", "install", "--upgrade"]


@pytest.mark.parametrize("found", ["0.50.0", "0.51.2+cu130", "a build of my own"])
def test_new_enough_is_told_by_its_version(version, found):
    version(found)
    assert library.require_version() == found


def test_a_module_without_metadata_tells_its_version_itself(version, stub):
    version(None)
    stub().__version__ = "0.47.0"
    with pytest.raises(LibraryTooOld, match=r"0\.47\.0"):
        library.require_version()


def test_a_native_library_that_was_not_found_is_told_with_the_reason(version, stub):
    version("0.50.2")
    stub(native=MOCK)
    with pytest.raises(LibraryBroken, match="does not work with torch") as raised:
        library.require_library()
    assert raised.value.found == "libcudart.so.13: not found"
    assert "--force-reinstall" in command_of(raised.value)


def test_a_native_library_that_fails_when_used_is_broken(version, stub):
    def fails(*_):
        raise RuntimeError("\n\nno kernel image is available\nmore advice")

    version("0.50.2")
    stub(restore=fails)
    with pytest.raises(LibraryBroken) as raised:
        library.require_library()
    assert raised.value.found == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize(
    "restore", [lambda codes, _: codes + 0.5, lambda codes, _: codes * float("nan")]
)
def test_wrong_numbers_are_broken_too(version, stub, restore):
    version("0.50.2")
    stub(restore=restore)
    with pytest.raises(LibraryBroken, match="a restored weight is off by"):
        library.require_library()


class Blocker(importlib.abc.MetaPathFinder):
    """Refuses to import a module, or what it imports."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name == "bitsandbytes" or name.startswith("bitsandbytes."):
            raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ModuleNotFoundError("No module named 'bitsandbytes'", name="bitsandbytes"),
            LibraryMissing,
        ),
        (ModuleNotFoundError("No module named 'scipy'", name="scipy"), LibraryBroken),
        (OSError("libc is too old"), LibraryBroken),
    ],
)
def test_metadata_without_a_module_that_imports(version, monkeypatch, error, expected):
    version("0.50.2")
    for name in [n for n in sys.modules if n.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker(error), *sys.meta_path])
    with pytest.raises(expected):
        library.try_native()


def test_a_front_end_that_has_not_started_the_gpu_leaves_it_alone(version, monkeypatch):
    version("0.50.2")
    for name in [n for n in sys.modules if n.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda="13.0", hip=None),
        cuda=SimpleNamespace(is_initialized=lambda: False),
    )
    monkeypatch.setattr(library.importlib, "import_module", lambda _: torch)
    monkeypatch.setattr(library, "try_native", lambda _: pytest.fail("the GPU was started"))
    library.require_library()
    torch.cuda.is_initialized = lambda: True
    tried = []
    monkeypatch.setattr(library, "try_native", tried.append)
    library.require_library()
    library.require_library()
    assert tried == ["cuda"]


@pytest.fixture
def real():
    return pytest.importorskip("bitsandbytes")


def test_the_real_library_computes(real):
    assert 0.1 < library.try_native("cpu") <= library.TOLERANCE


def test_loading_only_the_native_part_leaves_no_trace(real, monkeypatch):
    loaded = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "bitsandbytes"}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    assert library.load_native().endswith("NativeLibrary")
    assert not [n for n in sys.modules if n.split(".")[0] == "bitsandbytes"]
