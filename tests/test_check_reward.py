"""The checker of reward models: ours pass, and each planted fault is found by the check that is meant for it."""

import sys
from pathlib import Path
from threading import current_thread, main_thread

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import check_reward  # pyright: ignore[reportMissingImports]

ASSETS = Path(__file__).parents[1] / "assets" / "shapes"


def brightness(media, prompts):
    return media.flatten(1).mean(1)


class Sound:
    range = (0.0, 1.0)

    def __call__(self, media, prompts):
        return brightness(media, prompts)


class Column(Sound):
    def __call__(self, media, prompts):
        return brightness(media, prompts)[:, None]


class Relative(Sound):
    range = (-1.0, 1.0)

    def __call__(self, media, prompts):
        return brightness(media, prompts) - brightness(media, prompts).mean()


class Moody(Sound):
    calls = 0

    def __call__(self, media, prompts):
        self.calls += 1
        return brightness(media, prompts) * 0.5**self.calls


class Writes(Sound):
    def __call__(self, media, prompts):
        scores = brightness(media, prompts)
        media.mul_(0.5)
        return scores


class TooHigh(Sound):
    def __call__(self, media, prompts):
        return 255 * brightness(media, prompts)


class Blind(Sound):
    """0 / 0 where a picture is black."""

    def __call__(self, media, prompts):
        return media[:, :, 0].flatten(1).mean(1) / media.flatten(1).amax(1)


class Sorts(Sound):
    def __call__(self, media, prompts):
        return brightness(media, prompts).sort().values


class Seeds(Sound):
    def __call__(self, media, prompts):
        torch.manual_seed(0)
        return brightness(media, prompts)


class MainThreadOnly(Sound):
    def __call__(self, media, prompts):
        assert current_thread() is main_thread(), "an event loop is needed"
        return brightness(media, prompts)


class Square(Sound):
    def __call__(self, media, prompts):
        return torch.linalg.det(media.flatten(0, 2)[:: media.shape[1] * 3]).sigmoid()


class Vague(Sound):
    def applies(self, prompt):
        return len(prompt.text)


class Same(Sound):
    def __call__(self, media, prompts):
        return torch.full((len(media),), 0.5)


class Upside(Sound):
    range = (1.0, 0.0)


FAULTS = {
    Column: "gives_one_score_a_sample", Relative: "does_not_see_neighbours", Moody: "is_deterministic",
    Writes: "leaves_its_input", TooHigh: "stays_in_its_range", Blind: "gives_one_score_a_sample",
    Sorts: "pairs_by_position", Seeds: "leaves_the_generators", MainThreadOnly: "works_in_a_thread",
    Square: "takes_other_sizes", Vague: "knows_where_it_applies", Same: "tells_pictures_apart", Upside: "says_what_it_is",
}  # fmt: skip


def run(capsys, name, *arguments):
    code = check_reward.main([name, *arguments])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tests.test_check_reward:Sound", ()),
        ("tests.toys:redness", ()),
        ("tests.reward_faults:Redder", ()),
        ("tests.reward_faults:Latents", ()),
        ("reward_models.shapes:Shapes", ("--size", "32", "32", "--prompts", str(ASSETS / "prompts" / "heldout.jsonl"))),
        (
            "reward_models.aesthetic:Aesthetic",
            ("--size", "32", "32", "--args", f"{{clip: {ASSETS / 'clip'}, head: {ASSETS / 'aesthetic' / 'head.safetensors'}}}"),
        ),
        ("reward_models.sharpness:Sharpness", ()),
        ("reward_models.motion:Motion", ("--frames", "3", "--size", "32", "32")),
        ("reward_models.flicker:Flicker", ("--frames", "4")),
        (
            "reward_models.temporal_consistency:TemporalConsistency",
            ("--frames", "3", "--args", f"{{model: {ASSETS / 'clip'}}}"),
        ),
        ("reward_models.frames:Frames", ("--frames", "3", "--args", "{model: 'tests.toys:redness'}")),
        ("reward_models.gate:Gate", ("--args", "{model: 'tests.toys:redness', threshold: 0.5}")),
        (
            "reward_models.shapes_proxies:ColourCoverage",
            ("--size", "32", "32", "--prompts", str(ASSETS / "prompts" / "heldout.jsonl")),
        ),
        ("reward_models.shapes_proxies:Foreground", ("--size", "32", "32")),
        ("reward_models.colourfulness:Colourfulness", ("--frames", "3")),
        ("reward_models.jpeg_size:JpegSize", ("--args", "{sign: incompressible}")),
        ("reward_models.clip_score:ClipScore", ("--args", f"{{model: {ASSETS / 'clip'}}}")),
    ],
)
def test_ours_pass(capsys, name, arguments):
    code, said = run(capsys, name, *arguments)
    assert code == 0, said
    assert f"{len(check_reward.CHECKS)} of {len(check_reward.CHECKS)} checks passed" in said


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_planted_fault_is_found_by_its_check(capsys, fault):
    code, said = run(capsys, f"tests.test_check_reward:{fault.__name__}")
    assert code == 1
    assert f"fails {FAULTS[fault].replace('_', ' ')}: " in said, said


def test_what_is_no_model_is_one_line(capsys):
    assert check_reward.main(["tests.toys:nobody"]) == 1
    assert "nobody" in capsys.readouterr().err
    assert check_reward.main(["reward_models.jpeg_size:JpegSize", "--args", "{sing: compressible}"]) == 1
    assert "sing" in capsys.readouterr().err
