"""Flow matching on data beside the objective: what it adds, what it reads, what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from flowgrpo import keys
from flowgrpo.build import build
from flowgrpo.choices import when
from flowgrpo.data_loss import load_data
from flowgrpo.losses import Losses
from flowgrpo.metrics import Metrics
from flowgrpo.trainer import Trainer
from tests.toys import config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    config(folder)  # the pipeline
    rng = np.random.default_rng(0)
    rows = [{"file": f"{i}.png", "prompt": f"picture {i}"} for i in range(5)]
    for row in rows:
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / row["file"])
    (folder / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    script = [sys.executable, ROOT / "scripts" / "encode_data.py", "--pipeline", folder / "pipeline"]
    subprocess.run([*script, "--manifest", folder / "pictures.jsonl", "--out", folder / "data.safetensors"], check=True)
    return folder


def trainer_of(folder, **changes):
    return Trainer(build(config(folder, **changes)), Metrics(folder / "metrics.jsonl"))


def data(folder, **changes):
    return {"latents": str(folder / "data.safetensors"), "weight": 0.5, **changes}


def test_the_script_writes_what_decodes_to_the_pictures(folder):
    found, pipeline = load_data(folder / "data.safetensors"), trainer_of(folder).parts.policy.pipeline
    assert [prompt.text for prompt in found.prompts] == [f"picture {i}" for i in range(5)]
    vae, pictures = pipeline.vae, np.stack([np.asarray(Image.open(folder / f"{i}.png")) for i in range(5)])
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    expected = (vae.encode(x).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor
    torch.testing.assert_close(found.latents, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", ["clipped_ratio", "awm"])
def test_the_gradient_of_an_update_gains_that_of_the_matching_error(folder, objective):
    changes = {"objective": objective, "levels": {"use": "uniform", "count": 2}, "optimizer__max_grad_norm": 1e9}
    gradients = []
    for section in ({}, {"data": data(folder, samples=3)}):
        if not section and objective == "clipped_ratio":
            del changes["levels"]
        trainer = trainer_of(folder, **{**changes, **section, "levels": {"use": "uniform", "count": 2}} if section else changes)
        parts = trainer.parts
        parts.optimizer.step = lambda: None
        parts.optimizer.zero_grad = lambda **_: None
        trajectory = trainer.rollout(0)
        trainer.update(Losses(parts, trajectory, torch.ones(8, 2), trainer.metrics), range(4, 8), number=1)
        gradients.append([parameter.grad.clone() for parameter in parts.trained.values()])
    found, loss = load_data(folder / "data.safetensors"), torch.zeros(())
    key = ("data", 0, 0, 1, 0)
    for i in range(3):
        row = keys.key(*key, i) % 5
        for number in (0, 1):
            sigma = trainer.parts.choices.levels.at(when(trainer.config, 0), trainer.parts.grid.sigmas)[number]
            x0, eps = found.latents[row], keys.normal((3, *found.latents.shape[1:]), *key, "noise", number)[i]
            level = trainer.parts.policy.level(trainer.parts.grid, sigma)
            x = ((1 - sigma) * x0 + sigma * eps)[None]
            v = trainer.parts.policy.predict([found.prompts[row]], x, level, grad=True).v[0]
            loss = loss + 0.5 * ((v - (eps - x0)) ** 2).mean() / 6
    expected = torch.autograd.grad(loss, list(trainer.parts.trained.values()))
    for without, with_data, gain in zip(*gradients, expected, strict=True):
        torch.testing.assert_close(with_data - without, gain, rtol=1e-3, atol=1e-6)
    assert trainer.metrics.reduce()["data_loss"] == pytest.approx(loss.item() / 0.5, rel=1e-4)


def test_rows_and_noise_differ_by_iteration_and_update_and_repeat_by_key(folder):
    trainer = trainer_of(folder, data=data(folder))
    losses = [[loss.item() for loss in trainer.data.pieces(*at, trainer.metrics)] for at in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2] != losses[3]


def broken(folder, name, tensors, metadata):
    save_file(tensors, folder / name, metadata)
    return str(folder / name)


def test_files_that_are_not_data_are_refused(folder):
    latents, two = {"latents": torch.zeros(2, 4, 8, 8)}, {"prompts": json.dumps(["a", "b"])}
    cases = {
        str(folder / "nowhere.safetensors"): "must be a .safetensors file, there is none",
        broken(folder, "no-latents", {"x": torch.zeros(2)}, two): r"must hold the tensor latents.*got \['x'\]",
        broken(folder, "no-prompts", latents, {}): "and metadata prompts, got",
        broken(folder, "unequal", latents, {"prompts": json.dumps(["a"])}): "a prompt for each latent, got 2 and 1",
        broken(folder, "wrong-shape", {"latents": torch.zeros(2, 4, 9, 9)}, two): "must be of the model's shape",
    }
    for path, words in cases.items():
        with pytest.raises(ValueError, match=words):
            trainer_of(folder, data={"latents": path, "weight": 0.1})
