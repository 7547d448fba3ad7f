"""The recipes: every file is read, fits together, is planned, and holds what was published."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.build import build
from flowgrpo.choices import Choices, choose
from flowgrpo.config import RunConfig, load_config
from flowgrpo.forecast import forecast
from flowgrpo.slots import import_object

ROOT = Path(__file__).parent.parent
RECIPES = {str(path.relative_to(ROOT / "configs")): path for path in sorted((ROOT / "configs").rglob("*.yaml"))}
SLOWER = {f"shapes/{name}.yaml": 2e-4 for name in ("awm", "diffusion_nft", "vgrpo", "online_dpo")}
STUDY = "shapes/hacking.yaml"  # of signals: a method that is there already, on other rewards
METHODS = {
    "shapes": "flow_grpo flow_grpo_fast dance_grpo mixgrpo mixgrpo_flash mixgrpo_flash_star grpo_guard tempflow branch_grpo "
    "variance_window tic_grpo sequence_mean flow_dppo awm diffusion_nft vgrpo dgpo crd online_dpo rwr sft",
    "sd3.5-medium": "flow_grpo flow_grpo_fast mixgrpo grpo_guard tempflow flow_dppo awm diffusion_nft dgpo online_dpo",
    "flux.1-dev": "flow_grpo flow_grpo_fast dance_grpo mixgrpo mixgrpo_flash mixgrpo_flash_star grpo_guard tempflow "
    "branch_grpo vgrpo",
}
MIXGRPO = {
    "iterations": 300, "group_size": 12, "prompts_per_iteration": 32, "model.train": "full", "sampler.num_steps": 25,
    "sampler.height": 720, "sampler.width": 720, "sampler.schedule": {"use": "shifted", "shift": 3},
    "sampler.transition": {"use": "flow_sde", "noise_level": 0.7}, "sampler.group_noise": {"use": "shared"},
    "signal": {"use": "standardized_sum"}, "advantage": {"use": "none", "clip": 5}, "objective.clip_range": 1e-4,
    "objective.kl": 0, "optimizer.lr": 1e-5, "optimizer.weight_decay": 1e-4, "optimizer.max_grad_norm": 1.0,
    "optimizer.updates_per_iteration": 4, "evaluation.num_steps": 50,
}  # fmt: skip
FLOW_GRPO = {
    "group_size": 24, "prompts_per_iteration": 48, "model.train": "lora", "model.lora.init": "gaussian", "sampler.height": 512,
    "sampler.width": 512, "sampler.window": {"use": "all"}, "sampler.group_noise": {"use": "distinct"},
    "advantage": {"use": "global", "clip": 5}, "objective.clip_range": 1e-4, "optimizer.lr": 3e-4,
    "optimizer.weight_decay": 1e-4, "optimizer.updates_per_iteration": 2,
}  # fmt: skip
SD35 = {"model.lora.rank": 32, "model.lora.alpha": 64, "sampler.num_steps": 10, "evaluation.num_steps": 40}
FLUX = {"model.lora.rank": 64, "model.lora.alpha": 128, "sampler.num_steps": 6, "evaluation.num_steps": 28,
        "model.call": {"guidance_scale": 3.5}}  # fmt: skip
PLAIN = {
    "model.train": "lora", "model.lora.rank": 32, "model.lora.alpha": 64, "sampler.height": 512, "sampler.width": 512,
    "sampler.window": {"use": "none"}, "sampler.group_noise": {"use": "distinct"}, "evaluation.num_steps": 40,
    "prompts_per_iteration": 48, "optimizer.weight_decay": 1e-4, "optimizer.updates_per_iteration": 2,
}  # fmt: skip
SIZE_4 = {"use": "progressive", "size": 4, "interval": 25, "stride": 1, "roll_back": True}
PUBLISHED = {
    "flux.1-dev/mixgrpo.yaml": MIXGRPO | {"sampler.window": SIZE_4, "sampler.tail": None},
    "flux.1-dev/mixgrpo_flash.yaml": MIXGRPO
    | {"sampler.window": SIZE_4 | {"interval": 20}, "sampler.tail.solver": {"use": "dpmpp_2m"}, "sampler.tail.rate": 0.4},
    "flux.1-dev/mixgrpo_flash_star.yaml": MIXGRPO
    | {"sampler.window": {"use": "frozen", "size": 4, "start": 0}, "sampler.tail.solver": {"use": "dpmpp_2m"},
       "sampler.tail.rate": 0.2},
    "flux.1-dev/dance_grpo.yaml": MIXGRPO
    | {"sampler.window": {"use": "random", "size": 14}, "sampler.transition": {"use": "dance_sde", "noise_level": 0.3},
       "optimizer.updates_per_iteration": 3},
    "flux.1-dev/branch_grpo.yaml": {
        "group_size": 16, "sampler.group_noise": {"use": "tree", "splits": [0, 3, 6, 9], "factor": 2, "spread": 4.0},
        "sampler.transition": {"use": "dance_sde", "noise_level": 0.3},
    },
    "flux.1-dev/flow_grpo.yaml": FLOW_GRPO
    | FLUX
    | {"sampler.transition": {"use": "flow_sde", "noise_level": 0.9}, "objective.kl": 0},
    "flux.1-dev/flow_grpo_fast.yaml": FLOW_GRPO
    | FLUX
    | {"sampler.window": {"use": "random", "size": 3, "low": 0, "high": 0}, "objective.density": "unit",
       "sampler.transition": {"use": "cps", "noise_level": 0.8}, "objective.clip_range": 1e-5,
       "advantage": {"use": "group", "clip": 5}},
    "sd3.5-medium/flow_grpo.yaml": FLOW_GRPO
    | SD35
    | {"sampler.guidance_scale": 4.5, "sampler.transition": {"use": "flow_sde", "noise_level": 0.7}},
    "sd3.5-medium/flow_grpo_fast.yaml": FLOW_GRPO
    | SD35
    | {"group_size": 18, "prompts_per_iteration": 64, "sampler.guidance_scale": 1.0, "objective.density": "unit",
       "sampler.window": {"use": "random", "size": 3, "low": 0, "high": 2}, "objective.clip_range": 1e-5,
       "sampler.transition": {"use": "cps", "noise_level": 0.8}},
    "sd3.5-medium/mixgrpo.yaml": SD35
    | {"group_size": 24, "sampler.window": {"use": "progressive", "size": 4, "interval": 150, "stride": 1},
       "sampler.guidance_scale": 4.5, "objective.kl": 0.001, "optimizer.lr": 3e-4, "optimizer.weight_decay": 1e-4,
       "prompts_per_iteration": 96, "optimizer.updates_per_iteration": 1},
    "sd3.5-medium/grpo_guard.yaml": {name: value for name, value in FLOW_GRPO.items() if name != "objective.clip_range"}
    | SD35
    | {"optimizer.lr": 1e-4, "step_weights": {"use": "step_size"}, "sampler.guidance_scale": 4.5,
       "advantage": {"use": "group", "clip": 5}, "objective": {"use": "guard", "clip_range": 4e-6, "kl": 0}},
    "sd3.5-medium/tempflow.yaml": {"sampler.window": {"use": "one_step"}, "step_weights": {"use": "noise"}},
    "sd3.5-medium/flow_dppo.yaml": {
        "sampler.num_steps": 10, "sampler.window": {"use": "random", "size": 2, "low": 0, "high": 3}, "optimizer.lr": 3e-4,
        "objective": {"use": "dppo", "threshold": 1e-5, "kl": 0},
    },
    "sd3.5-medium/awm.yaml": PLAIN
    | {"group_size": 16, "sampler.num_steps": 14, "sampler.guidance_scale": 1.0, "optimizer.lr": 3e-4, "levels.count": 6,
       "objective": {"use": "awm", "weighting": "huber", "power": 0.25, "clip_range": 1e-5, "kl": 1.0},
       "reference": {"use": "average", "decay": 0.3}},
    "sd3.5-medium/diffusion_nft.yaml": PLAIN
    | {"group_size": 16, "sampler.num_steps": 14, "sampler.guidance_scale": 1.0, "optimizer.lr": 1e-4, "levels.count": 4,
       "levels.low": 0.5, "objective": {"use": "nft", "beta": 1.0, "old_decay": 0.5}},
    "sd3.5-medium/dgpo.yaml": PLAIN
    | {"group_size": 24, "prompts_per_iteration": 24, "model.lora.rank": 64, "model.lora.alpha": 128, "optimizer.lr": 3e-4,
       "sampler.num_steps": 10, "sampler.guidance_scale": 4.5, "evaluation.num_steps": 14,
       "optimizer.updates_per_iteration": 1, "objective": {"use": "dgpo", "beta": 10, "kl": 0.001}},
    "sd3.5-medium/online_dpo.yaml": PLAIN
    | {"group_size": 4, "sampler.num_steps": 40, "sampler.guidance_scale": 1.0, "optimizer.lr": 1e-5,
       "objective": {"use": "dpo", "beta": 100}, "samples": {"use": "extremes", "best": 1, "worst": 1}},
    "flux.1-dev/vgrpo.yaml": MIXGRPO
    | {"iterations": 150, "sampler.window": {"use": "none"}, "sampler.group_noise": {"use": "distinct"},
       "sampler.transition": {"use": "flow_sde"}, "levels.use": "stratified", "levels.count": 4,
       "objective.use": "vgrpo", "objective.clip_range": 1e-3},
}  # fmt: skip


def setting(config: RunConfig, name: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in name.split("."):
        value = value[part]
    return value


def whole_groups(choices: Choices, config: RunConfig) -> bool:
    """Whether groups must lie on one process and in one update."""
    needed = getattr(choices.objective, "needs_groups", False)
    return needed or choices.samples.count(config.group_size) < config.group_size


def test_every_method_has_its_recipe_and_every_recipe_its_method() -> None:
    expected = {f"{model}/{method}.yaml" for model, methods in METHODS.items() for method in methods.split()}
    assert set(RECIPES) == expected | {STUDY}
    names = [load_config(path).name for path in RECIPES.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_planned_without_its_pipeline_or_prompts(recipe: str) -> None:
    config = load_config(RECIPES[recipe], ["model.pipeline=./nowhere", "prompts.train=./nowhere.txt"])
    plan = forecast(config)
    window = choose(config).window
    assert 0 < plan.cost.replay <= plan.unshared.replay < config.sampler.num_steps
    assert plan.cost.rollout <= plan.unshared.rollout <= config.sampler.num_steps
    assert plan.measured is hasattr(window, "observe")


@pytest.mark.parametrize("recipe", [r for r in RECIPES if not r.startswith("shapes/")])
def test_a_large_recipe_can_be_shared_by_the_processes_of_its_paper(recipe: str) -> None:
    config = load_config(RECIPES[recipe])
    choices, updates = choose(config), config.optimizer.updates_per_iteration
    for processes in (8,) if whole_groups(choices, config) else (8, 24 if recipe == "sd3.5-medium/mixgrpo.yaml" else 32):
        assert forecast(config, processes).geometry.samples_per_process * processes == config.group_size * (
            config.prompts_per_iteration
        )
        assert not whole_groups(choices, config) or config.prompts_per_iteration % (processes * updates) == 0


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_holds_the_published_numbers(recipe: str) -> None:
    config = load_config(RECIPES[recipe])
    assert {name: setting(config, name) for name in PUBLISHED[recipe]} == PUBLISHED[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reward_models_of_a_recipe_exist_and_take_its_arguments(recipe: str) -> None:
    for reward in load_config(RECIPES[recipe]).rewards:
        inspect.signature(import_object(reward.use, reward.name)).bind(**reward.args)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_lines_of_a_recipe_say_what_it_is(recipe: str) -> None:
    head = " ".join(line.lstrip("# ") for line in RECIPES[recipe].read_text().split("name:")[0].splitlines())
    words = ["arXiv"] if "shapes" in recipe else ["arXiv", "Hardware", "Expect", "Not run here", "ours"]
    assert [word for word in words if word not in head] == []


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.startswith("shapes/") and r != STUDY])
def test_recipes_of_the_shapes_differ_in_their_method_alone(recipe: str) -> None:
    ours, mixgrpo = load_config(RECIPES[recipe]), load_config(RECIPES["shapes/mixgrpo.yaml"])
    for part in ("model", "prompts", "rewards", "iterations", "seed", "evaluation", "signal"):
        assert getattr(ours, part) == getattr(mixgrpo, part), part
    assert ours.optimizer == mixgrpo.optimizer.model_copy(update={"lr": SLOWER.get(recipe, mixgrpo.optimizer.lr)})
    assert ours.sampler.num_steps == 10
    assert ours.group_size * ours.prompts_per_iteration == 96


def test_the_study_of_signals_differs_from_its_method_in_rewards_alone() -> None:
    study, method = (load_config(RECIPES[name]).model_dump() for name in (STUDY, "shapes/diffusion_nft.yaml"))
    assert {part for part in study if study[part] != method[part]} == {"name", "iterations", "rewards"}


@pytest.mark.parametrize("recipe", ["shapes/branch_grpo.yaml", "shapes/mixgrpo_flash.yaml"])
def test_a_recipe_of_the_shapes_is_built_and_plans_the_calls_of_its_own_levels(recipe: str) -> None:
    from flowgrpo.plan import cost, micro_batches

    config = load_config(RECIPES[recipe], ["iterations=1"])
    parts = build(config)
    plan = forecast(config)
    dynamics = parts.dynamics(plan.windows[0])
    batches = micro_batches(parts.geometry, config.optimizer.micro_batch_size)
    own = cost(dynamics, parts.choices.group_noise, config.group_size, batches)
    assert own == plan.cost


def test_the_prices_in_the_docs_are_the_planned_ones() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    table = page.split("| FLUX.1-dev |")[1].split("\n\n")[0].splitlines()[2:]
    rows = {cells[1].strip(" `"): [cell.strip() for cell in cells[2:-1]] for cells in (line.split("|") for line in table)}
    plans = {name: forecast(load_config(RECIPES[f"flux.1-dev/{name}.yaml"])) for name in METHODS["flux.1-dev"].split()}
    assert rows.keys() == plans.keys()
    for name, plan in plans.items():
        c = plan.cost
        calls = [c.prefix, c.window, c.tail, c.rollout, plan.unshared.rollout, c.replay]
        price = plan.price / plans["dance_grpo"].price
        assert rows[name] == [*(f"{x:.2f}" for x in calls), f"{plan.updates:,}", f"{price:.2f}"], name
