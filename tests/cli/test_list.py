"""``oot-quant list``: data first, every backend shown, nothing heavy imported."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from oot_quant.manager import BackendManager
from oot_quant_cli import list as listing
from oot_quant_cli.main import cli

GROUP = "oot_quant.backends"
OURS = EntryPoint("bitsandbytes", "oot_quant_backends.bitsandbytes", GROUP)
BROKEN = EntryPoint("broken", "a_module_that_is_not_there", GROUP)


@pytest.fixture
def run(monkeypatch):
    def make(*options, points=(OURS,)):
        monkeypatch.setattr(listing, "backends", lambda: BackendManager(points))
        return CliRunner().invoke(cli, ["list", *options])

    return make


def test_json_tells_who_a_backend_is(run):
    found = json.loads(run("--json").stdout)
    assert found["schema"] == 1
    (entry,) = found["backends"]
    assert (entry["name"], entry["status"], entry["error"]) == ("bitsandbytes", "ok", None)
    assert entry["methods"] == ["bitsandbytes"]
    assert "oot_quant_linear_method" in entry["hooks"]
    assert entry["library"]["minimum"] == "0.50.0"


def test_a_backend_that_does_not_import_is_shown_with_its_reason_and_exit_0(run):
    result = run("--json", points=(BROKEN, OURS))
    entries = {entry["name"]: entry for entry in json.loads(result.stdout)["backends"]}
    assert entries["broken"]["status"] == "failed"
    assert "a_module_that_is_not_there" in entries["broken"]["error"]
    assert entries["bitsandbytes"]["status"] == "ok"
    text = run("--ascii", points=(BROKEN, OURS))
    assert text.exit_code == 0
    assert "XX broken" in text.stdout
    assert "ok bitsandbytes" in text.stdout


def test_hook_selects_backends(run):
    hooked = json.loads(run("--json", "--hook", "oot_quant_moe_method").stdout)
    assert [entry["name"] for entry in hooked["backends"]] == ["bitsandbytes"]
    assert run("--hook", "oot_quant_iterate_weights").stdout.startswith("No backend implements")


def test_an_unknown_hook_is_wrong_usage_and_lists_those_that_exist(run):
    result = run("--hook", "oot_quant_shard")
    assert result.exit_code == 2
    assert "oot_quant_shard_rule" in result.output


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nothing_heavy_is_imported(options):
    code = (
        "import sys\nfrom oot_quant_cli.main import cli\n"
        f"cli(['list', *{options}], standalone_mode=False)\n"
        "heavy = {'torch', 'vllm', 'bitsandbytes', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
