#!/usr/bin/env bash
# The checks that need a GPU, in a minute: the tests marked gpu, then the embedded run in float32 and in bfloat16.
#   scripts/check_gpu.sh            (after `make test` or `make quickstart` has made .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.venv/bin/python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())'
.venv/bin/python -m pytest -m gpu tests/test_gpu.py
for dtype in float32 bfloat16; do
  .venv/bin/flowgrpo train configs/shapes/mixgrpo.yaml --overwrite "name=gpu-$dtype" "model.dtype=$dtype" \
    iterations=20 evaluation.num_prompts=300
done
