"""Rollout and replay on tiny pipelines: ratio 1, the pipeline's own pictures, pictures that depend on their key alone."""

from dataclasses import replace

import pytest
import torch

from flowgrpo.data import Prompt
from flowgrpo.group_noise import Distinct, Shared, Tree
from flowgrpo.policy import Conditions, Policy
from flowgrpo.rollout import Dynamics, Noise, Row, replay, rollout
from flowgrpo.schedule import Explicit, Pipeline, Shifted
from flowgrpo.solvers import Euler, Heun
from flowgrpo.transitions import TRANSITIONS, Cps, FlowSde
from tests.tiny_pipelines import CALLS, build

SIZE = {name: {k: v for k, v in call.items() if k in ("height", "width", "num_frames")} for name, call in CALLS.items()}
EXTRA = {name: {k: v for k, v in call.items() if k == "max_sequence_length"} for name, call in CALLS.items()}
PROMPTS = [Prompt("a red cube", 0), Prompt("two cats beside a dog", 1)]
ROWS = [Row(prompt, sample) for prompt in PROMPTS for sample in range(3)]
EULER_PIPELINES = ["sd3", "flux", "qwen_image", "wan_euler"]


def policy_of(name, guidance=1.0):
    return Policy(build(name), Conditions(guidance, "a blurry picture", **SIZE[name], call=EXTRA[name]))


def dynamics_of(policy, window=range(1, 3), transition=None, num_steps=5):
    return Dynamics(policy.grid(num_steps, Pipeline()), window, transition or Cps(0.8), Euler())


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("name", [*EULER_PIPELINES, "wan"])
def test_the_log_ratio_before_the_first_update_is_zero(name, guidance):
    policy = policy_of(name, guidance)
    for transition in [factory() for factory in TRANSITIONS.values()]:
        for window in (range(0, 2), range(1, 3)):
            trajectory = rollout(policy, ROWS, dynamics_of(policy, window, transition), Noise(0, 0, Shared()), 6)
            for rows in (range(0, 6), range(2, 5)):  # one batch as it was sampled, and one across two groups
                for i, step in enumerate(window):
                    new = replay(policy, trajectory, rows, step, grad=False).log_prob
                    assert (new - trajectory.log_probs[rows.start : rows.stop, i]).abs().max() < 1e-6


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("name", EULER_PIPELINES)
def test_without_noise_the_pictures_are_the_pipelines_own(name, guidance):
    policy = policy_of(name, guidance)
    generators = [[torch.Generator().manual_seed(5 + i) for i in range(2)] for _ in range(3)]
    plan = dynamics_of(policy, range(0)).plan(0, 5)
    _, ours = policy.run(PROMPTS, plan, generators=generators[0], decode=True)
    own = policy.generate(PROMPTS, 5, generators[1])
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)
    silent = replace(dynamics_of(policy, range(1, 3), FlowSde(0.0)).plan(0, 5), noise=lambda step, shape: torch.ones(shape))
    _, through_window = policy.run(PROMPTS, silent, generators=generators[2], decode=True)
    torch.testing.assert_close(through_window, own, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", [*EULER_PIPELINES, "wan"])
def test_a_shared_prefix_changes_nothing_but_the_number_of_calls(name):
    policy = policy_of(name)
    dynamics = dynamics_of(policy, range(2, 4))
    together = rollout(policy, ROWS, dynamics, Noise(0, 3, Shared()), 6)
    alone = [rollout(policy, [row], dynamics, Noise(0, 3, Shared()), 1) for row in ROWS]
    torch.testing.assert_close(together.x0, torch.cat([a.x0 for a in alone]), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        together.media, torch.cat([a.media for a in alone]), rtol=0, atol=1e-4
    )  # random decoders amplify
    assert together.calls == 2 * 2 + 6 * 3
    assert sum(a.calls for a in alone) == 6 * 5


@pytest.mark.parametrize("within", [Shared(), Distinct(), Tree([1, 2])])
def test_a_picture_depends_on_its_key_alone(within):
    policy = policy_of("sd3")
    dynamics, noise = dynamics_of(policy), Noise(7, 3, within)
    rows = ROWS[:4]
    four = rollout(policy, rows, dynamics, noise, 4)
    for other in (rollout(policy, rows, dynamics, noise, 2), rollout(policy, rows[::-1], dynamics, noise, 3)):
        order = [rows.index(row) for row in other.rows]
        torch.testing.assert_close(other.x0, four.x0[order], rtol=0, atol=1e-6)
        torch.testing.assert_close(other.media, four.media[order], rtol=0, atol=1e-6)
    for i in range(4):
        alone = rollout(policy, [rows[i]], dynamics, noise, 1)
        torch.testing.assert_close(alone.x0[0], four.x0[i], rtol=0, atol=1e-6)


def test_members_share_the_start_only_when_asked_and_always_differ():
    policy = policy_of("sd3")
    for shared, within in ((True, Shared()), (False, Distinct())):
        trajectory = rollout(policy, ROWS[:3], dynamics_of(policy, range(0, 2)), Noise(0, 0, within), 3)
        starts = trajectory.latents[:, 0]
        assert torch.equal(starts[0], starts[1]) is shared
        assert (trajectory.x0[0] - trajectory.x0[1]).abs().max() > 1e-3


def test_other_seeds_and_iterations_give_other_pictures():
    policy = policy_of("sd3")
    dynamics = dynamics_of(policy)
    pictures = [rollout(policy, ROWS[:1], dynamics, Noise(*key, Shared()), 1).x0 for key in ((0, 0), (0, 1), (1, 0))]
    assert all((pictures[i] - pictures[j]).abs().max() > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("name", ["sd3", "wan_euler"])
def test_calls_counted_on_the_network_are_the_calls_reported(name):
    policy = policy_of(name)
    dynamics = dynamics_of(policy, range(2, 4))
    seen = []
    next(iter(policy.networks.values())).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    trajectory = rollout(policy, ROWS, dynamics, Noise(0, 0, Shared()), 4)
    assert sum(seen) == trajectory.calls == 2 * 2 + 6 * 3


def test_gradients_reach_every_weight_that_the_picture_depends_on():
    policy = policy_of("sd3")
    network = policy.networks["transformer"].requires_grad_(True)
    trajectory = rollout(policy, ROWS, dynamics_of(policy), Noise(0, 0, Shared()), 6)
    replay(policy, trajectory, range(0, 6), 1).log_prob.sum().backward()
    missing = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # the last block feeds no text on; and a zero bias of keys cannot move a softmax
    assert all("context" in n or "add" in n or "to_k.bias" in n for n in missing), missing


def test_a_trajectory_holds_no_graph_and_only_the_window():
    policy = policy_of("sd3")
    policy.networks["transformer"].requires_grad_(True)
    trajectory = rollout(policy, ROWS, dynamics_of(policy), Noise(0, 0, Shared()), 6)
    for tensor in (trajectory.latents, trajectory.log_probs, trajectory.x0, trajectory.media):
        assert not tensor.requires_grad
    assert trajectory.latents.shape[:2] == (6, 3)
    assert trajectory.latents.dtype == torch.float32


def test_replay_refuses_other_conditions_than_those_of_the_rollout():
    policy = policy_of("sd3")
    trajectory = rollout(policy, ROWS[:2], dynamics_of(policy), Noise(0, 0, Shared()), 2)
    policy.conditions = replace(policy.conditions, guidance_scale=2.0)
    with pytest.raises(ValueError, match=r"replayed under the conditions.*sample again"):
        replay(policy, trajectory, range(0, 2), 1)


def test_bfloat16_keeps_latents_and_log_probabilities_in_float32_with_a_small_gap():
    pipeline = build("sd3").to(torch.bfloat16)
    policy = Policy(pipeline, Conditions(**SIZE["sd3"], call=EXTRA["sd3"]), torch.bfloat16)
    trajectory = rollout(policy, ROWS, dynamics_of(policy), Noise(0, 0, Shared()), 6)
    assert trajectory.latents.dtype == trajectory.log_probs.dtype == torch.float32
    assert not torch.equal(trajectory.latents, trajectory.latents.bfloat16().float())
    for rows in (range(0, 6), range(0, 1)):
        gap = replay(policy, trajectory, rows, 1, grad=False).log_prob - trajectory.log_probs[rows.start : rows.stop, 0]
        assert gap.abs().max() < 1e-2
    torch.testing.assert_close(
        replay(policy, trajectory, range(0, 6), 1, grad=False).log_prob, trajectory.log_probs[:, 0], rtol=0, atol=1e-6
    )


def test_levels_are_the_pipelines_own_or_those_that_were_asked_for():
    policy = policy_of("sd3")
    own = policy.grid(5, Pipeline())
    policy.own_scheduler.set_timesteps(5)
    assert own.sigmas == tuple(policy.own_scheduler.sigmas.tolist())
    assert torch.equal(own.timesteps, policy.own_scheduler.timesteps)
    explicit = policy.grid(3, Explicit([1.0, 0.7, 0.2, 0.0]))
    assert explicit.timesteps.tolist() == pytest.approx([1000.0, 700.0, 200.0])
    assert policy.grid(4, Shifted(3.0)).num_steps == 4


def test_a_larger_picture_has_its_own_levels_where_the_shift_depends_on_the_size():
    small, large = policy_of("flux"), Policy(build("flux"), Conditions(height=64, width=64, call=EXTRA["flux"]))
    assert small.grid(5, Pipeline()).sigmas != large.grid(5, Pipeline()).sigmas


@pytest.mark.parametrize("name", ["sd3", "wan_euler", "wan"])
def test_heun_runs_before_and_behind_the_window_on_pipelines_that_look_up_levels(name):
    policy = policy_of(name)
    dynamics = Dynamics(policy.grid(5, Pipeline()), range(2, 3), FlowSde(0.3), Heun(), Heun())
    trajectory = rollout(policy, ROWS[:2], dynamics, Noise(0, 0, Shared()), 2)
    assert trajectory.x0.isfinite().all()
    assert trajectory.calls == 4 + 2 * (1 + 2 + 1)


@pytest.mark.parametrize("rows", [[1], [3, 4], [2, 3], [5, 0]])
def test_part_of_a_group_is_that_part_of_the_whole(rows):
    policy = policy_of("sd3")
    rows_of = [Row(prompt, sample) for prompt in PROMPTS for sample in range(4)]
    for within, window in ((Shared(), range(2, 4)), (Tree([1, 3]), range(0, 4))):
        dynamics = dynamics_of(policy, window)
        whole = rollout(policy, rows_of, dynamics, Noise(0, 3, within), 8)
        part = rollout(policy, [rows_of[i] for i in rows], dynamics, Noise(0, 3, within), 8)
        torch.testing.assert_close(part.x0, whole.x0[rows], rtol=0, atol=1e-5)
        torch.testing.assert_close(part.log_probs, whole.log_probs[rows], rtol=0, atol=1e-5)
