"""Does a reward model keep its promises? Runs ours, or yours, through everything that training will ask of it.

    python scripts/check_reward.py my_rewards:Sharpness
    python scripts/check_reward.py reward_models.jpeg_size:JpegSize --args '{sign: compressible}' --size 64 96
    python scripts/check_reward.py my_rewards:Motion --frames 9 --prompts prompts.txt

Prints a line for each check and ends with exit code 1 if one fails. Pictures are smooth random ones, noise, black, white and
halves; with `--prompts` the prompts are yours, else a few plain ones. `my_rewards.py` may lie where you call it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
import yaml
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowgrpo.build import build_scorer
from flowgrpo.calling import Caller, checked
from flowgrpo.component import Component, Traits
from flowgrpo.config import parse_rewards
from flowgrpo.data import Prompt, load_prompts
from flowgrpo.media import from_pil
from flowgrpo.scoring import RANGE_SLACK, Scorer

WORD = "open"
TEXTS = ("a red circle", "two blue squares above a green triangle", f'a sign that says "{WORD}"', "ein Hund im Schnee")
TOLERANCE = 1e-3  # of a score, or of the range where it is wider than 1
LOW_PRECISION = 5e-2  # the same, under bfloat16


@dataclass(frozen=True)
class Case:
    """A model and what it is shown: media (b, f, 3, h, w) or pairs of them (b, 2, f, 3, h, w), a prompt each."""

    model: Callable[..., Any]
    shown: Tensor
    prompts: list[Prompt]

    def scores(self, rows: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The answer as training takes it. Raises what is wrong with it."""
        chosen = list(range(len(self.prompts)) if rows is None else rows)
        caller = Caller(Component("it", self.model, 1.0, dtype=dtype))
        return caller(self.shown[chosen].clone(), [self.prompts[row] for row in chosen])

    @property
    def traits(self) -> Traits:
        return Traits.of(self.model)

    def unequal(self, one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> str:
        """What to say of scores that should be the same; empty if they are."""
        low, high = self.traits.range or (0.0, 1.0)
        gap = float((one - other).abs().nan_to_num(torch.inf, torch.inf).max())
        return "" if gap <= tolerance * max(1.0, high - low) else f"scores differ by {gap:.3g}"


def says_what_it_is(case: Case) -> str:
    """unit, range, takes, needs_motion and compares are of their kinds."""
    traits = case.traits
    if not isinstance(traits.unit, str):
        return f"unit must be a text, got {traits.unit!r}"
    if not isinstance(traits.needs_motion, bool) or not isinstance(traits.compares, bool):
        return f"needs_motion and compares must be True or False, got {traits.needs_motion!r} and {traits.compares!r}"
    if traits.range is not None and not traits.range[0] < traits.range[1]:
        return f"range must be (low, high) with low below high, got {traits.range}"
    return ""


def gives_one_score_a_sample(case: Case) -> str:
    """A float tensor (b,), also for one sample, and finite for every picture."""
    for rows in (range(len(case.prompts)), [0]):
        shown = case.shown[list(rows)].clone()
        with torch.no_grad():
            scores = checked(case.model(shown, [case.prompts[row] for row in rows]), len(rows))
        if not scores.isfinite().all():
            return (
                f"scores must be finite, got {scores.tolist()}; a score that cannot be told is NaN only for what is no picture"
            )
    return ""


def stays_in_its_range(case: Case) -> str:
    """No score outside what the model declares; a judge's lie in [0, 1]."""
    low, high = (0.0, 1.0) if case.traits.compares else case.traits.range or (-torch.inf, torch.inf)
    scores = case.scores()
    inside = (scores >= low - RANGE_SLACK) & (scores <= high + RANGE_SLACK)
    return "" if bool(inside.all()) else f"range is ({low}, {high}), got {scores.tolist()}"


def tells_pictures_apart(case: Case) -> str:
    """Not one score for everything: such a reward teaches nothing."""
    scores = case.scores()
    return "" if len(scores.unique()) > 1 else f"all {len(scores)} pictures have the score {scores[0]:.4g}"


def is_deterministic(case: Case) -> str:
    """The same twice, whatever was scored in between."""
    first = case.scores()
    case.scores([len(case.prompts) - 1])
    return case.unequal(first, case.scores(), 0.0)


def does_not_see_neighbours(case: Case) -> str:
    """A sample alone has the score that it has in a batch."""
    alone = torch.cat([case.scores([row]) for row in range(len(case.prompts))])
    return case.unequal(case.scores(), alone)


def pairs_by_position(case: Case) -> str:
    """Samples in another order have their scores in that order."""
    order = list(reversed(range(len(case.prompts))))
    return case.unequal(case.scores()[order], case.scores(order))


def leaves_its_input(case: Case) -> str:
    """Neither media nor prompts are written to: other models and the pictures on disk come after it."""
    shown, prompts = case.shown.clone(), list(case.prompts)
    with torch.no_grad():
        case.model(shown, prompts)
    return "" if torch.equal(shown, case.shown) and prompts == case.prompts else "it has changed what it was given"


def leaves_the_generators(case: Case) -> str:
    """torch's global generator is where it was: seeds of others hang on it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260)
        before = torch.random.get_rng_state()
        case.scores()
        same = torch.equal(before, torch.random.get_rng_state())
    return "" if same else "it has drawn from, or seeded, torch's global generator"


def works_in_a_thread(case: Case) -> str:
    """Time-outs and scoring beside sampling call it from another thread."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(case.scores())
        except Exception as error:
            found.append(error)

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(600)
    if not found or isinstance(found[0], Exception):
        return f"in a thread of its own it fails: {found[0] if found else 'no answer in ten minutes'}"
    return case.unequal(case.scores(), found[0])


def works_in_bfloat16(case: Case) -> str:
    """With dtype: bfloat16 its scores are finite and near."""
    return case.unequal(case.scores(), case.scores(dtype=torch.bfloat16), LOW_PRECISION)


def takes_other_sizes(case: Case) -> str:
    """Wide pictures and larger ones too, or they are refused with a ValueError."""
    height, width = case.shown.shape[-2:]
    for size in ((height, 2 * width), (2 * height, 2 * width)):
        larger = torch.nn.functional.interpolate(case.shown.flatten(0, -4), size=size).unflatten(0, case.shown.shape[:-3])
        try:
            scores = Case(case.model, larger, case.prompts).scores()
        except ValueError:
            continue
        if not scores.isfinite().all():
            return f"scores of pictures of {size[0]} x {size[1]} are not finite"
    return ""


def never_sees_what_is_not_finite(case: Case) -> str:
    """A picture with a NaN pixel has no score, and its neighbours have theirs."""
    if case.traits.compares:
        return ""
    bad = case.shown.clone()
    bad[0].flatten()[0] = torch.nan
    takes = {"latents": bad} if case.traits.takes == "latents" else {}
    scorer = Scorer([Component("it", case.model, 1.0)])
    found = scorer(None if takes else bad, case.prompts, **takes).values[:, 0]
    if not found[0].isnan():
        return f"a picture with NaN has the score {found[0]:.4g}"
    return case.unequal(case.scores()[1:], found[1:])


def knows_where_it_applies(case: Case) -> str:
    """`applies`, if it is there, is True or False for every prompt."""
    one = Component("it", case.model, 1.0)
    for prompt in case.prompts:
        one.applies(prompt)
    return ""


CHECKS = (
    says_what_it_is, gives_one_score_a_sample, stays_in_its_range, tells_pictures_apart, is_deterministic,
    does_not_see_neighbours, pairs_by_position, leaves_its_input, leaves_the_generators, works_in_a_thread,
    works_in_bfloat16, takes_other_sizes, never_sees_what_is_not_finite, knows_where_it_applies,
)  # fmt: skip


def run_checks(case: Case) -> dict[str, str]:
    """By check what is wrong, empty where nothing is. An exception is what is wrong."""
    found = {}
    for check in CHECKS:
        try:
            found[check.__name__] = check(case)
        except Exception as error:
            found[check.__name__] = f"{type(error).__name__}: {error}"
    return found


def pictures(count: int, frames: int, height: int, width: int) -> Tensor:
    """Media (count, frames, 3, h, w) in [0, 1] of 8 bits: black, white, halves, noise, a word, smooth random ones that move."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4 + frames, 4 + frames, generator=generator)
    clips = [coarse[:, :, i : i + 4, i : i + 4] for i in range(frames)]
    media = torch.stack([torch.nn.functional.interpolate(clip, size=(height, width), mode="bilinear") for clip in clips], 1)
    media[0], media[1] = 0.0, 1.0
    media[2, :, :, :, : width // 2] = 0.0
    media[3] = torch.rand(frames, 3, height, width, generator=generator)
    media[4] = written(WORD, height, width)
    return (media * 255).round() / 255


def written(word: str, height: int, width: int) -> Tensor:
    """A picture (3, h, w) of a word, as wide as it fits."""
    picture = Image.new("RGB", (width, height), (250, 250, 245))
    font = ImageFont.load_default(0.4 * width)
    ImageDraw.Draw(picture).text((width / 2, height / 2), word, (10, 10, 30), font=font, anchor="mm")
    return from_pil([picture])[0, 0]


def case_of(model: Callable[..., Any], args: argparse.Namespace) -> Case:
    """What the model is shown."""
    texts = (
        [Prompt(text, i) for i, text in enumerate(TEXTS)] if args.prompts is None else list(load_prompts(args.prompts).prompts)
    )
    texts = [prompt for prompt in texts if getattr(model, "applies", lambda _: True)(prompt)] or texts
    prompts = [texts[i % len(texts)] for i in range(args.count)]
    traits = Traits.of(model)
    shown = pictures(args.count, args.frames, *args.size)
    if traits.takes == "latents":
        shown = torch.randn(args.count, 16, *args.size, generator=torch.Generator().manual_seed(0))
    if traits.compares:
        shown = torch.stack([shown, shown.roll(1, 0)], 1)
    return Case(model, shown, prompts)


def load(use: str, settings: dict[str, Any], device: str) -> Callable[..., Any]:
    """The model at an import path, made with these arguments, as a config would. Raises ValueError as that does."""
    return build_scorer(parse_rewards([{"name": "it", "use": use, "args": settings}]), device).components[0].model


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="import path, package.module:Name")
    add("--args", type=yaml.safe_load, default={}, help="arguments of its constructor, as YAML")
    add("--frames", type=int, default=1, help="of each clip")
    add("--size", type=int, nargs=2, default=(64, 64), metavar=("HEIGHT", "WIDTH"))
    add("--count", type=int, default=6, help="samples, at least 5")
    add("--prompts", help="prompt file (.txt or .jsonl)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of a model that takes one")
    args = parser.parse_args(argv)
    if args.count < 5 or args.frames < 1 or min(args.size) < 8:
        parser.error("at least 5 samples of 1 frame and 8 x 8 pixels are needed; raise --count, --frames or --size")
    sys.path.insert(0, "")
    try:
        case = case_of(load(args.model, args.args, args.device), args)
    except (ValueError, ImportError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    start = time.perf_counter()
    found = run_checks(case)
    for name, wrong in found.items():
        print(f"{'fails' if wrong else 'ok   '} {name.replace('_', ' ')}{': ' if wrong else ''}{wrong}")
    failed = sum(map(bool, found.values()))
    print(f"{len(found) - failed} of {len(found)} checks passed in {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
