"""No home folder, no secrets."""

from dataclasses import replace
from pathlib import Path

import pytest

from oot_quant.doctor.facts import _environment
from oot_quant.doctor.privacy import masked, without_home
from oot_quant.doctor.runner import diagnose
from oot_quant.types import DoctorRequest


@pytest.fixture
def home(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_abc", "set"),
        ("VLLM_API_KEY", "abc", "set"),
        ("HUGGING_FACE_HUB_TOKEN", "abc", "set"),
        ("VLLM_AUTH_PASSWORD", "abc", "set"),
        ("HF_ENDPOINT", "https://me:secret@mirror/x", "https://mirror/x"),
        ("VLLM_PLUGINS", "oot_quant", "oot_quant"),
        ("VLLM_USE_MONKEY", "1", "1"),
    ],
)
def test_secrets_are_shown_as_set(name, value, shown):
    assert masked(name, value) == shown


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/m", "~/m"),
        ("at /home/ann", "at ~"),
        ("/home/anna/m", "/home/anna/m"),
        ({"a": ["/home/ann/m", 3, None]}, {"a": ["~/m", 3, None]}),
        (("/home/ann/a:/home/ann/b",), ["~/a:~/b"]),
    ],
)
def test_the_home_folder_is_a_tilde(text, shown):
    assert without_home(text) == shown


@pytest.mark.usefixtures("home")
def test_a_report_names_no_home_folder_anywhere(manager_of, facts, look):
    manager, request = manager_of(), DoctorRequest("/home/ann/models/none")
    variables = {"LD_LIBRARY_PATH": "/home/ann/lib"}
    made = facts(manager, request, environment=variables)
    seen = look(backend__bitsandbytes__native=OSError("/home/ann/lib.so is missing"))
    report = diagnose(request, manager=manager, facts=made, look=seen)
    assert "/home/ann" not in repr(report)
    assert report.verdict.text == "~/models/none will not load here."
    assert "~/lib" in repr(report)


def test_only_variables_that_matter_are_gathered(monkeypatch):
    monkeypatch.setenv("MY_OWN_THING", "x")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("VLLM_PLUGINS", "oot_quant")
    found = _environment()
    assert "MY_OWN_THING" not in found
    assert (found["HF_TOKEN"], found["VLLM_PLUGINS"]) == ("set", "oot_quant")


def test_the_answer_names_the_model_that_was_asked_for(manager_of, facts, look):
    manager, request = manager_of(), DoctorRequest("./none")
    report = diagnose(request, manager=manager, facts=facts(manager, request), look=look())
    assert replace(report.verdict, text="").model == "./none"
