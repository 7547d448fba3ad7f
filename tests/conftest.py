"""Shape and type checks of the whole library, no network, few threads, and tiny pipelines as fixtures."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from jaxtyping import install_import_hook

install_import_hook("flowgrpo", "beartype.beartype")

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("unhurried")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

from tests.tiny_pipelines import build


@pytest.fixture
def sd3() -> Any:
    """A tiny Stable Diffusion 3."""
    return build("sd3")


@pytest.fixture
def flux() -> Any:
    """A tiny FLUX, guidance-distilled."""
    return build("flux")


@pytest.fixture
def qwen_image() -> Any:
    """A tiny Qwen-Image."""
    return build("qwen_image")


@pytest.fixture
def wan() -> Any:
    """A tiny Wan with its default UniPC scheduler."""
    return build("wan")


@pytest.fixture
def wan_euler() -> Any:
    """A tiny Wan with a flow-match Euler scheduler."""
    return build("wan_euler")


@pytest.fixture
def tiny() -> Callable[[str], Any]:
    """Builds a tiny pipeline by name."""
    return build
