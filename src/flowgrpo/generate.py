"""Pictures or films of a prompt set into a folder: numbered files, and a manifest that says how each was made."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor

from flowgrpo import keys
from flowgrpo.build import DTYPES, load_pipeline
from flowgrpo.config import ModelConfig
from flowgrpo.data import SIZE_FIELDS, Prompt
from flowgrpo.evaluate import check_sizes, conditions, own_size, size_batches
from flowgrpo.families import guidance_argument, pipeline_call
from flowgrpo.hybrid import Hybrid, check_hybrid, draw, hybrid_facts
from flowgrpo.media import safe_name, save_image, save_video
from flowgrpo.policy import Conditions, Policy
from flowgrpo.tuned import load_hybrid, load_tuned

__all__ = ["MANIFEST", "generate", "hybrid_from", "policy_from", "read_manifest", "save_media"]

MANIFEST = "manifest.jsonl"
FPS = 16


@dataclass(frozen=True)
class Job:
    """One sample to make, and its line of the manifest but for what is known only afterwards."""

    prompt: Prompt
    sample: int
    facts: dict[str, Any]

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt.id, self.sample


def generate(policy: Policy, prompts: Sequence[Prompt], folder: Path, *, samples_per_prompt: int, num_steps: int,
             seed: int, batch_size: int, fps: int | float = FPS, hybrid: Hybrid | None = None,
             origin: Mapping[str, Any] | None = None,
             on_batch: Callable[[int], None] = lambda _: None) -> list[dict[str, Any]]:  # fmt: skip
    """Write every sample that the folder lacks; returns the whole manifest, in the order of prompts and samples.

    A sample depends on (seed, prompt id, sample) alone. With `hybrid` the base makes the last steps. `origin` says
    what the policy was loaded from; `fps` is for films; `on_batch` hears of the number of samples just done, at first of
    those found. Raises ValueError if the folder holds samples made in another way, and for a sample that is not finite.
    """
    check_sizes(policy, prompts)
    if hybrid is not None:
        check_hybrid(policy.own_scheduler, hybrid.share, num_steps)
    cut = hybrid_facts(hybrid and hybrid.share, num_steps)
    settings = {**(origin or {}), **_settings(policy, num_steps, fps), "seed": seed, "hybrid": cut}
    jobs = [
        Job(prompt, sample, {**_facts(policy, prompt), "sample": sample, **settings, "key": _key(seed, prompt, sample)})
        for prompt in prompts
        for sample in range(samples_per_prompt)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    done = _found(folder, jobs)
    on_batch(sum(job.key in done for job in jobs))
    todo = [job for job in jobs if job.key not in done]
    for batch in size_batches([job.prompt for job in todo], batch_size):
        _make(policy, [todo[i] for i in batch], folder, num_steps, fps, hybrid, done)
        on_batch(len(batch))
    return [done[job.key] for job in jobs]


def policy_from(pipeline: str, adapter: Path | None, *, dtype: Literal["float32", "bfloat16"] = "float32",
                num_steps: int | None = None, guidance_scale: float | None = None, negative_prompt: str | None = None,
                height: int | None = None, width: int | None = None, num_frames: int | None = None,
                call: Mapping[str, Any] | None = None) -> tuple[Policy, int, dict[str, Any]]:  # fmt: skip
    """A policy for `generate`, its steps and its origin; None stands for the pipeline's own default.

    Raises ValueError for what the pipeline cannot follow.
    """
    model = ModelConfig.model_validate({"pipeline": pipeline, "dtype": dtype})
    loaded = load_pipeline(model) if adapter is None else load_tuned(model, adapter)
    defaults = {name: p.default for name, p in inspect.signature(pipeline_call(loaded)).parameters.items()}
    name = guidance_argument(loaded)
    scale = guidance_scale if guidance_scale is not None else float(defaults[name]) if name else 1.0
    if negative_prompt is not None and scale <= 1:
        raise ValueError(f"negative_prompt cannot take effect at guidance_scale={scale:g}; raise that, or leave it out")
    own = Conditions(scale, negative_prompt or "", height, width, num_frames, call or {})
    policy = Policy(loaded.to(Accelerator().device), own, DTYPES[dtype])
    origin = {"pipeline": pipeline, "adapter": None if adapter is None else str(adapter), "dtype": dtype}
    return policy, num_steps or defaults["num_inference_steps"], origin


def hybrid_from(policy: Policy, origin: Mapping[str, Any], num_steps: int, share: float) -> Hybrid:
    """Hybrid inference for a policy of `policy_from`, given its origin. Raises ValueError where there is no cut."""
    check_hybrid(policy.own_scheduler, share, num_steps)
    model = ModelConfig.model_validate({name: origin[name] for name in ("pipeline", "dtype")})
    return load_hybrid(policy, model, Path(origin["adapter"]), share)


def _make(policy: Policy, jobs: Sequence[Job], folder: Path, num_steps: int, fps: int | float,
          hybrid: Hybrid | None, done: dict[tuple[int, int], dict[str, Any]]) -> None:  # fmt: skip
    generators = [keys.generator(*job.facts["key"]) for job in jobs]
    with conditions(policy, **own_size(jobs[0].prompt)):
        media = draw(policy, [job.prompt for job in jobs], num_steps, generators, hybrid).float().cpu()
    for job, clip in zip(jobs, media, strict=True):
        line = {**save_media(clip, folder, job.prompt, job.sample, fps), **job.facts}
        with (folder / MANIFEST).open("a", encoding="utf-8") as manifest:
            manifest.write(json.dumps(line, ensure_ascii=False) + "\n")
        done[job.key] = line


def save_media(clip: Float[Tensor, " f 3 h w"], folder: Path, prompt: Prompt, sample: int, fps: int | float) -> dict[str, Any]:
    """Write one picture (.png) or film (.mp4); returns its file name and size, for a manifest.

    The name is of the prompt's number, its text and the sample. Raises ValueError, naming prompt and sample, for NaN.
    """
    num_frames, _, height, width = clip.shape
    if not clip.isfinite().all():
        raise ValueError(
            f"prompt {prompt.id}, sample {sample}: pixels must be finite, got NaN or infinite ones; "
            "run the model in float32 or bfloat16"
        )
    if num_frames == 1:
        name = safe_name(prompt.id, prompt.text, f"_{sample:03d}.png")
        save_image(clip[0], folder / name)
        return {"file": name, "height": height, "width": width}
    name = safe_name(prompt.id, prompt.text, f"_{sample:03d}.mp4")
    return {"file": name, **asdict(save_video(clip, folder / name, fps))}


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """The lines of a folder's manifest; none if there is no manifest. A last line that was cut off is left out."""
    path = folder / MANIFEST
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def _key(seed: int, prompt: Prompt, sample: int) -> list[int | str]:
    return ["generate", seed, prompt.id, sample]


def _settings(policy: Policy, num_steps: int, fps: int | float) -> dict[str, Any]:
    scheduler, own = policy.own_scheduler, policy.conditions
    shift = scheduler.config.get("shift", scheduler.config.get("flow_shift"))
    makes_films = "num_frames" in inspect.signature(pipeline_call(policy.pipeline)).parameters
    return {
        "sampler": type(scheduler).__name__,
        "shift": shift,
        "num_steps": num_steps,
        "guidance_scale": own.guidance_scale,
        "call": dict(own.call),
        **({"fps": float(fps)} if makes_films else {}),
    }


def _facts(policy: Policy, prompt: Prompt) -> dict[str, Any]:
    own = policy.conditions
    negative = own.negative_prompt if prompt.negative is None else prompt.negative
    sizes = {name: getattr(prompt, name) or getattr(own, name) for name in SIZE_FIELDS}
    return {
        "prompt": prompt.text,
        "prompt_id": prompt.id,
        "negative_prompt": negative if own.guidance_scale > 1 else None,
        "asked_size": {name: value for name, value in sizes.items() if value is not None},
    }


def _found(folder: Path, jobs: Sequence[Job]) -> dict[tuple[int, int], dict[str, Any]]:
    """The samples that are there already, by (prompt id, sample); drops lines whose file has gone from the manifest."""
    lines = read_manifest(folder)
    kept = [line for line in lines if (folder / line["file"]).is_file()]
    wanted = {job.key: job.facts for job in jobs}
    for line in kept:
        _check_same(folder, line, wanted.get((line["prompt_id"], line["sample"]), {}))
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
    if (folder / MANIFEST).is_file() and text.encode() != (folder / MANIFEST).read_bytes():
        temporary = folder / f"{MANIFEST}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / MANIFEST)
    return {(line["prompt_id"], line["sample"]): line for line in kept}


def _check_same(folder: Path, line: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    facts = json.loads(json.dumps(facts))
    for name, value in facts.items():
        if line.get(name) != value:
            raise ValueError(
                f"{folder}: {line['file']} was made with {name}={line.get(name)!r}, this call has {value!r}; "
                "give the settings of the first call, or another folder"
            )
