# make quickstart: install into .venv and train the embedded picture model on the CPU.
# make test:       install with the dev tools and run every check that needs no GPU.
#
# JOBS test processes run side by side, a thread each.
#
# TORCH is installed first, by itself, so that the rest keeps it. For another build of torch:
#   make quickstart TORCH="torch torchvision --index-url https://download.pytorch.org/whl/cu126"

TORCH ?= torch==2.14.1 torchvision==0.29.1
PYTHON ?= python3
JOBS ?= 2
CONFIG ?= configs/shapes/mixgrpo.yaml
BIN := .venv/bin
export OMP_NUM_THREADS ?= 2

.PHONY: quickstart test format clean

quickstart: .venv/installed
	$(BIN)/flowgrpo train $(CONFIG) --overwrite

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright
	$(BIN)/lint-imports
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "flowgrpo needs Python 3.11 or newer, this is " + sys.version'
	$(PYTHON) -m venv .venv

.venv/torch: | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	touch $@

.venv/installed: pyproject.toml .venv/torch
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	touch $@

.venv/installed-dev: pyproject.toml .venv/torch
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@ .venv/installed
