"""The command line before anything is imported: help, typos, options from a file and into one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sar.__main__ import COMMANDS, main, read_words
from sar.cli import config_file
from sar.train.options import DataOptions, ModelOptions, SampledOptions, TrainOptions

ROOT = Path(__file__).resolve().parent.parent


def parsed(*words: str) -> dict:
    return vars(read_words(words))


def fails(capsys: pytest.CaptureFixture, *words: str) -> list[str]:
    """The lines that a wrong call prints."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


# ---------------------------------------------------------------- help


def help_of(command: str, option: str, capsys: pytest.CaptureFixture) -> str:
    assert main([command, option]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_two_lengths_and_one_style(
    command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, long = (help_of(command, option, capsys) for option in ("--help", "--help-all"))
    assert len(short.splitlines()) < len(long.splitlines()) + 2 and "--debug" not in short
    for one in COMMANDS[command].options:
        told = one.text()
        assert "".join(told.split()) in "".join(long.split()), told
        assert all(f" {flag}" in long for flag in one.flags)
        before, _, default = told.partition("default")
        if default:
            assert before.endswith("; ") or not before, told
            assert default.startswith(": "), told
        if one.flags and one.default not in (None, False, {}, []):
            assert "default: " in told, told


def test_defaults_are_those_of_the_library(capsys: pytest.CaptureFixture) -> None:
    args = parsed("train", "parts.json")
    for options in (ModelOptions(), DataOptions(), TrainOptions()):
        for name, value in vars(options).items():
            if name in args and name not in ("epochs_", "checkpoint_steps"):
                assert args[name] == value, name
    assert main(["train", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert f"default: {','.join(map(str, SampledOptions.fanouts))}" in text
    assert f"default: {SampledOptions.batch_size}" in text


# ---------------------------------------------------------------- typos


def test_all_typos_are_told_at_once(capsys: pytest.CaptureFixture) -> None:
    lines = fails(
        capsys, "train", "--epoch", "3", "p.json", "--model", "sagee", "--lr=-1", "--foo", "7",
        "--method", "mets", "--hiden", "x", "--resume",
    )  # fmt: skip
    assert lines[0] == "sar train: error: 7 problems" and len(lines) == 8
    for text in (
        "  --epoch: unknown option; did you mean --epochs?",
        "  --foo: unknown option",
        "  --hiden: unknown option; did you mean --hidden?",
        "  --hidden: got 'x', expected an integer of 1 or more",
        "  --lr: got '-1', expected a number of more than 0",
    ):
        assert text in lines
    assert any(line.endswith("did you mean sage?") for line in lines)
    assert any(line.endswith("did you mean metis?") for line in lines)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trian"], "did you mean train?"),
        (["train"], "the following arguments are required: INPUT"),
        (["train", "a", "b"], "got more words than are read: b"),
        (["train", "a", "--epochs"], "--epochs: expected one argument"),
        (["train", "a", "--hepl"], "--hepl: unknown option; did you mean --help?"),
        (["train", "a", "--soft-limit", "1GiB"], "got '1GiB', but the option is gone: system"),
        (["train", "a", "--memory-budget", "4Gb"], "got '4Gb', which reads as bits, expected"),
        (["train", "a", "--model", "gat", "--heads", "3"], "expected a divisor of --hidden, which"),
        (["plan", "p", "--bandwidth", "25GB"], "--bandwidth: got '25GB', expected a rate like"),
        (["partition", "a", "--parts", "2"], "the following arguments are required: --out"),
        (["bench", "--ranks", "1", "0"], "--ranks: got '0', expected an integer of 1 or more"),
        (["sample-server", "a", "--trainers", "1", "--address", "x"], "got 'x', expected HOST"),
    ],
)
def test_one_mistake_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture
) -> None:
    (line,) = fails(capsys, *words)
    assert text in line


def test_rules_between_options_are_told_together(capsys: pytest.CaptureFixture) -> None:
    lines = fails(
        capsys, "train", "p.json", "--resume", "--fanouts", "-1,3", "--backend", "nccl",
        "--rounds", "1", "--memory-budget", "1GB",
    )  # fmt: skip
    assert lines[0].endswith("4 problems")
    assert [line.split(":")[0].strip() for line in lines[1:5]] == [
        "--rounds and --memory-budget", "--backend", "--fanouts", "--resume",
    ]  # fmt: skip


def test_a_typo_imports_nothing() -> None:
    code = """
import sys
from sar.__main__ import main
status = main(["train", "parts.json", "--epoch", "3"])
print(status, {"torch", "numpy", "dgl", "numba"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "2 set()\n", done.stderr


# ---------------------------------------------------------------- files of options


def test_a_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "input: parts.json\nepochs: 7\nlr: 1e-3\nbatch-norm: true\nno-progress: true\nmfgs: off\n"
        "sampled: true\nfanouts: [4, -1]\nlayers: 2\nclip-norm:\nmap-features: true\n"
    )
    args = parsed("train", "--config", str(path), "--lr", "0.5", "--no-batch-norm", "--progress")
    for name, value in {
        "input": "parts.json", "epochs": 7, "lr": 0.5, "batch_norm": False, "no_progress": False,
        "mfgs": "off", "fanouts": [4, -1], "clip_norm": None, "map_features": True, "hidden": 256,
    }.items():  # fmt: skip
        assert args[name] == value, name
    assert parsed("train", f"--config={path}", "other.json")["input"] == "other.json"


def test_arguments_of_a_model_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: json:JSONDecoder\nmodel-args: {width: 8, name: 'on', sizes: [1, 2]}\n")
    args = parsed("train", "x", "--config", str(path), "--model-args", "width=[9]")
    assert args["model_args"] == {"width": [9], "name": "on", "sizes": [1, 2]}


@pytest.mark.parametrize(
    "words",
    [
        ["train", "p.json"],
        ["train", "p.json", "--model", "json:JSONDecoder", "--model-args", "a=[1, x]",
         "--sampled", "--fanouts", "5,-1", "--lr", "1e-05", "--memory-budget", "4GiB",
         "--map-features", "/tmp", "--mfgs", "off", "--constant-inputs", "off", "--batch-size=9",
         "--target-type", "paper"],
        ["train", "p.json", "--map-features", "--batch-norm", "--no-progress"],
        ["partition", "synthetic", "--parts", "2", "--out", "x", "--plot", "cut.png"],
        ["evaluate", "p.json", "--checkpoint", "a", "--out", "b", "--logits"],
        ["plan", "ogbn-products", "--hosts", "3", "--activations", "keep", "offload"],
        ["bench", "--bandwidth", "--ranks", "1", "8"],
        ["sample-server", "p.json", "--trainers", "3"],
        ["environment"],
        ["inspect", "p.json", "--model", "gat"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_what_is_saved_gives_the_same_again(words: list[str], tmp_path: Path) -> None:
    options = COMMANDS[words[0]].options
    args, path = read_words(words), tmp_path / "saved.yaml"
    config_file.write(options, args, str(path))
    saved = yaml.safe_load(path.read_text())
    again = parsed(words[0], "--config", str(path))
    told = dict.fromkeys(("config", "typed", "began"))
    assert again | told == vars(args) | told
    config_file.write(options, read_words(words), str(path))
    assert yaml.safe_load(path.read_text()) == saved


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read"),
        ("0", "holds no OPTION: VALUE lines"),
        ("a: [", "is no YAML"),
        ("lr: 1\nepochs: 3\nlr: 2\n", "lr is given 2 times"),
        ("features: [[a]]", "features: got lists or mappings in a list, expected values"),
        ("logger: [{a: 1}]", "logger: got lists or mappings in a list, expected values"),
        ("features: 2020-99-99", "is no YAML: month must be in 1..12"),
        ("epochs: " + "[" * 3000, "is no YAML: maximum recursion depth"),
    ],
)
def test_hostile_files(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    (line,) = fails(capsys, "train", "p.json", "--config", str(path))
    assert line.startswith("sar train: error: ") and told in line


@pytest.mark.parametrize("value", ["2020-99-99", "!!int abc", "[" * 3000])
def test_hostile_arguments_of_a_model(value: str, capsys: pytest.CaptureFixture) -> None:
    words = ["train", "p.json", "--model", "a:B", "--model-args", f"width={value}"]
    assert f"width: {value!r} is no YAML" in "".join(fails(capsys, *words))


def test_all_that_is_wrong_in_a_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("epoch: 3\nhidden: wide\nbatch-norm: maybe\nmethod: [a, b]\nmodel-args: 3\n")
    lines = fails(capsys, "train", "p.json", "--config", str(path), "--foo")
    assert f"  {path}: 'epoch' is no option of sar train; did you mean epochs?" in lines
    assert f"  {path}: hidden: got 'wide', expected an integer of 1 or more" in lines
    assert f"  {path}: batch-norm: got 'maybe', expected true or false" in lines
    assert f"  {path}: model-args: got 3, expected KEY: VALUE lines" in lines
    assert "  --foo: unknown option" in lines and lines[0].endswith("6 problems")


def test_what_cannot_be_saved(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "no" / "run.yaml"
    assert main(["environment", "--save-config", str(path)]) == 2
    assert f"--save-config: cannot write '{path}'" in capsys.readouterr().err
