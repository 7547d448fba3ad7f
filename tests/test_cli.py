"""The command line as a user meets it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import flowgrpo
from flowgrpo import cli
from flowgrpo.generate import read_manifest
from flowgrpo.tuned import load_adapter, locate
from tests.tiny_pipelines import add_lora, build

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny pipeline."""
    folder = tmp_path_factory.mktemp("model") / "sd3"
    build("sd3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA that fits it."""
    from flowgrpo.export import export_lora

    pipeline = build("sd3")
    add_lora(pipeline.transformer)
    folder = tmp_path_factory.mktemp("run") / "adapter"
    export_lora(pipeline, {"transformer": pipeline.transformer}, folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a red cube", "kind": "color"}, {"prompt": "a ball", "kind": "shape"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path: Path, model: Path, prompts: Path) -> Path:
    path = tmp_path / "run.yaml"
    settings = {
        "name": "tiny",
        "output_dir": str(tmp_path / "runs"),
        "iterations": 1,
        "group_size": 2,
        "prompts_per_iteration": 2,
        "model": {"pipeline": str(model), "lora": {"rank": 2}, "call": {"max_sequence_length": 32}},
        "prompts": {"train": str(prompts), "heldout": str(prompts)},
        "sampler": {"num_steps": 3, "height": 16, "width": 24, "window": {"use": "frozen", "size": 1}},
        "rewards": [{"name": "colour", "use": "reward_models.colourfulness:Colourfulness"}],
        "optimizer": {"updates_per_iteration": 1},
        "logging": {"trackers": [], "samples_every": 1},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def flowgrpo_says(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result


def error_lines(*arguments: Any) -> list[str]:
    result = flowgrpo_says(*arguments, code=2)
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines), lines
    return [line.removeprefix("error: ") for line in lines]


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_are_instant(option: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = child("-m", "flowgrpo.cli", option)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert ("train" if option == "--help" else flowgrpo.__version__) in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    heavy = ["torch", "diffusers", "transformers", "matplotlib", "flowgrpo.build"]
    code = f"import flowgrpo.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    assert child("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["train", "generate", "evaluate"])
def test_each_command_explains_itself(command: str) -> None:
    assert "--debug" in flowgrpo_says(command, "--help").output


def test_an_error_in_a_shell_is_one_line_without_a_traceback(config: Path) -> None:
    result = child("-m", "flowgrpo.cli", "train", str(config), "sampler.num_step=4")
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line == "error: sampler.num_step: unknown setting in section 'sampler' (did you mean 'num_steps'?)"


def test_every_fault_of_a_config_has_its_line(config: Path) -> None:
    lines = error_lines("train", config, "learning_rate=1", "iterations=none", "optimizer.lr=-1")
    assert len(lines) == 3
    assert {line.split(":")[0] for line in lines} == {"learning_rate", "iterations", "optimizer.lr"}


def test_debug_shows_the_traceback(config: Path) -> None:
    result = CliRunner().invoke(cli.app, ["train", str(config), "nonsense", "--debug"])
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    (line,) = error_lines("train", tmp_path / "no.yaml")
    assert "no.yaml' does not exist" in line


def test_a_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("name: [a\niterations: 3\n")
    lines = error_lines("train", tmp_path / "broken.yaml")
    assert "not valid YAML" in lines[0]


@pytest.mark.parametrize("command", ["train", "generate"])
def test_an_empty_prompt_file_is_named(command: str, config: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    if command == "train":
        lines = error_lines("train", config, f"prompts.train={tmp_path}/empty.txt")
    else:
        lines = error_lines("generate", model, "--prompts", tmp_path / "empty.txt", "--output", tmp_path / "out")
    assert len(lines) == 1
    assert "empty.txt: a prompt file needs at least one prompt" in lines[0]


@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_missing_model_folder_is_named(command: str, config: Path, prompts: Path, tmp_path: Path) -> None:
    if command == "train":
        lines = error_lines("train", config, f"model.pipeline={tmp_path}/gone")
    else:
        lines = error_lines("generate", tmp_path / "gone", "--prompts", prompts, "--output", tmp_path / "out")
    assert len(lines) == 1
    assert "gone does not exist" in lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--guidance-scale", "1", "--negative-prompt", "x"], "negative_prompt cannot take effect"),
        (["--call", "max_sequence_length"], "--call must look like key=value"),
        (["--call", "nonsense=1"], "model.call.nonsense: must be a further argument"),
        (["--height", "18"], "nearest: 16 or 20"),
        (["--num-frames", "5"], "takes no such argument"),
        (["--adapter", "nowhere"], "a trained model is a run folder"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(
    options: list[str], message: str, model: Path, prompts: Path, tmp_path: Path
) -> None:
    lines = error_lines("generate", model, "--prompts", prompts, "--output", tmp_path / "out", *options)
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


GENERATE = ["--num-steps", 1, "--height", 16, "--width", 24, "--call", "max_sequence_length=32"]


def test_generate_writes_pictures_and_goes_on_where_it_stopped(model: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = ["generate", model, "--prompts", prompts, "--output", tmp_path / "out", *GENERATE]
    flowgrpo_says(*arguments)
    first = read_manifest(tmp_path / "out")
    flowgrpo_says(*arguments, "--samples-per-prompt", 2)
    lines = read_manifest(tmp_path / "out")
    assert (len(first), len(lines), lines[:2]) == (2, 4, first)
    assert lines[0]["call"] == {"max_sequence_length": 32}
    (line,) = error_lines(*arguments, "--seed", 1)
    assert "was made with seed=0" in line


def test_generate_uses_an_adapter(model: Path, adapter: Path, prompts: Path, tmp_path: Path) -> None:
    for name, options in {"base": [], "tuned": ["--adapter", adapter], "run": ["--adapter", adapter.parent]}.items():
        flowgrpo_says("generate", model, "--prompts", prompts, "--output", tmp_path / name, *GENERATE, *options)
    pictures = {name: (tmp_path / name / "000000_a-red-cube_000.png").read_bytes() for name in ("base", "tuned", "run")}
    assert pictures["base"] != pictures["tuned"] == pictures["run"]


@pytest.mark.parametrize("fault", ["another layer", "another prefix"])
def test_an_adapter_whose_weights_find_no_layer_is_refused(fault: str, adapter: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = adapter.glob("*.safetensors")
    weights = load_file(file)
    key = next(iter(weights))
    other = key.replace("transformer_blocks.0", "blocks.9") if fault == "another layer" else f"base.{key}"
    weights[other] = weights.pop(key)
    save_file(weights, tmp_path / "changed.safetensors")
    with pytest.raises(ValueError, match=r"changed\.safetensors"):
        load_adapter(build("sd3"), tmp_path / "changed.safetensors")


def test_an_adapter_lands_whole(adapter: Path) -> None:
    pipeline = build("sd3")
    load_adapter(pipeline, adapter)
    assert any(parameter.abs().max() > 0 for name, parameter in pipeline.transformer.named_parameters() if "lora_B" in name)


def test_what_is_no_trained_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which has none of these"):
        locate(tmp_path)


def test_evaluate_compares_base_and_tuned(config: Path, adapter: Path, tmp_path: Path) -> None:
    output = tmp_path / "sub" / "evaluation.json"
    result = flowgrpo_says("evaluate", config, "evaluation.num_steps=2", "--tuned", adapter, "--output", output)
    assert "colour (gold)" in result.output
    content = json.loads(output.read_text())
    assert content["gold"]["rise"] == pytest.approx(content["gold"]["tuned"] - content["gold"]["base"])
    assert set(content["by_kind"]) == {"color", "shape"}
    assert [s["prompt"] for s in content["samples"]] == ["a red cube", "a ball"]
    assert content["samples"][0]["base"] != content["samples"][0]["tuned"]


def test_a_model_does_not_rise_over_itself(config: Path, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "evaluation.json"
    flowgrpo_says("evaluate", config, "--tuned", model, "--output", output)
    gold = json.loads(output.read_text())["gold"]
    assert (gold["rise"], gold["rise_low"], gold["rise_high"]) == (0, 0, 0)


def test_evaluate_needs_held_out_prompts_and_a_trained_model(config: Path, model: Path) -> None:
    (line,) = error_lines("evaluate", config)
    assert "train first" in line
    (line,) = error_lines("evaluate", config, "prompts.heldout=null", "--tuned", model)
    assert "prompts.heldout must name a prompt file" in line


def test_train_evaluate_and_generate_follow_on_each_other(config: Path, model: Path, prompts: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    flowgrpo_says("train", config)
    run = tmp_path / "runs" / "tiny"
    summary = json.loads((run / "summary.json").read_text())
    assert {"base", "tuned", "rise", "rise_low", "rise_high", "num_prompts", "num_captions"} < summary["gold"].keys()
    (line,) = error_lines("train", config)
    assert "--overwrite" in line
    flowgrpo_says("evaluate", config)
    again = json.loads((run / "evaluation.json").read_text())
    assert again["gold"]["tuned"] == pytest.approx(summary["gold"]["tuned"], abs=1e-5)
    flowgrpo_says("generate", model, "--prompts", prompts, "--output", tmp_path / "out", "--adapter", run, *GENERATE)
    assert len(read_manifest(tmp_path / "out")) == 2
