"""``oot-quant doctor``: options, exit codes, one object on stdout, and broken machines."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from oot_quant.doctor import runner
from oot_quant.doctor.report import Report, Result
from oot_quant.types import Fix, Status
from oot_quant_cli.main import cli

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from oot_quant_cli.main import cli
cli({options})
"""


@pytest.fixture
def run(monkeypatch):
    """Run the command on a made-up diagnosis of one result."""

    def make(status, *options):
        fix = Fix("mend it.") if status in {"warn", "fail", "error"} else None
        result = Result("env.torch", "environment", Status(status), "a summary", fix=fix)

        def diagnose(request, only):
            make.request, make.only = request, only
            return Report(request, (result,))

        monkeypatch.setattr(runner, "diagnose", diagnose)
        return CliRunner().invoke(cli, ["doctor", *options])

    return make


@pytest.mark.parametrize(
    ("status", "plain", "strict"),
    [("ok", 0, 0), ("info", 0, 0), ("skip", 0, 0), ("warn", 0, 1), ("fail", 1, 1), ("error", 1, 1)],
)
def test_exit_codes(run, status, plain, strict):
    assert run(status).exit_code == plain
    assert run(status, "--strict").exit_code == strict


def test_json_is_one_object_whatever_libraries_print(run, capsys):
    run("ok")
    make_noise = runner.diagnose

    def diagnose(request, only):
        sys.stdout.write("a library talks\n")
        return make_noise(request, only)

    runner.diagnose = diagnose  # ``run`` puts the real one back
    cli(["doctor", "--json"], standalone_mode=False)
    out, err = capsys.readouterr()
    assert json.loads(out)["checks"][0]["status"] == "ok"
    assert err == "a library talks\n"


def test_what_is_printed_below_python_goes_to_stderr_too():
    code = (
        "import os\nfrom oot_quant_cli.doctor import only_stderr\n"
        "with only_stderr():\n    os.write(1, b'noise'); print('more')\n"
        "os.write(1, b'answer')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"answer"
    assert done.stderr.startswith(b"noise")


def test_options_reach_the_request(run):
    run("ok", "--model", "a/b", "--quantization", "nf4", "--tensor-parallel-size", "4")
    assert (run.request.model, run.request.quantization) == ("a/b", "nf4")
    assert run.request.tensor_parallel_size == 4
    assert not run.request.online
    assert not run.request.deep
    run("ok", "--online", "--deep", "--only", "env.torch", "--only", "plugins")
    assert run.request.online
    assert run.request.deep
    assert run.only == ("env.torch", "plugins")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "env.tensorflow"], "env.accelerator"),
        (["--tensor-parallel-size", "0"], "0"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_2_and_says_what_exists(run, options, words):
    result = run("ok", *options)
    assert result.exit_code == 2
    assert words in result.output


def test_a_group_that_needs_a_model_asks_for_one():
    result = CliRunner().invoke(cli, ["doctor", "--only", "model"])
    assert result.exit_code == 2
    assert "--model" in result.output


def test_verbose_shows_what_passed(run):
    assert "a summary" not in run("ok").stdout
    assert "a summary" in run("ok", "-v").stdout


def test_checks_can_be_listed():
    text = CliRunner().invoke(cli, ["doctor", "--list-checks"]).stdout
    rows = json.loads(CliRunner().invoke(cli, ["doctor", "--list-checks", "--json"]).stdout)
    assert [line.split()[0] for line in text.splitlines()] == [r["id"] for r in rows["checks"]]
    assert "trial.round-trip" in text


def blocked(names, *options):
    """The doctor's JSON on a machine without some modules."""
    code = BLOCKED.format(names=set(names), options=["doctor", "--json", *options])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = {check["id"]: check for check in json.loads(done.stdout)["checks"]}
    assert "error" not in {check["status"] for check in found.values()}
    return done.returncode, found


@pytest.mark.parametrize("also", [[], ["vllm", "bitsandbytes"]])
def test_a_machine_whose_torch_does_not_import_gets_a_diagnosis(also):
    code, found = blocked(["torch", *also])
    assert code == 1
    assert found["env.torch"]["status"] == "fail"
    assert found["backend.bitsandbytes.native"]["status"] == "skip"
    assert found["plugin.load"]["status"] == "ok"


def test_other_checks_run_without_importing_torch():
    code = (
        "import sys\nfrom oot_quant.doctor.runner import diagnose\n"
        "from oot_quant.types import DoctorRequest\n"
        "diagnose(DoctorRequest(), ['env.python', 'env.vllm', 'plugins',\n"
        "    'backend.bitsandbytes.version'])\n"
        "heavy = {'torch', 'vllm', 'bitsandbytes'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
