"""The command line as a person meets it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
import torch

import efla
from efla import cli
from efla.cli import doctor as doctor_module


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["eval", "m", "--length", "--limit", "5"], "--limit would do nothing with --length"),
        (["eval", "m", "--rows", "3", "--pairs", "2"], "--rows, --pairs would do nothing without --length"),
        (["train", "--estimate-device", "a100"], "--estimate-device, --estimate-count or --utilisation would do nothing"),
        (["train", "--recipe", "tiny", "--recipe=efla-tiny"], "--recipe was given 2 times"),
        (["generate", "m", "--prompt", "a", "--temperature", "0", "--top-k", "3"], "--top-k would do nothing"),
    ],
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    assert option in capsys.readouterr().err


def test_help_lists_every_command_with_an_example(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in cli.COMMANDS:
        (place,) = (i for i, line in enumerate(lines) if line.startswith(f"  {name} "))
        assert f"{lines[place + 1].strip()} ".startswith(f"efla {name} ")
    assert max(map(len, lines)) <= 80


def test_the_shell_completes_commands_and_options(tmp_path, capsys):
    assert cli.main(["--completion", "bash"]) == 0
    script = tmp_path / "efla.bash"
    script.write_text(capsys.readouterr().out)
    for words, completed in (("ge", "generate"), ("train --reci", "--recipe"), ("info --js", "--json")):
        count = len(words.split())
        code = f"source {script}; COMP_WORDS=(efla {words}); COMP_CWORD={count}; _tyro_efla; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        assert completed in done.stdout.split()
    assert cli.main(["--completion", "tcsh"]) == 1
    assert "known shells: bash, zsh, fish" in capsys.readouterr().err


@pytest.fixture
def halved_rule(tmp_path):
    """A file that registers the rule "halved", and a model folder that uses it."""
    from efla import rules

    file = tmp_path / "my_rules.py"
    file.write_text(
        "import efla\n"
        "class Halved(type(efla.rules.get('delta'))):\n"
        "    name = 'halved'\n"
        "    def coefficients(self, beta, lam, log_gate=None):\n"
        "        return super().coefficients(beta / 2, lam, log_gate)\n"
        "efla.rules.register(Halved())\n"
    )
    yield file
    rules._RULES.pop("halved", None)
    sys.modules.pop("my_rules", None)


@pytest.mark.parametrize("how", ["file", "module"])
def test_a_rule_of_ones_own_reaches_the_commands(how, halved_rule, monkeypatch, capsys):
    monkeypatch.chdir(halved_rule.parent)
    own = ["--import", str(halved_rule)] if how == "file" else ["--import=my_rules"]
    train = ["train", "--set", "rule=halved", "hidden_size=32", "--steps", "1", "--length", "16", "--rows", "1"]
    assert cli.main([*train, "--dry-run"]) == 1
    assert "unknown rule 'halved'" in capsys.readouterr().err
    assert cli.main([*train, *own]) == 0
    assert cli.main(["info", "runs/train-tiny", *own]) == 0
    assert "halved x 2" in capsys.readouterr().out
    assert cli.main(["generate", "runs/train-tiny", "--prompt", "a", "--max-new-tokens", "2", *own]) == 0
    assert cli.main(["info", "efla-tiny", "--import", "no_such_module"]) == 1
    assert "--import needs a .py file or the name of a module" in capsys.readouterr().err


@pytest.mark.parametrize("words", [*cli.COMMANDS, "reproduce lm", "reproduce paper", "train --recipe efla-340m-paper"])
def test_every_command_explains_itself(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*words.split(), "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: efla {words.partition(' --')[0]} ")
    assert shown.count("\nExample: efla ") == 1
    for artefact in ("None", "STR", "(default: )", "(default: False)", "(optional)"):
        assert artefact not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_an_option_of_several_commands_has_one_name_and_one_text(capsys):
    """What --threads and --seed of a command are about differs, how they are called and what they default to does not."""
    texts = {}
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        help = " ".join(capsys.readouterr().out.split())
        texts[name] = dict(re.findall(r" (--[a-z-]+)(?: [A-Z{]\S*)? ((?:(?! --[a-z]).)+)", help))
    for option, commands in {"--json": "bench eval info train", "--quiet": "eval prepare reproduce train"}.items():
        assert {name for name in texts if option in texts[name]} == {*commands.split()}
    assert all("CPU threads" in texts[name]["--threads"] for name in texts if "--threads" in texts[name])
    assert all("auto, cpu or cuda" in texts[name]["--device"] for name in texts if "--device" in texts[name])
    assert not {"--out", "--output-dir", "--num-threads", "--cpu"} & {
        option for known in texts.values() for option in known
    }


def test_an_error_names_each_choice_once(capsys):
    assert cli.main(["train", "--dry-run", "--set", 'mixers=["linear", "softmx"]']) == 1
    shown = capsys.readouterr().err
    assert "unknown mixer 'softmx'; did you mean 'softmax'?" in shown
    assert shown.count("linear") == 1


def test_an_unknown_command_offers_the_nearest(capsys):
    assert cli.main(["docter"]) == 2
    assert "did you mean 'doctor'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["info", "no-such-thing"], ["prepare", "--output", "x", "--tokenizer", "bytes"]])
def test_an_error_is_one_message_that_names_the_option_for_more(arguments, monkeypatch, capsys):
    monkeypatch.delenv("EFLA_TRACEBACK", raising=False)
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"efla {arguments[0]}: ")
    assert "run with --traceback for the full trace" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--traceback", "info", "no-such-thing"], ""),
        (["info", "--traceback", "no-such-thing"], "0"),
        (["info", "no-such-thing", "--traceback"], ""),
        (["info", "no-such-thing"], "1"),
    ],
)
def test_the_full_trace_is_shown_when_asked_for(arguments, environment, monkeypatch, capsys):
    monkeypatch.setenv("EFLA_TRACEBACK", environment)
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert "FileNotFoundError: 'no-such-thing' is neither" in shown


def test_module_and_command_are_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["efla", "--version"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("efla", run_name="__main__")  # python -m efla
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.strip() == f"efla {efla.__version__}"


def test_doctor_finds_every_backend_right_and_fits_a_screen(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "right, " in shown
    assert all(name in shown for name in efla.backends())
    assert f"{doctor_module._PROMISE}: yes" in " ".join(shown.split())
    assert len(shown.splitlines()) <= 25


def test_doctor_names_what_changes_the_bits_of_a_sequence(monkeypatch, capsys):
    attend = efla.linear_attention

    def wrong(**given):
        o, state = attend(**given)
        k = given["k"]
        is_wrong = given["cu_seqlens"] is not None and k.dtype == torch.float16 and given["rule"] == "delta"
        return (o + (k - k.detach()).sum() if is_wrong else o), state

    monkeypatch.setattr("efla.testing.linear_attention", wrong)
    monkeypatch.setattr(doctor_module, "find_problem", lambda name: None)
    assert cli.main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{doctor_module._PROMISE}: NO: packing changes grad_k of rule 'delta' on native in torch.float16" in shown


def test_doctor_reports_a_backend_that_is_wrong(monkeypatch, capsys):
    from efla.scans.backends import chunked

    true_forward = chunked.forward

    def slightly_wrong(*arguments, **options):
        result = true_forward(*arguments, **options)
        return result._replace(final_state=result.final_state * 1.001)

    monkeypatch.setattr(chunked.BACKEND, "forward", slightly_wrong)
    assert "final_state: error" in doctor_module.find_problem("chunked")
    assert cli.main(["doctor"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_doctor_fails_for_a_problem_without_a_text(monkeypatch, capsys):
    monkeypatch.setattr(doctor_module, "find_problem", lambda name: "")
    monkeypatch.setattr(doctor_module, "_batch_variance", lambda: None)
    assert cli.main(["doctor"]) == 1
    assert "WRONG" in capsys.readouterr().out
