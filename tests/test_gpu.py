"""What needs a CUDA device; scripts/check_gpu.sh runs these."""

import pytest
import torch

from flowgrpo.build import build
from flowgrpo.metrics import Metrics
from flowgrpo.selfcheck import selfcheck
from flowgrpo.trainer import Trainer
from tests.toys import config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_a_gpu_passes_its_checks_and_learns(tmp_path, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = build(config(tmp_path, model__dtype=dtype))
    assert parts.accelerator.device.type == "cuda"
    assert all(check.passed for check in selfcheck(parts))
    before = {name: p.detach().clone() for name, p in parts.trained.items()}
    Trainer(parts, Metrics(tmp_path / "metrics.jsonl")).run(2)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in parts.trained.values())
    assert any(not torch.equal(p, before[name]) for name, p in parts.trained.items())


def test_the_noise_of_a_picture_is_the_same_on_cpu_and_gpu(tmp_path):
    from flowgrpo.group_noise import Distinct
    from flowgrpo.rollout import Noise, Row

    parts = build(config(tmp_path))
    row = Row(parts.prompts[0], 2)
    noise = Noise(0, 3, Distinct())
    again = Noise(0, 3, Distinct())
    assert torch.equal(noise.step([row], 1, range(2), (1, 4, 8, 8)), again.step([row], 1, range(2), (1, 4, 8, 8)))
    assert noise.step([row], 1, range(2), (1, 4, 8, 8)).device.type == "cpu"
