"""The tiny pipelines are fit to test with."""

import pytest
import torch

from tests.tiny_pipelines import CALLS, build, run


@pytest.mark.parametrize("name", CALLS)
def test_two_builds_are_equal_and_the_prompt_and_every_layer_matter(name):
    pipeline = build(name)
    picture = run(name, pipeline)
    assert torch.equal(picture, run(name, build(name)))
    assert (picture - run(name, pipeline, "two blue balls")).abs().max() > 5e-3
    assert (picture - run(name, pipeline, seed=1)).abs().max() > 1e-2
    assert not any(module.training for module in pipeline.components.values() if isinstance(module, torch.nn.Module))
    assert all(parameter.any() for parameter in pipeline.transformer.parameters())
