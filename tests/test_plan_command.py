"""`flowgrpo plan`, as a user meets it, and its numbers against those counted on a network."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from flowgrpo import cli
from flowgrpo.build import build, with_tail
from flowgrpo.choices import choose, when
from flowgrpo.config import parse_config
from flowgrpo.data import Prompt
from flowgrpo.forecast import forecast, picture, planned_windows, possible_windows, sample_size
from flowgrpo.group_noise import Distinct, Shared, Tree
from flowgrpo.metrics import Metrics
from flowgrpo.plan import cost, micro_batches
from flowgrpo.policy import Conditions, Policy
from flowgrpo.rollout import Dynamics, Noise, Row, replay, rollout
from flowgrpo.schedule import Grid, Pipeline, shifted_sigmas
from flowgrpo.trainer import Trainer
from tests import toys
from tests.tiny_pipelines import CALLS
from tests.tiny_pipelines import build as tiny

ROOT = Path(__file__).parent.parent
SHAPES = ROOT / "configs" / "shapes"
FLUX = ROOT / "configs" / "flux.1-dev"
PUBLISHED = {  # overrides of MixGRPO at 300 iterations, group 12, 25 steps; most calls a sample, rollout
    "mixgrpo": ({"window": {"use": "progressive", "size": 4, "interval": 25}}, 20.2),
    "flash": (
        {"window": {"use": "progressive", "size": 4, "interval": 25}, "tail": {"solver": "dpmpp_2m", "rate": 0.4}},
        11.5,
    ),
    "flash*": ({"window": {"use": "frozen", "size": 4}, "tail": {"solver": "dpmpp_2m", "rate": 0.2}}, 8.0),
}


def config(sampler: dict[str, Any], **changes: Any) -> Any:
    """A config whose pipeline, prompts and reward do not exist."""
    raw = {
        "name": "planned", "iterations": 300, "group_size": 12, "prompts_per_iteration": 2, "model": {"pipeline": "no/where"},
        "prompts": {"train": "nowhere.txt"}, "rewards": [{"name": "r", "use": "no.where:Reward"}],
        "sampler": {"num_steps": 25, **sampler}, "optimizer": {"updates_per_iteration": 2},
    }  # fmt: skip
    return parse_config(raw | changes)


def says(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result


def counted(policy: Policy) -> list[int]:
    """The rows of every network call from now on."""
    seen: list[int] = []
    next(iter(policy.networks.values())).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_published_schedules_cost_no_more_than_their_bounds_planned_and_counted(method: str) -> None:
    sampler, bound = PUBLISHED[method]
    settings = config(sampler)
    plan = forecast(settings)
    assert plan.cost.rollout <= bound
    assert plan.cost.replay == 4

    choices = choose(settings)
    size = {name: CALLS["sd3"][name] for name in ("height", "width")}
    policy = Policy(tiny("sd3"), Conditions(**size, call={"max_sequence_length": 8}))
    grid, rows, seen = policy.grid(25, Pipeline()), [Row(Prompt("a red cube", 0), i) for i in range(12)], counted(policy)
    total = 0
    for window, iterations in Counter(planned_windows(settings, choices.window)).items():
        seen.clear()
        moves = Dynamics(
            with_tail(grid, window, settings.sampler.tail), window, choices.transition, choices.solver, choices.tail
        )
        trajectory = rollout(policy, rows, moves, Noise(0, 0, choices.group_noise), 12)
        total += iterations * sum(seen)
    assert total / 300 / 12 == pytest.approx(plan.cost.rollout)
    seen.clear()
    for step in trajectory.dynamics.window:
        replay(policy, trajectory, range(12), step, grad=False)
    assert sum(seen) / 12 == plan.cost.replay


def test_shared_start_noise_saves_eleven_twelfths_of_the_mean_prefix() -> None:
    plan = forecast(config(PUBLISHED["mixgrpo"][0]))
    assert plan.unshared.rollout == 25
    assert plan.cost.rollout == pytest.approx(25 - 5.5 * 11 / 12)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "sampler",
    [
        {"window": "all", "group_noise": {"use": "tree", "splits": [0, 2]}},
        {"window": {"use": "frozen", "size": 1, "start": 1}},
        {"window": {"use": "frozen", "size": 1, "start": 1}, "group_noise": "distinct", "solver": "heun"},
        {"window": {"use": "frozen", "size": 1, "start": 1}, "tail": {"solver": "dpmpp_2m", "num_steps": 1}},
        {"window": {"use": "variance", "size": 1, "every": 1, "branches": 3, "probe_prompts": 1}},
    ],
)
def test_an_iteration_makes_the_calls_that_were_planned(sampler: Any, micro_batch_size: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "planned"
    folder.mkdir(exist_ok=True)
    raw = toys.raw_config(folder, iterations=1, optimizer__micro_batch_size=micro_batch_size)
    raw["sampler"] |= sampler
    settings = parse_config(raw)
    plan, parts = forecast(settings), build(settings)
    metrics = Metrics(folder / "metrics.jsonl")
    seen = counted(parts.policy)
    Trainer(parts, metrics).iteration(0)
    samples = plan.geometry.samples
    if plan.measured:  # planned over all places of the window, so this one is planned by itself
        window = parts.choices.window.at(when(settings, 0))
        batches = micro_batches(parts.geometry, micro_batch_size)
        own = cost(parts.dynamics(window), parts.choices.group_noise, settings.group_size, batches)
        assert sum(seen) == pytest.approx(samples * (own.rollout + own.replay + plan.probe))
    else:
        assert sum(seen) == pytest.approx(samples * (plan.cost.rollout + plan.cost.replay))


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"use": "clipped_ratio", "kl": 0.1}},
        {"objective": {"use": "clipped_ratio"}, "samples": "extremes"},
        {"objective": {"use": "nft"}},
        {"objective": {"use": "nft", "kl": 0.1, "old_decay": 0.5}},
        {"objective": {"use": "dpo"}, "samples": "extremes"},
        {"objective": {"use": "rwr"}},
    ],
)
def test_what_old_policy_and_reference_are_asked_is_planned_too(changes: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "planned"
    folder.mkdir(exist_ok=True)
    raw = toys.raw_config(folder, iterations=1, logging__watch_every=0, optimizer__micro_batch_size=4, **changes)
    raw["sampler"]["group_noise"] = "distinct"
    settings = parse_config(raw)
    plan, parts = forecast(settings), build(settings)
    seen = counted(parts.policy)
    Trainer(parts, Metrics(folder / "metrics.jsonl")).iteration(0)
    c = plan.cost
    assert c.compared > 0 or changes["objective"]["use"] in ("rwr", "clipped_ratio")
    assert sum(seen) == pytest.approx(plan.geometry.samples * (c.rollout + c.replay + c.compared))


def test_groups_that_would_be_cut_are_refused_by_the_plan() -> None:
    settings = config({})
    with pytest.raises(ValueError, match="compares the samples of a group"):
        forecast(parse_config({**settings.model_dump(), "objective": "dgpo", "prompts_per_iteration": 1, "advantage": "group"}))


@pytest.mark.parametrize("name", ["sd3", "flux", "qwen_image", "wan_euler"])
def test_the_planned_memory_is_that_of_the_trajectory(name: str, tmp_path: Path) -> None:
    pipeline = tiny(name)
    pipeline.save_pretrained(tmp_path)
    size = {k: v for k, v in CALLS[name].items() if k in ("height", "width", "num_frames")}
    settings = config({"num_steps": 3, "window": {"use": "frozen", "size": 2}, **size}, model={"pipeline": str(tmp_path)})
    plan = forecast(settings)
    assert "assumed" not in plan.size.words
    call = {k: v for k, v in CALLS[name].items() if k == "max_sequence_length"}
    policy = Policy(pipeline, Conditions(**size, call=call))
    choices = choose(settings)
    moves = Dynamics(policy.grid(3, Pipeline()), range(2), choices.transition, choices.solver)
    rows = [Row(Prompt("a red cube", i), j) for i in range(2) for j in range(12)]
    trajectory = rollout(policy, rows, moves, Noise(0, 0, Shared()), 24)
    assert plan.memory == trajectory.latents.nbytes + trajectory.x0.nbytes + trajectory.media.nbytes


def test_what_the_config_does_not_say_of_the_size_is_assumed_in_words() -> None:
    known = sample_size(config({"height": 720, "width": 480}))
    assert (known.latent, known.media) == (16 * 90 * 60, 3 * 720 * 480)
    assert known.words.endswith("(16 channels, 1/8 of the size assumed)")
    assert "1024 pixels" in sample_size(config({})).words
    film = sample_size(config({"height": 480, "width": 832, "num_frames": 81}))
    assert (film.latent, film.media) == (16 * 21 * 60 * 104, 3 * 81 * 480 * 832)
    assert "1/4 of the frames assumed" in film.words


def test_more_processes_share_the_samples_and_their_memory() -> None:
    one, four = (forecast(config(PUBLISHED["mixgrpo"][0]), n) for n in (1, 4))
    assert one.memory == 4 * four.memory
    assert four.geometry.samples_per_process == 6
    assert four.cost.prefix == pytest.approx(2 * one.cost.prefix)  # half a group on each process: its prefix is made twice


@pytest.mark.parametrize("within", [Shared(), Distinct(), Tree([0, 1, 3])])
def test_the_cost_is_that_of_counting_every_node(within: Any) -> None:
    choices = choose(config({"num_steps": 6, "window": "all"}))
    sigmas = shifted_sigmas(6)
    for window in [range(0, 5)] if isinstance(within, Tree) else [range(0, 2), range(3, 5)]:
        moves = Dynamics(Grid(sigmas, torch.tensor(sigmas[:-1])), window, choices.transition, choices.solver)
        c = cost(moves, within, 8)
        nodes = [len({within.node(i, step, window) for i in range(8)}) for step in range(6)]
        assert c.rollout * 8 == pytest.approx(sum(nodes))
        assert c.replay * 8 == pytest.approx(sum(nodes[step] for step in window))


def test_the_picture_is_dark_where_windows_are_and_blank_where_they_never_come() -> None:
    windows = [range(i // 10, i // 10 + 2) for i in range(40)]
    rows = picture(windows, 6)
    cells = [row[row.index("|") + 1 : -1] for row in rows]
    assert [len(cell) for cell in cells] == [20] * 6
    assert cells[0] == "█" * 5 + " " * 15
    assert cells[1] == "█" * 10 + " " * 10
    assert cells[5] == " " * 20
    assert {cell for row in picture([range(0, 1), range(1, 2)] * 20, 2) for cell in row.split("|")[1]} == {"▒"}
    assert len(picture([range(0, 1)] * 3, 2)[0].split("|")[1]) == 3


def test_a_measured_window_is_averaged_over_every_place() -> None:
    settings = config({"num_steps": 6, "window": {"use": "variance", "size": 2}})
    assert possible_windows(settings, choose(settings).window) == tuple(range(s, s + 2) for s in range(4))


def test_one_config_is_told_in_full() -> None:
    output = says(FLUX / "mixgrpo.yaml").output
    for words in ("plan of flux-mixgrpo", "rollout 19.96", "rollout 25.00", "1,200 in all", "step 14 |", "assumed"):
        assert words in output
    (row,) = [line for line in output.splitlines() if line.startswith("step  0")]
    assert row == "step  0 |█▓                  |"


def test_a_window_that_follows_measurements_says_so() -> None:
    output = says(SHAPES / "variance_window.yaml").output
    assert "decided by measurement" in output
    assert "step 0" not in output


def test_several_configs_make_one_table_against_dance_grpo() -> None:
    output = says(*sorted(SHAPES.glob("*.yaml"))).output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.startswith("shapes-")}
    assert len(rows) == len(list(SHAPES.glob("*.yaml")))
    assert all(len(row) == 8 for row in rows.values())
    assert rows["shapes-dance-grpo"][-1] == "1.00"
    assert float(rows["shapes-mixgrpo-flash"][-1]) < float(rows["shapes-mixgrpo"][-1]) < 1 < float(rows["shapes-flow-grpo"][-1])
    assert "shapes-dance-grpo is 1" in output


def test_settings_behind_the_configs_change_all_of_them() -> None:
    output = says(SHAPES / "mixgrpo.yaml", SHAPES / "flow_grpo.yaml", "sampler.num_steps=9", "iterations=5").output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.startswith("shapes-")}
    assert rows["shapes-flow-grpo"][3] == "9.00"
    assert {row[6] for row in rows.values()} == {"10"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SHAPES / "mixgrpo.yaml", "sampler.num_steps=3"], "window"),
        ([SHAPES / "mixgrpo.yaml", "sampler.window=progresive"], "did you mean 'progressive'"),
        ([SHAPES / "branch_grpo.yaml", "group_size=12"], "factor ** splits = 16"),
        ([SHAPES / "mixgrpo.yaml", "sampler.solver=dpmpp_2m"], "serves behind the window only"),
        ([SHAPES / "mixgrpo.yaml", "--processes", "7"], "num_processes=7"),
        ([SHAPES / "gone.yaml"], "gone.yaml' does not exist"),
        (["iterations=3"], "plan needs a config"),
    ],
)
def test_a_config_that_cannot_work_is_one_clear_line(arguments: list[Any], message: str) -> None:
    result = says(*arguments, code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_among_several_configs_the_faulty_one_is_named() -> None:
    result = says(SHAPES / "mixgrpo.yaml", SHAPES / "branch_grpo.yaml", "group_size=12", code=2)
    assert "branch_grpo.yaml: group_size must be" in result.stderr


def test_plan_works_in_a_shell_from_any_folder(tmp_path: Path) -> None:
    raw = yaml.safe_load((FLUX / "mixgrpo.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "flowgrpo.cli", "plan", "mine.yaml"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "plan of flux-mixgrpo" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
