"""The main job as a user runs it: folder, summary, pictures, export, stop and resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import StableDiffusion3Pipeline

from flowgrpo.config import parse_config
from flowgrpo.metrics import read
from flowgrpo.run_folder import check_folder, open_folder
from flowgrpo.train import choose_pictures, train
from tests.toys import PROMPTS, raw_config, without_times

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


def with_heldout(folder, name, **changes):
    raw = raw_config(folder, name=name, iterations=2, **changes)
    path = folder / "heldout.jsonl"
    rows = [{"prompt": text, "kind": f"kind{i % 2}"} for i, text in enumerate(PROMPTS)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    raw["prompts"]["heldout"] = str(path)
    raw["evaluation"] = {"gold": "bright", "every": 1, "watch_prompts": 2, "batch_size": 3}
    raw["logging"] = {"trackers": ["tensorboard"], "samples_every": 1}
    return raw


def drawn(pipeline):
    call = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16, "max_sequence_length": 8}
    return pipeline("a red cube", generator=torch.Generator().manual_seed(0), output_type="pt", **call).images


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_leaves_a_whole_folder_whose_export_plain_diffusers_loads_in_a_fresh_process(folder, kind):
    raw = with_heldout(folder, kind)
    raw["model"]["train"] = kind
    if kind == "full":
        del raw["model"]["lora"]
    config = parse_config(raw)
    assert train(config) == 0
    run = config.folder
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "summary.json", "before_after.png", "curves.png"):
        assert (run / name).stat().st_size > 0
    assert {p.name for p in (run / "samples").iterdir()} == {"it000000", "it000001"}
    assert next(run.glob("tensorboard/events*"))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["gold"].keys() >= {"base", "tuned", "rise_low", "rise_high", "num_prompts"}
    assert summary["gold"]["num_prompts"] == 4
    assert set(summary["rewards"]) == {"red", "bright"}
    assert set(summary["by_kind"]) == {"kind0", "kind1"}
    assert summary["seconds"] > 0
    assert all(Path(path).exists() for path in summary["paths"].values())
    assert "eval/bright/mean" in read(run / "metrics.jsonl")[0]
    script = f"""
import sys, torch
from diffusers import StableDiffusion3Pipeline
pipe = StableDiffusion3Pipeline.from_pretrained({str(folder / "pipeline") if kind == "lora" else str(run / "pipeline")!r})
{f"pipe.load_lora_weights({str(run / 'adapter')!r})" if kind == "lora" else ""}
from tests.test_train import drawn
torch.save(drawn(pipe), {str(folder / (kind + ".pt"))!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=ENVIRONMENT, cwd=ROOT, capture_output=True)
    fresh = torch.load(folder / f"{kind}.pt", weights_only=True)
    base = drawn(StableDiffusion3Pipeline.from_pretrained(folder / "pipeline"))
    assert (fresh - base).abs().max() > 1e-4
    torch.testing.assert_close(fresh, trained_pictures(config), rtol=0, atol=1e-5)


def trained_pictures(config):
    """Pictures of the policy as the last checkpoint has it."""
    from flowgrpo.build import build
    from flowgrpo.checkpoint import latest
    from flowgrpo.metrics import Metrics
    from flowgrpo.trainer import Trainer

    trainer = Trainer(build(config), Metrics(config.folder / "unused.jsonl"))
    trainer.resume(latest(config.folder / "checkpoints"))
    with torch.no_grad():
        return drawn(trainer.parts.policy.pipeline)


def started(path, *arguments):
    command = [sys.executable, "-m", "flowgrpo.cli", "train", str(path), *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_saves_says_how_to_go_on_and_the_rest_is_the_same_run(folder, number):
    path = folder / "stopped.yaml"
    name = f"stopped-{number.name}"
    path.write_text(yaml.safe_dump(raw_config(folder, name=name, iterations=8)))
    process = started(path)
    metrics = folder / "runs" / name / "metrics.jsonl"
    deadline = time.time() + 120
    while (not metrics.exists() or len(metrics.read_text().splitlines()) < 2) and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert "--resume" in output
    assert len(read(metrics)) < 8, "the run was over before the signal came"
    output, _ = (again := started(path, "--resume")).communicate(timeout=240)
    assert again.returncode == 0, output
    straight = parse_config(raw_config(folder, name=f"straight-{number.name}", iterations=8))
    assert train(straight) == 0
    assert list(map(without_times, read(metrics))) == list(map(without_times, read(straight.folder / "metrics.jsonl")))


def test_a_folder_that_holds_a_run_is_neither_overwritten_nor_mixed_by_accident(tmp_path):
    config = parse_config(raw_config(tmp_path))
    assert check_folder(config, resume=False, overwrite=False) is None
    with pytest.raises(ValueError, match=r"nothing to resume.*without --resume"):
        check_folder(config, resume=True, overwrite=False)
    open_folder(config, resume=False)
    with pytest.raises(ValueError, match=r"already holds a run.*--resume.*--overwrite.*name="):
        check_folder(config, resume=False, overwrite=False)
    with pytest.raises(ValueError, match="contradict"):
        check_folder(config, resume=True, overwrite=True)
    check_folder(config, resume=True, overwrite=False)
    changed = parse_config(raw_config(tmp_path, optimizer__warmup=5, sampler__num_steps=5, iterations=9))
    with pytest.raises(ValueError, match=r"must keep its settings, but optimizer.warmup, sampler.num_steps changed"):
        check_folder(changed, resume=True, overwrite=False)
    check_folder(parse_config(raw_config(tmp_path, optimizer__lr=0.5, iterations=9)), resume=True, overwrite=False)
    marker = config.folder / "old"
    marker.write_text("x")
    open_folder(config, resume=False)
    assert not marker.exists()


def test_pictures_are_chosen_from_every_kind_and_no_caption_twice():
    from flowgrpo.data import Prompt

    prompts = [Prompt(f"p{i % 7}", i, meta={"kind": f"k{i % 3}"}) for i in range(60)]
    chosen = choose_pictures(prompts)
    kinds = [prompts[i].meta["kind"] for i in chosen]
    assert {k: kinds.count(k) for k in kinds} == {"k0": 4, "k1": 4, "k2": 4}
    for kind in set(kinds):
        texts = [prompts[i].text for i in chosen if prompts[i].meta["kind"] == kind]
        assert len(set(texts)) == 4
    assert choose_pictures([Prompt("a", 0), Prompt("b", 1)]) == [0, 1]
