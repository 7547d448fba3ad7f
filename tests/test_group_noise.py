"""Relations within a group: who is one with whom, noise that stays standard normal, rollouts that compute nodes once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.data import Prompt
from flowgrpo.group_noise import Distinct, Shared, Tree, check_group_noise, node_means
from flowgrpo.rollout import Dynamics, Noise, Row, replay, rollout
from flowgrpo.schedule import Pipeline
from flowgrpo.solvers import DpmSolverPp2M, Euler, Heun
from flowgrpo.transitions import Cps, FlowSde
from tests.test_rollout import policy_of

TREE = Tree([0, 2], factor=2, spread=4.0)
PROMPTS = [Prompt("a red cube", 0), Prompt("two cats beside a dog", 1)]
ROWS = [Row(prompt, sample) for prompt in PROMPTS for sample in range(4)]


def test_samples_part_where_the_rule_says():
    window = range(2, 4)
    assert [Shared().node(3, step, window) for step in (-1, 0, 1, 2, 3, 4)] == [0, 0, 0, 3, 3, 3]
    assert [Distinct().node(3, step, window) for step in (-1, 0, 4)] == [3, 3, 3]
    assert [[TREE.node(i, step, range(4)) for i in range(4)] for step in (-1, 0, 1, 2, 3)] == [
        [0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True).map(sorted), st.integers(2, 3))
def test_a_tree_has_factor_times_as_many_nodes_after_each_split(splits, factor):
    tree = Tree(splits, factor)
    for step in range(-1, 8):
        nodes = [tree.node(i, step, range(7)) for i in range(tree.leaves)]
        assert len(set(nodes)) == factor ** sum(split <= step for split in splits)
        assert all(tree.node(node, step, range(7)) == node for node in nodes)


def test_sibling_noise_is_standard_normal_and_correlated_as_the_spread_says():
    tree = Tree([0], factor=2, spread=2.0)
    a, b = (tree.step_noise((0, 0, 0), i, 0, range(3), (200_000,)) for i in (0, 1))
    assert a.mean().abs() < 0.01
    assert (a.std() - 1).abs() < 0.01
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(correlation - 1 / (1 + 2.0**2)) < 0.01


def test_a_tree_that_does_not_fit_is_refused():
    check_group_noise(TREE, 4, range(3))
    with pytest.raises(ValueError, match=r"group_size must be factor \*\* splits = 4 for this tree, got 12"):
        check_group_noise(TREE, 12, range(3))
    with pytest.raises(ValueError, match=r"must lie in the window, steps 1 to 2, got \[0\]"):
        check_group_noise(TREE, 4, range(1, 3))
    for wrong in ({"splits": []}, {"splits": [2, 1]}, {"factor": 1}, {"spread": 0.0}):
        with pytest.raises(ValueError, match="group_noise"):
            Tree(**wrong)


def test_node_means_are_means_over_leaves_without_the_missing_ones():
    values = torch.tensor([1.0, 3.0, float("nan"), 5.0, float("nan"), 7.0])
    nodes = torch.tensor([[0, 0], [0, 0], [0, 2], [0, 2], [1, 0], [1, 1]])
    torch.testing.assert_close(node_means(values, nodes), torch.tensor([2.0, 2.0, 5.0, 5.0, float("nan"), 7.0]), equal_nan=True)


def test_a_tree_calls_the_network_once_per_node_and_stores_one_path_per_leaf():
    policy = policy_of("sd3")
    dynamics = Dynamics(policy.grid(5, Pipeline()), range(0, 4), Cps(0.8), Euler())
    trajectory = rollout(policy, ROWS, dynamics, Noise(0, 0, TREE), 3)
    assert trajectory.calls == 2 * (2 * 2 + 4 * 3)  # two prompts; two nodes for two steps, four for three
    x = trajectory.latents
    assert torch.equal(x[0, :3], x[1, :3])
    assert not torch.equal(x[0, 3], x[1, 3])
    assert torch.equal(x[0, 0], x[2, 0])
    assert not torch.equal(x[0, 1], x[2, 1])
    assert torch.equal(trajectory.log_probs[0, :2], trajectory.log_probs[1, :2])
    assert trajectory.nodes(range(0, 8), 1) == {0: 2, 2: 2, 4: 2, 6: 2}
    assert trajectory.nodes(range(1, 4), 1) == {1: 1, 2: 2}
    for step in dynamics.window:
        rows = list(trajectory.nodes(range(8), step))
        gap = replay(policy, trajectory, rows, step, grad=False).log_prob - trajectory.log_probs[rows, step]
        assert gap.abs().max() < 1e-6


@pytest.mark.parametrize("tail", [None, DpmSolverPp2M(), Heun()])
@pytest.mark.parametrize("within", [Shared(), Distinct(), Tree([1, 2])])
def test_calls_planned_are_calls_made(within, tail):
    from flowgrpo.plan import cost

    policy = policy_of("sd3")
    grid = policy.grid(8, Pipeline()).with_tail(3, 3)
    dynamics = Dynamics(grid, range(1, 3), FlowSde(0.7), Heun(), tail)
    seen = []
    policy.networks["transformer"].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    trajectory = rollout(policy, ROWS, dynamics, Noise(0, 0, within), 5)
    assert sum(seen) == trajectory.calls == pytest.approx(len(ROWS) * cost(dynamics, within, 4).rollout)
    assert trajectory.x0.isfinite().all()


def test_a_finer_tail_comes_closer_to_the_limit_and_the_second_order_one_faster():
    policy = policy_of("sd3")
    grid = policy.grid(8, Pipeline())
    base = Dynamics(grid, range(1, 3), FlowSde(0.3), Euler())

    def end(solver, num_steps):
        dynamics = replace(base, grid=grid.with_tail(3, num_steps), tail=solver)
        return rollout(policy, ROWS[:1], dynamics, Noise(0, 0, Shared()), 1).x0

    exact = end(Heun(), 80)
    error = {(type(s), n): (end(s, n) - exact).norm() for s in (Euler(), DpmSolverPp2M(), Heun()) for n in (4, 8)}
    assert all(error[kind, 8] < error[kind, 4] for kind in (Euler, DpmSolverPp2M, Heun))
    assert error[DpmSolverPp2M, 8] < error[Euler, 8]
    assert error[Heun, 8] < error[Euler, 8]
