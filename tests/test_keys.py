"""Keyed randomness."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flowgrpo
from flowgrpo.keys import generator, key, normal

PARTS = st.lists(st.one_of(st.integers(-(10**6), 10**6), st.text(max_size=4)), max_size=4)


@given(PARTS, PARTS)
def test_different_parts_give_different_keys_and_equal_parts_equal_ones(first, second):
    assert (key(*first) == key(*second)) == (first == second)
    assert 0 <= key(*first) < 2**63


def test_the_encoding_is_written_down_so_that_it_never_changes():
    digest = hashlib.sha256(b"s5:starti2:-7").digest()
    assert key("start", -7) == int.from_bytes(digest[:8], "big") >> 1


def test_types_and_joints_matter():
    assert len({key(1), key("1"), key("ab", "c"), key("a", "bc"), key("abc"), key("", "abc"), key()}) == 7


def test_another_process_draws_the_same_noise():
    code = "from flowgrpo.keys import *; print(key(3, 'x'), normal((2, 3), 3, 'x').tolist())"
    environment = {**os.environ, "PYTHONPATH": str(Path(flowgrpo.__file__).parents[1])}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"{key(3, 'x')} {normal((2, 3), 3, 'x').tolist()}"


def test_noise_is_standard_normal_and_samples_do_not_resemble_each_other():
    noise = torch.stack([normal((64, 64), 0, 1, 2, sample) for sample in range(8)]).flatten(1)
    assert noise.dtype == torch.float32
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    correlation = torch.corrcoef(noise) - torch.eye(8)
    assert correlation.abs().max() < 5 / 64


def test_noise_uses_more_than_the_32_bits_that_a_torch_seed_keeps():
    low_bits = [key(i) & 0xFFFFFFFF for i in range(2)]
    assert low_bits[0] != low_bits[1]
    assert not torch.equal(normal((8,), 0), normal((8,), 1))
    assert torch.equal(torch.randn(8, generator=generator("a")), torch.randn(8, generator=generator("a")))


def test_a_part_without_a_stable_text_form_is_refused():
    with pytest.raises(TypeError):
        key(0.5)
