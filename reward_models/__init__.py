"""Reward models, one a file: each a class with a constructor and ``(media, prompts) -> (b,)``; see the README."""
