"""Align text-to-image and text-to-video generators with GRPO, through any diffusers pipeline."""

__version__ = "0.1.0"
