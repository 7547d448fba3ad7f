"""Models with discrete levels are flows in another unit: their own pictures, their own DDIM, ratio 1."""

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler, PNDMScheduler

from flowgrpo.data import Prompt
from flowgrpo.discrete import KINDS, ddim_grid, velocity
from flowgrpo.group_noise import Shared
from flowgrpo.policy import Conditions, Policy
from flowgrpo.rollout import Dynamics, Noise, Row, replay, rollout
from flowgrpo.schedule import Pipeline, Shifted
from flowgrpo.solvers import Euler
from flowgrpo.transitions import TRANSITIONS, Ddim
from tests.tiny_pipelines import WIDTH, _clip, _image_vae, _wake

PROMPTS = [Prompt("a red cube", 0), Prompt("two cats beside a dog", 1)]
ROWS = [Row(prompt, sample) for prompt in PROMPTS for sample in range(2)]
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
SD15 = {"steps_offset": 1, "set_alpha_to_one": False}


def stable_diffusion(kind, **scheduler):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        tokenizer, encoder = _clip(projected=False)
        unet = diffusers.UNet2DConditionModel(
            sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=WIDTH, layers_per_block=1, attention_head_dim=2,
        )  # fmt: skip
        pipeline = diffusers.StableDiffusionPipeline(
            vae=_image_vae(), text_encoder=encoder, tokenizer=tokenizer, unet=unet, safety_checker=None,
            scheduler=DDIMScheduler(prediction_type=kind, **{**BETAS, **SD15, **scheduler}),
            feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
        for module in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
            _wake(module.eval())
    return pipeline


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha_to_one", [True, False])
def test_without_noise_the_pictures_are_those_of_ddim(kind, alpha_to_one):
    policy = Policy(stable_diffusion(kind, set_alpha_to_one=alpha_to_one), Conditions(4.0, "blurry", height=16, width=16))
    grid = policy.grid(6, Pipeline())
    assert (grid.sigmas[-1] == 0) is alpha_to_one
    generators = [[torch.Generator().manual_seed(5 + i) for i in range(2)] for _ in range(2)]
    plan = Dynamics(grid, range(0), Ddim(), Euler()).plan(0, 6)
    _, ours = policy.run(PROMPTS, plan, generators=generators[0], decode=True)
    own = policy.generate(PROMPTS, 6, generators[1])
    torch.testing.assert_close(ours, own, rtol=0, atol=5e-5)  # another order of float32 operations, before a random decoder


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_ratio_before_the_first_update_is_zero_for_every_transition(kind):
    policy = Policy(stable_diffusion(kind), Conditions(1.0, height=16, width=16))
    for factory in TRANSITIONS.values():
        dynamics = Dynamics(policy.grid(5, Pipeline()), range(1, 4), factory(), Euler())
        trajectory = rollout(policy, ROWS, dynamics, Noise(0, 0, Shared()), 4)
        for i, step in enumerate(dynamics.window):
            gap = replay(policy, trajectory, range(4), step, grad=False).log_prob - trajectory.log_probs[:, i]
            assert gap.abs().max() < 1e-6


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_the_ddim_transition_is_the_eta_of_diffusers_ddim(eta):
    scheduler = DDIMScheduler(prediction_type="epsilon", **BETAS)
    grid = ddim_grid(scheduler, 10)
    scheduler.set_timesteps(10)
    generator = torch.Generator().manual_seed(0)
    x, eps, z = (torch.randn(2, 3, 5, 7, generator=generator) for _ in range(3))
    for step in range(9):
        theirs = scheduler.step(eps, scheduler.timesteps[step], x, eta=eta, variance_noise=z).prev_sample
        y, sigma = x / grid.scale(step), grid.sigmas[step]
        v = velocity(eps, y, sigma, grid.scale(step), "epsilon")
        c = Ddim(eta).coefficients(grid.sigmas, step)
        ours = c.a * (y - sigma * v) + c.b * (y + (1 - sigma) * v) + c.std * z
        torch.testing.assert_close(grid.scale(step + 1) * ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_the_network_says_is_the_same_velocity_in_every_kind():
    generator = torch.Generator().manual_seed(1)
    x0, eps = (torch.randn(2, 3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    alpha, s = 0.6, 0.8
    scale, sigma = alpha + s, s / (alpha + s)
    y = (alpha * x0 + s * eps) / scale
    for kind, output in {"epsilon": eps, "v_prediction": alpha * eps - s * x0, "sample": x0}.items():
        torch.testing.assert_close(velocity(output, y, sigma, scale, kind), eps - x0)


def test_another_scheduler_of_the_same_levels_is_sampled_with_ddim():
    pipeline = stable_diffusion("epsilon")
    pipeline.scheduler = PNDMScheduler.from_config(pipeline.scheduler.config, skip_prk_steps=True)
    policy = Policy(pipeline, Conditions(height=16, width=16))
    assert type(policy.scheduler).__name__ == "MDPDDIMScheduler"
    assert policy.grid(5, Pipeline()).num_steps == 5


def test_levels_that_the_model_does_not_have_are_refused():
    policy = Policy(stable_diffusion("epsilon"), Conditions(height=16, width=16))
    with pytest.raises(ValueError, match=r"sampler\.schedule: this model has discrete levels"):
        policy.grid(5, Shifted(3.0))
    with pytest.raises(ValueError, match=r"sampler\.tail: this model has discrete levels"):
        policy.grid(5, Pipeline()).with_tail(2, 2)
