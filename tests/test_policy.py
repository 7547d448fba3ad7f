"""Policies: what is found by inspection, what is refused, what is remembered."""

import pytest
import torch
from diffusers import EDMEulerScheduler

from flowgrpo import families
from flowgrpo.adapters import Reference, make_trainable
from flowgrpo.config import LoraConfig
from flowgrpo.data import Prompt
from flowgrpo.mdp_scheduler import mdp_scheduler
from flowgrpo.policy import Conditions, Policy, grouped
from tests.tiny_pipelines import CALLS, build

NAMES = list(CALLS)


def test_rows_of_one_prompt_are_copies_and_others_are_rows():
    a, b = Prompt("a", 0), Prompt("b", 1)
    assert grouped([a, a, a]) == ((a,), 3)
    assert grouped([a, a, b]) == ((a, a, b), 1)
    assert grouped([b]) == ((b,), 1)


def test_the_guidance_argument_is_the_classifier_free_one():
    found = {name: families.guidance_argument(build(name)) for name in NAMES}
    assert found == {"sd3": "guidance_scale", "flux": "true_cfg_scale", "qwen_image": "true_cfg_scale",
                     "wan": "guidance_scale", "wan_euler": "guidance_scale"}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_attention_projections_are_found(name):
    network = next(iter(families.policy_networks(build(name)).values()))
    targets = families.attention_targets(network)
    assert any(t.endswith("to_q") for t in targets)
    assert all(isinstance(network.get_submodule(t), torch.nn.Linear) for t in targets)


def test_a_pipeline_without_a_denoiser_is_refused():
    with pytest.raises(ValueError, match="only diffusion pipelines can be trained"):
        families.policy_networks(object())


def test_a_scheduler_that_is_neither_a_flow_nor_on_discrete_levels_is_refused():
    with pytest.raises(ValueError, match=r"flow-matching pipeline or.*EDMEulerScheduler with prediction_type='epsilon'"):
        mdp_scheduler(EDMEulerScheduler())


def test_the_longer_of_two_prompts_changes_nothing_for_the_shorter():
    """Also for Qwen-Image, whose own call pairs copies with another prompt's mask."""
    for name in NAMES:
        size = {k: v for k, v in CALLS[name].items() if k in ("height", "width", "num_frames")}
        extra = {k: v for k, v in CALLS[name].items() if k == "max_sequence_length"}
        policy = Policy(build(name), Conditions(**size, call=extra))
        short, long = Prompt("red", 0), Prompt("a very long story about two blue cats", 1)

        def pictures(prompts, policy=policy):
            return policy.generate(prompts, 2, [torch.Generator().manual_seed(3) for _ in prompts])

        torch.testing.assert_close(pictures([short, long, short, long])[0], pictures([short])[0], rtol=0, atol=1e-5)


def test_prompts_are_encoded_once_for_rollout_and_replay():
    pipeline = build("sd3")
    calls = []
    own = pipeline.encode_prompt
    pipeline.encode_prompt = lambda *a, **k: calls.append(1) or own(*a, **k)
    policy = Policy(pipeline, Conditions(height=16, width=16, call={"max_sequence_length": 8}))
    for _ in range(3):
        policy.generate([Prompt("a", 0)], 1, [torch.Generator()])
    policy.generate([Prompt("b", 1)], 1, [torch.Generator()])
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["sd3", "flux", "wan"])
def test_the_reference_of_an_adapter_is_the_base_bit_for_bit(name):
    network = families.policy_networks(build(name))["transformer"]
    networks, captured = {"transformer": network}, []
    network.register_forward_hook(lambda m, a, k, out: captured.append(out[0]), with_kwargs=True)
    size = {k: v for k, v in CALLS[name].items() if k in ("height", "width", "num_frames")}
    pipeline = build(name)
    pipeline.transformer = network
    policy = Policy(pipeline, Conditions(**size, call={"max_sequence_length": 8}))

    def velocity():
        policy.generate([Prompt("a", 0)], 1, [torch.Generator().manual_seed(0)])
        return captured[-1].detach().clone()

    base = velocity()
    trained = make_trainable(networks, "lora", LoraConfig(rank=2))
    assert torch.equal(velocity(), base)  # the second matrix starts at 0
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.1)
    assert not torch.equal(velocity(), base)
    with Reference(networks, trained, "lora").active():
        assert torch.equal(velocity(), base)
    assert not torch.equal(velocity(), base)
    assert all(p.requires_grad for p in trained.values())


def test_the_reference_of_full_training_is_the_start_and_leaves_no_trace():
    network = torch.nn.Linear(3, 5)
    trained = make_trainable({"transformer": network}, "full", LoraConfig())
    reference, x = Reference({"transformer": network}, trained, "full"), torch.randn(2, 3)
    start = network(x)
    with torch.no_grad():
        network.weight.mul_(2)
    moved = network(x)
    loss = moved.sum()
    with reference.active():
        assert torch.equal(network(x), start)
    assert torch.equal(network(x), moved)
    loss.backward()  # the graph built before is still valid
    assert network.weight.grad is not None


def test_the_gradient_of_a_kl_to_the_reference_is_not_zero_after_a_step_and_points_back():
    network = torch.nn.Linear(3, 3, bias=False)
    trained = make_trainable({"transformer": network}, "full", LoraConfig())
    reference, x = Reference({"transformer": network}, trained, "full"), torch.eye(3)
    step = torch.full((3, 3), 0.1)
    with torch.no_grad():
        network.weight.add_(step)
        with reference.active():
            anchor = network(x).clone()
    ((network(x) - anchor) ** 2).sum().backward()
    torch.testing.assert_close(network.weight.grad, 2 * step)
