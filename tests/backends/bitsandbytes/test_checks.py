"""Judges of the backend's checks, on made-up facts: devices, dtypes, what a model holds."""

from types import SimpleNamespace

import pytest

from oot_quant.types import DoctorRequest
from oot_quant_backends.bitsandbytes import checks
from oot_quant_backends.bitsandbytes.formats import FourBit

OURS = "bitsandbytes"


def facts(model=None, deep=False, **accelerator):
    return SimpleNamespace(
        accelerator=accelerator, request=DoctorRequest(model=model, deep=deep), environment={}
    )


def seen(formats=None, tensors=(), backend=OURS, **config):
    checkpoint = SimpleNamespace(
        config=config, tensors=dict.fromkeys(tensors), quantization_config=config.get("section")
    )
    return SimpleNamespace(backend=backend, formats=formats or {}, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("kind", "capability", "status"),
    [
        ("cuda", "5.2", "fail"),
        ("cuda", "6.0", "warn"),
        ("cuda", "7.0", "warn"),
        ("cuda", "7.5", "ok"),
        ("cuda", "9.0", "ok"),
        ("cuda", "12.0", "ok"),
        ("cpu", None, "ok"),
        ("rocm", None, "warn"),
        ("xpu", None, "warn"),
        ("mps", None, "fail"),
    ],
)
def test_each_kind_of_device_is_supported_untested_or_refused(kind, capability, status):
    made = facts(kind=kind, name="Device", capability=capability)
    found = checks.capability(made, None)
    assert found.status.value == status
    assert (found.fix is None) == (status == "ok")
    if kind != "cuda":
        words = found.summary + (found.fix.text if found.fix else "")
        assert kind == "mps" or "cuda" not in words.lower()


@pytest.mark.parametrize(
    ("device", "avx512", "compiler", "status", "words"),
    [
        ({"kind": "cuda", "capability": "9.0"}, False, None, "ok", "of their own"),
        ({"kind": "cuda", "capability": "8.9"}, True, "/bin/cc", "info", "more than 4 tokens"),
        ({"kind": "xpu"}, True, "/bin/cc", "info", "more than 4 tokens"),
        ({"kind": "cpu"}, True, "/bin/cc", "ok", "AVX-512"),
        ({"kind": "cpu"}, True, None, "warn", "no C compiler"),
        ({"kind": "cpu"}, False, "/bin/cc", "info", "without AVX-512"),
    ],
)
def test_how_4_bit_layers_are_multiplied_here(device, avx512, compiler, status, words):
    found = checks.kernel(facts(name="Device", **device), {"avx512": avx512, "compiler": compiler})
    assert found.status.value == status
    assert words in found.summary
    assert (found.fix is not None) == (status == "warn")


def test_the_probe_of_the_kernel_reads_this_machine(monkeypatch):
    monkeypatch.setenv("CC", "a-compiler-that-is-not-there")
    monkeypatch.setenv("PATH", "")
    assert checks.probe_kernel(facts())["compiler"] is None


@pytest.mark.parametrize(
    ("dtype", "capability", "status"),
    [
        ("bfloat16", "8.0", "ok"),
        ("bfloat16", "7.5", "fail"),
        ("torch.float16", "7.5", "ok"),
        ("float32", "7.5", "ok"),
        ("float64", "8.0", "fail"),
        (None, "7.5", "ok"),
    ],
)
def test_the_models_dtype_must_be_computable(dtype, capability, status):
    made = facts("a/b", kind="cuda", name="GPU", capability=capability)
    assert checks.dtype(made, seen(torch_dtype=dtype)).status.value == status


def test_models_of_other_methods_are_not_judged():
    other = seen(backend=None, torch_dtype="float8")
    for judge in (checks.dtype, checks.options, checks.skip_list, checks.experts, checks.fused):
        assert judge(facts(kind="cpu"), other).status.value == "ok"


@pytest.mark.parametrize(
    ("layers", "status"),
    [
        ({"q_proj": ("nf4", 64, False), "k_proj": ("nf4", 64, False)}, "fail"),
        (dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("nf4", 64, False)), "ok"),
        ({}, "ok"),
        (
            {
                "q_proj": ("nf4", 64, False),
                "k_proj": ("nf4", 64, False),
                "v_proj": ("nf4", 128, False),
            },
            "fail",
        ),
        (
            {
                "q_proj": ("nf4", 64, False),
                "k_proj": ("nf4", 64, True),
                "v_proj": ("nf4", 64, False),
            },
            "fail",
        ),
    ],
)
def test_merged_matrices_must_be_stored_alike(layers, status):
    formats = {f"m.{name}": FourBit(*layout) for name, layout in layers.items()}
    tensors = [f"m.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    found = checks.fused(facts(), seen(formats, tensors))
    assert found.status.value == status
    if status == "fail":
        assert set(found.data["modules"]) == {"m.q_proj", "m.k_proj", "m.v_proj"}


@pytest.mark.parametrize(
    ("made", "computes", "device"),
    [
        (facts(kind="cpu"), False, "cpu"),
        (facts(kind="cpu", deep=True), True, "cpu"),
        (facts("a/b", kind="cpu"), True, "cpu"),
        (facts(kind="cuda"), True, "cuda"),
        (facts(kind="rocm"), True, "cuda"),
        (facts(kind="xpu"), True, "xpu"),
    ],
)
def test_the_native_library_is_run_where_it_matters(monkeypatch, made, computes, device):
    monkeypatch.setattr(checks.library, "load_native", lambda: "Native")
    tried = []
    monkeypatch.setattr(checks.library, "try_native", lambda d: tried.append(d) or 0.15)
    found = checks.probe_native(made)
    assert (found["device"], tried) == (device, [device] if computes else [])
    summary = checks.native(made, found).summary
    assert summary.endswith(f"computes on {device}" if computes else "loads")


def test_every_id_is_the_backends_own_and_unique():
    ids = [check.id for check in checks.CHECKS]
    assert all(name.startswith("backend.bitsandbytes.") for name in ids)
    assert len(set(ids)) == len(ids)
