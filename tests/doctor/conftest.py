"""Made-up machines for the doctor: distributions, backends, models and what probes see."""

import json
import sys
from importlib.metadata import distributions

import pytest

from oot_quant.doctor import inventory
from oot_quant.manager import BackendManager
from oot_quant.types import DoctorRequest, Facts

WIDTHS = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}
IN_TREE = ("oot-quant", "0.1.0", {"bitsandbytes": "oot_quant_backends.bitsandbytes"})
H100 = {
    "kind": "cuda",
    "name": "NVIDIA H100",
    "capability": "9.0",
    "free_bytes": 79 * 1024**3,
    "count": 2,
}
SEEN = {
    "env.torch": {"version": "2.13.0", "error": "", "cuda": "13.0", "hip": None},
    "env.vllm": {"version": "0.32.0", "distribution": "vllm", "error": ""},
    "env.accelerator": H100,
    "backend.bitsandbytes.version": "0.50.2",
    "backend.bitsandbytes.native": {"kind": "Cuda", "device": "cuda", "error": 0.15},
    "backend.bitsandbytes.kernel": {"avx512": True, "compiler": "/usr/bin/cc"},
    "backend.bitsandbytes.trial": {"device": "cuda", "error": 0.15},
}
"""What the probes of a healthy machine see, by check."""


@pytest.fixture
def manager_of(tmp_path, monkeypatch):
    """Make a manager from distributions: name, version and entry points of our group."""

    def make(*wanted):
        site = tmp_path / "site"
        for name, version, points in wanted or (IN_TREE,):
            folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
            lines = [f"{key} = {value}" for key, value in points.items()]
            text = "\n".join(["[oot_quant.backends]", *lines, ""])
            (folder / "entry_points.txt").write_text(text)
        found = sorted(distributions(path=[str(site)]), key=lambda dist: dist.metadata["Name"])
        manager = BackendManager([point for dist in found for point in dist.entry_points])
        monkeypatch.setattr(inventory, "backends", lambda: manager)
        monkeypatch.setattr(inventory, "_registry", lambda: '"LlamaForCausalLM": ...')
        return manager

    return make


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make a module importable for the length of a test."""
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def make(name, source):
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules" / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return make


@pytest.fixture
def facts():
    """Make the facts of a healthy machine; keywords replace some of them."""

    def make(manager, request=None, **changes):
        fields = {
            "request": request or DoctorRequest(),
            "python": "3.11.7",
            "versions": {"torch": "2.13.0", "vllm": "0.32.0", "bitsandbytes": "0.50.2"},
            "torch": {"version": "2.13.0"},
            "vllm": {"version": "0.32.0"},
            "accelerator": {},
            "environment": {},
            "backends": manager.records,
            "plugins": {"oot_quant": ("oot_quant.vllm_plugin:register", "oot-quant 0.1.0")},
        }
        return Facts(**{**fields, **changes})

    return make


@pytest.fixture
def look():
    """Make a stand-in for probes: ``seen`` by check, an exception is raised; models are read."""

    def make(**seen):
        answers = {**SEEN, **{name.replace("__", "."): value for name, value in seen.items()}}

        def looked(check, facts):
            if check.id not in answers:
                return check.probe(facts)
            if isinstance(answers[check.id], Exception):
                raise answers[check.id]
            return answers[check.id]

        return looked

    return make


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Write a model of zeros, as name -> (dtype, shape) or bytes; gives its relative path."""
    monkeypatch.chdir(tmp_path)

    def make(tensors, name="tiny", **config):
        header, data = {}, b""
        for key, value in tensors.items():
            dtype, shape = ("U8", (len(value),)) if isinstance(value, bytes) else value
            size = WIDTHS[dtype]
            for length in shape:
                size *= length
            raw = value if isinstance(value, bytes) else bytes(size)
            offsets = [len(data), len(data) + size]
            header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            data += raw
        folder = tmp_path / name
        folder.mkdir()
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + data
        (folder / "model.safetensors").write_bytes(content)
        base = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(base | config))
        return name

    return make


def nf4(module_name, rows, columns, block=64):
    """The tensors of one nf4 module."""
    state = {"quant_type": "nf4", "blocksize": block, "shape": [rows, columns]}
    weight = f"{module_name}.weight"
    return {
        weight: ("U8", (rows * columns // 2, 1)),
        f"{weight}.absmax": ("F32", (-(-rows * columns // block),)),
        f"{weight}.quant_map": ("F32", (16,)),
        f"{weight}.quant_state.bitsandbytes__nf4": json.dumps(state).encode(),
    }


@pytest.fixture(name="nf4")
def nf4_tensors():
    return nf4
