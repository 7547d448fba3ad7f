"""What is exported loads in plain diffusers and is the trained model."""

from copy import deepcopy

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowgrpo import export
from flowgrpo.export import export_full, export_lora
from tests.tiny_pipelines import CALLS, add_lora, build, run

FILE = "pytorch_lora_weights.safetensors"


@pytest.mark.parametrize("name", CALLS)
def test_an_exported_lora_loads_in_a_fresh_pipeline_and_equals_the_trained_one(tmp_path, name):
    trained = build(name)
    base = run(name, trained)
    add_lora(trained.transformer, rank=3, alpha=7)
    wanted = run(name, trained)
    export_lora(trained, {"transformer": trained.transformer}, tmp_path / "adapter")

    for adapter_name in (None, "style"):
        fresh = build(name)
        fresh.load_lora_weights(tmp_path / "adapter", adapter_name=adapter_name)
        config = next(iter(fresh.transformer.peft_config.values()))
        assert (config.r, config.lora_alpha) == (3, 7)
        torch.testing.assert_close(run(name, fresh), wanted, atol=1e-5, rtol=0)
    assert (base - wanted).abs().max() > 1e-2
    assert [f.name for f in tmp_path.rglob("*")] == ["adapter", FILE]


def test_rank_and_alpha_of_single_layers_survive(tmp_path, sd3):
    from peft import LoraConfig

    patterns = {"rank_pattern": {"to_q": 5}, "alpha_pattern": {"to_v": 11}, "use_rslora": True}
    sd3.transformer.add_adapter(LoraConfig(r=2, lora_alpha=9, target_modules=["to_q", "to_v"], **patterns))
    for key, parameter in sd3.transformer.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    export_lora(sd3, {"transformer": sd3.transformer}, tmp_path / "adapter")
    fresh = build("sd3")
    fresh.load_lora_weights(tmp_path / "adapter")
    torch.testing.assert_close(run("sd3", fresh), run("sd3", sd3), atol=1e-5, rtol=0)


def test_a_second_expert_has_a_file_of_its_own(tmp_path):
    def two_experts():
        parts = build("wan_euler").components
        parts["transformer_2"] = deepcopy(parts["transformer"])
        pipeline = diffusers.WanPipeline(**parts, boundary_ratio=0.6)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    trained = two_experts()
    add_lora(trained.transformer, seed=1)
    add_lora(trained.transformer_2, seed=2)
    experts = {"transformer": trained.transformer, "transformer_2": trained.transformer_2}
    export_lora(trained, experts, tmp_path / "adapter")
    fresh = two_experts()
    fresh.load_lora_weights(tmp_path / "adapter")
    half = run("wan_euler", fresh, steps=4)
    fresh.load_lora_weights(tmp_path / "adapter" / "transformer_2", load_into_transformer_2=True)
    wanted = run("wan_euler", trained, steps=4)
    torch.testing.assert_close(run("wan_euler", fresh, steps=4), wanted, atol=1e-5, rtol=0)
    assert (half - wanted).abs().max() > 1e-3


def test_an_older_export_is_replaced_and_a_broken_one_leaves_it(tmp_path, sd3, monkeypatch):
    add_lora(sd3.transformer, seed=1)
    export_lora(sd3, {"transformer": sd3.transformer}, tmp_path / "adapter")
    first = load_file(tmp_path / "adapter" / FILE)
    for parameter in sd3.transformer.parameters():
        parameter.data.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(export, "_verify", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            export_lora(sd3, {"transformer": sd3.transformer}, tmp_path / "adapter")
    kept = load_file(tmp_path / "adapter" / FILE)
    assert all(torch.equal(kept[key], first[key]) for key in first)
    export_lora(sd3, {"transformer": sd3.transformer}, tmp_path / "adapter")
    replaced = load_file(tmp_path / "adapter" / FILE)
    assert all(torch.equal(replaced[key], first[key] + 1) for key in first)
    assert [f.name for f in tmp_path.iterdir()] == ["adapter"]


def _renamed(weights):
    key = next(iter(weights))
    return {(f"default_0.{k}" if k == key else k): v for k, v in weights.items()}


def _less(weights):
    return dict(list(weights.items())[1:])


def _nudged(weights):
    return {k: v + 1e-6 * (i == 0) for i, (k, v) in enumerate(weights.items())}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_renamed, r"extra default_0\..*missing transformer\."),
        (_less, "missing transformer"),
        (_nudged, "has other values"),
    ],
)
def test_a_file_that_does_not_hold_the_adapter_is_an_error(tmp_path, sd3, monkeypatch, spoil, message):
    add_lora(sd3.transformer)
    write = export._write_lora

    def spoilt(pipeline, networks, folder, adapter):
        write(pipeline, networks, folder, adapter)
        save_file(spoil(load_file(folder / FILE)), folder / FILE)

    monkeypatch.setattr(export, "_write_lora", spoilt)
    with pytest.raises(ValueError, match=message):
        export_lora(sd3, {"transformer": sd3.transformer}, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_network_without_an_adapter_or_with_more_than_one_trained_part_is_refused(tmp_path, sd3):
    with pytest.raises(ValueError, match="transformer must carry an adapter called 'default'"):
        export_lora(sd3, {"transformer": sd3.transformer}, tmp_path / "adapter")
    add_lora(sd3.transformer)
    sd3.transformer.proj_out.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"these are trained as well: proj_out\.weight"):
        export_lora(sd3, {"transformer": sd3.transformer}, tmp_path / "adapter")


def test_a_network_or_pipeline_without_a_lora_layout_is_refused(tmp_path, sd3):
    add_lora(sd3.transformer)
    for name in ("unet", "transformer_2"):
        with pytest.raises(ValueError, match=f"StableDiffusion3Pipeline cannot store a LoRA of '{name}'"):
            export_lora(sd3, {name: sd3.transformer}, tmp_path / "adapter")

    class Plain:
        pass

    with pytest.raises(ValueError, match="Plain must have a LoRA layout"):
        export_lora(Plain(), {"transformer": sd3.transformer}, tmp_path / "adapter")


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_an_exported_pipeline_loads_with_its_original_scheduler_and_equals_the_trained_one(tmp_path, name):
    trained = build(name)
    original = trained.scheduler
    base = run(name, trained)
    with torch.no_grad():
        for parameter in trained.transformer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    wanted = run(name, trained)

    class Training(type(original)):
        pass

    training = Training.from_config(original.config)
    trained.register_modules(scheduler=training)
    export_full(trained, tmp_path / "model", original)
    assert trained.scheduler is training
    fresh = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    fresh.set_progress_bar_config(disable=True)
    assert type(fresh.scheduler) is type(original)
    torch.testing.assert_close(run(name, fresh), wanted, atol=1e-5, rtol=0)
    assert (base - wanted).abs().max() > 1e-3
    assert {f.suffix for f in (tmp_path / "model").rglob("*.*")} <= {
        ".json",
        ".safetensors",
        ".txt",
        ".jinja",
        ".model",
    }


def test_a_full_export_of_a_network_with_an_adapter_is_refused(tmp_path, sd3):
    add_lora(sd3.transformer)
    with pytest.raises(ValueError, match="transformer must not carry an adapter"):
        export_full(sd3, tmp_path / "model", sd3.scheduler)
