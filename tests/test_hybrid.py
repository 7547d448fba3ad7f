"""Hybrid inference: the tuned model's steps, then the base's, in every pipeline; nothing of it is left behind."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from flowgrpo import cli
from flowgrpo.adapters import Reference, make_trainable
from flowgrpo.config import LoraConfig, ModelConfig, parse_config
from flowgrpo.data import Prompt
from flowgrpo.evaluate import evaluate
from flowgrpo.export import export_full, export_lora
from flowgrpo.families import policy_networks
from flowgrpo.generate import generate, hybrid_from, policy_from, read_manifest
from flowgrpo.hybrid import Hybrid, base_from, draw, tuned_steps
from flowgrpo.policy import Conditions, Policy
from flowgrpo.scoring import Component, Scorer
from flowgrpo.train import train
from flowgrpo.tuned import load_hybrid
from tests.test_discrete import stable_diffusion
from tests.tiny_pipelines import CALLS, add_lora, build
from tests.toys import PROMPTS, brightness, raw_config

STEPS = 4
NAMES = ["sd3", "flux", "qwen_image", "wan", "wan_euler", "wan_experts"]


def pipeline_of(name: str) -> Any:
    """A tiny pipeline; "wan_experts" has a second network for the second half of the steps, as Wan 2.2."""
    if name != "wan_experts":
        return build(name)
    parts = build("wan_euler").components
    parts["transformer_2"] = nudged(deepcopy(parts["transformer"]))
    return diffusers.WanPipeline(**parts, boundary_ratio=0.85)


def nudged(network: nn.Module, size: float = 0.1) -> nn.Module:
    """The network after an update of every weight."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return network


def policy_of(pipeline: Any, name: str, dtype: torch.dtype = torch.float32) -> Policy:
    size = {k: v for k, v in CALLS[name.replace("_experts", "_euler")].items() if k in ("height", "width", "num_frames")}
    call = {"max_sequence_length": 32}
    return Policy(pipeline, Conditions(guidance_scale=3.0, negative_prompt="blurry", **size, call=call), dtype)


def tuned_of(name: str, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Policy, Hybrid]:
    """A tuned policy, and its hybrid of all steps."""
    policy = policy_of(pipeline_of(name), name, dtype)
    trained: dict[str, nn.Parameter] = {}
    if kind == "full":
        trained = make_trainable(policy.networks, "full", LoraConfig())
    reference = Reference(policy.networks, trained, kind)
    for network in policy.networks.values():
        if kind == "full":
            nudged(network)
        else:
            add_lora(network)
    return policy, Hybrid(1.0, reference.active)


def drawn(policy: Policy, hybrid: Hybrid | None = None, steps: int = STEPS) -> Tensor:
    prompts = [Prompt("a red cube", 0), Prompt("two cats", 1)]
    return draw(policy, prompts, steps, [torch.Generator().manual_seed(i) for i in range(2)], hybrid)


def shared(hybrid: Hybrid, share: float) -> Hybrid:
    return Hybrid(float(share), hybrid.base)


def by_level(tuned: nn.Module, base: nn.Module, is_tuned: Callable[[float], bool]) -> None:
    """Two networks in one: which of them answers is decided by the timestep that is asked for."""
    own = tuned.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (own if is_tuned(float(kwargs["timestep"].flatten()[0])) else base.forward)(*args, **kwargs)

    tuned.forward = forward


def timesteps_of(policy: Policy) -> list[float]:
    """The different timesteps that the networks are asked for, in order."""
    seen: dict[float, None] = {}
    hooks = [
        network.register_forward_pre_hook(
            lambda _, __, kwargs: seen.setdefault(float(kwargs["timestep"].flatten()[0])), with_kwargs=True
        )
        for network in policy.networks.values()
    ]
    drawn(policy)
    for hook in hooks:
        hook.remove()
    return list(seen)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_one_is_the_tuned_model_and_of_zero_its_base_bit_for_bit(name: str, kind: str) -> None:
    base = drawn(policy_of(pipeline_of(name), name))
    policy, hybrid = tuned_of(name, kind)
    tuned = drawn(policy)
    assert (tuned - base).abs().max() > 1e-3
    assert torch.equal(drawn(policy, shared(hybrid, 0)), base)
    assert torch.equal(drawn(policy, shared(hybrid, 1)), tuned)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [*((name, kind, torch.float32) for name in NAMES for kind in ("lora", "full")), ("sd3", "full", torch.bfloat16)],
)
def test_the_steps_of_a_share_are_those_of_two_networks_chosen_by_noise_level(name: str, kind: str, dtype: Any) -> None:
    policy, hybrid = tuned_of(name, kind, dtype)
    tuned, half = drawn(policy), [drawn(policy, shared(hybrid, k / STEPS)) for k in range(1, STEPS)]
    levels = timesteps_of(policy)
    assert len(levels) == STEPS
    other = policy_networks(pipeline_of(name))
    cut = [0.0]
    for key, network in policy.networks.items():
        by_level(network, other[key], lambda level: level >= cut[0])
    for k, picture in enumerate(half, start=1):
        cut[0] = levels[k - 1]
        assert torch.equal(picture, drawn(policy)), f"{k} of {STEPS} steps"
    pictures = [tuned, *half]
    assert all((a - b).abs().max() > 1e-4 for i, a in enumerate(pictures) for b in pictures[:i])


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weights_and_scheduler_are_as_before_also_after_an_error(kind: str) -> None:
    policy, hybrid = tuned_of("sd3", kind)
    before = {name: p.detach().clone() for name, p in policy.networks["transformer"].named_parameters()}
    tuned, calls = drawn(policy), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")

    hook = policy.networks["transformer"].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        drawn(policy, shared(hybrid, 0.5))
    hook.remove()
    assert "step" not in vars(policy.own_scheduler)
    assert all(torch.equal(p, before[name]) for name, p in policy.networks["transformer"].named_parameters())
    assert torch.equal(drawn(policy), tuned)
    drawn(policy, shared(hybrid, 0.5))
    assert torch.equal(drawn(policy), tuned)


@given(st.floats(0, 1), st.integers(1, 60))
def test_the_tuned_steps_are_the_nearest_number_or_nothing_would_be_mixed(share: float, num_steps: int) -> None:
    nearest = min(range(num_steps + 1), key=lambda k: abs(k - share * num_steps))
    if 0 < share < 1 and abs(tuned := share * num_steps) and (tuned < 0.5 or num_steps - tuned < 0.5):
        with pytest.raises(ValueError, match="would mix nothing"):
            tuned_steps(share, num_steps)
    elif abs(abs(nearest - share * num_steps) - 0.5) > 1e-9:
        assert tuned_steps(share, num_steps) == nearest


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_outside_of_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="a share of the steps from 0 to 1"):
        tuned_steps(share, 10)


def test_a_pipeline_that_makes_another_number_of_steps_is_refused() -> None:
    scheduler = SimpleNamespace(step=lambda: None)
    with base_from(scheduler, 1, 2, nullcontext):
        for _ in range(2):
            scheduler.step()
    with pytest.raises(ValueError, match="each of the 3 steps, the pipeline made 1"), base_from(scheduler, 1, 3, nullcontext):
        scheduler.step()


def test_what_cannot_be_mixed_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    policy, hybrid = tuned_of("sd3", "lora")
    policy.own_scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    scorer, prompts = Scorer([Component("bright", brightness, 1.0)]), [Prompt("a", 0)]
    with pytest.raises(ValueError, match="one network call a step, FlowMatchHeunDiscreteScheduler makes 2"):
        evaluate(policy, scorer, prompts, num_steps=4, batch_size=1, seed=0, hybrid=shared(hybrid, 0.5))
    with pytest.raises(ValueError, match="rounds to 4 tuned ones"):
        generate(policy, prompts, tmp_path / "out", samples_per_prompt=1, num_steps=4, seed=0, batch_size=1,
                 hybrid=shared(hybrid, 0.9))  # fmt: skip
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a LoRA of it, and a full fine-tune of it."""
    folder = tmp_path_factory.mktemp("saved")
    pipeline = build("sd3")
    pipeline.save_pretrained(folder / "base")
    add_lora(pipeline.transformer)
    export_lora(pipeline, {"transformer": pipeline.transformer}, folder / "lora")
    pipeline = build("sd3")
    nudged(pipeline.transformer)
    export_full(pipeline, folder / "full", pipeline.scheduler)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS[:2]))
    return folder


def says(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result


def generated(saved: Path, folder: Path, *options: Any) -> bytes:
    says("generate", saved / "base", "--prompts", saved / "prompts.txt", "--output", folder, "--num-steps", STEPS,
         "--height", 16, "--width", 24, "--guidance-scale", 2, "--call", "max_sequence_length=32", *options)  # fmt: skip
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.png")))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_generate_mixes_and_its_manifest_says_how(saved: Path, tmp_path: Path, kind: str) -> None:
    files: dict[Any, bytes] = {
        "base": generated(saved, tmp_path / "base"),
        "tuned": generated(saved, tmp_path / "t", "--adapter", saved / kind),
    }
    for share in (0, 0.5, 1):
        files[share] = generated(saved, tmp_path / str(share), "--adapter", saved / kind, "--hybrid", share)
    assert files["base"] == files[0] != files[0.5] != files[1] == files["tuned"]
    line, *_ = read_manifest(tmp_path / "0.5")
    assert line["hybrid"] == {"share": 0.5, "tuned_steps": 2, "num_steps": STEPS}
    assert read_manifest(tmp_path / "t")[0]["hybrid"] is None
    with pytest.raises(AssertionError, match="was made with hybrid="):
        generated(saved, tmp_path / "0.5", "--adapter", saved / kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hybrid", 0.5], "--hybrid 0.5 cannot take effect without --adapter"),
        (["--hybrid", 0.99, "--adapter", "lora"], "rounds to 4 tuned ones and would mix nothing"),
    ],
)
def test_generate_refuses_a_hybrid_that_cannot_take_effect(
    saved: Path, tmp_path: Path, options: list[Any], message: str
) -> None:
    found = [saved / "lora" if option == "lora" else option for option in options]
    result = says("generate", saved / "base", "--prompts", saved / "prompts.txt", "--output", tmp_path / "out",
                  "--num-steps", STEPS, *found, code=2)  # fmt: skip
    (line,) = result.stderr.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_the_text_encoder_or_a_base_of_other_layers_is_refused(saved: Path, tmp_path: Path) -> None:
    policy, _, origin = policy_from(str(saved / "base"), saved / "lora")
    add_lora_to_text(policy.pipeline.text_encoder)
    with pytest.raises(ValueError, match="the adapter is in the text_encoder as well"):
        hybrid_from(policy, origin, STEPS, 0.5)
    build("flux").save_pretrained(tmp_path / "flux")
    with pytest.raises(ValueError, match="hybrid needs the layers of its base"):
        load_hybrid(policy, ModelConfig(pipeline=str(tmp_path / "flux")), saved / "full", 0.5)


def add_lora_to_text(encoder: Any) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    inject_adapter_in_model(PeftConfig(r=2, target_modules=["q_proj"]), encoder)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_evaluate_mixes_the_tuned_model_only(saved: Path, tmp_path: Path, kind: str) -> None:
    raw = raw_config(tmp_path, prompts__heldout=str(saved / "prompts.txt"))
    raw["model"] |= {"pipeline": str(saved / "base")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    results = {}
    for name, options in {"off": [], "0": ["--hybrid", 0], "half": ["evaluation.hybrid=0.5"], "1": ["--hybrid", 1]}.items():
        output = tmp_path / f"{name}.json"
        result = says("evaluate", tmp_path / "run.yaml", "--tuned", saved / kind, "--output", output, *options)
        assert ("steps are the tuned model's" in result.output) == (name != "off")
        results[name] = json.loads(output.read_text())
    scores = {name: [sample["tuned"] for sample in result["samples"]] for name, result in results.items()}
    base = [[sample["base"] for sample in result["samples"]] for result in results.values()]
    assert all(one == base[0] for one in base)
    assert scores["0"] == base[0] != scores["half"] != scores["1"] == scores["off"]
    assert results["half"]["hybrid"] == {"share": 0.5, "tuned_steps": 2, "num_steps": 4}
    assert results["off"]["hybrid"] is None


@pytest.mark.parametrize(("kind", "ema"), [("lora", None), ("full", 0.5)])
def test_a_run_judges_its_model_as_configured(tmp_path: Path, kind: str, ema: float | None) -> None:
    def summary(hybrid: float) -> dict[str, Any]:
        raw = raw_config(tmp_path, name=f"{hybrid}", iterations=2, optimizer__lr=0.05, ema__decay=ema,
                         prompts__heldout=str(tmp_path / "prompts.txt"), evaluation__hybrid=hybrid)  # fmt: skip
        raw["model"] = {k: v for k, v in raw["model"].items() if k != "lora" or kind == "lora"} | {"train": kind}
        config = parse_config(raw)
        assert train(config) == 0
        return json.loads((config.folder / "summary.json").read_text())

    none, half = summary(0.0), summary(0.5)
    assert none["gold"]["rise"] == 0 != half["gold"]["rise"]
    assert half["hybrid"] == {"share": 0.5, "tuned_steps": 2, "num_steps": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"prompts__heldout": None}, "prompts.heldout must name"), ({"evaluation__num_steps": 1}, "would mix nothing")],
)
def test_a_run_refuses_a_hybrid_that_cannot_take_effect_before_it_writes(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    raw = raw_config(tmp_path, **{"prompts__heldout": str(tmp_path / "prompts.txt"), "evaluation__hybrid": 0.5} | changes)
    config = parse_config(raw)
    with pytest.raises(ValueError, match=message):
        train(config)
    assert not config.folder.exists()


def test_a_run_whose_sampler_makes_another_number_of_steps_is_refused_before_it_trains(tmp_path: Path) -> None:
    raw = raw_config(tmp_path, prompts__heldout=str(tmp_path / "prompts.txt"), evaluation__hybrid=0.5)
    pipeline = stable_diffusion("epsilon")
    pipeline.scheduler = diffusers.PNDMScheduler.from_config(pipeline.scheduler.config, skip_prk_steps=True)
    pipeline.save_pretrained(tmp_path / "pndm")
    raw["model"] = {"pipeline": str(tmp_path / "pndm")}
    config = parse_config(raw)
    with pytest.raises(ValueError, match="each of the 4 steps, the pipeline made 5"):
        train(config)
    assert not (config.folder / "metrics.jsonl").exists()
