#!/usr/bin/env bash
# Compiles csrc to python/kvtier/libkvtier_cuda.so, for every kind of GPU that kvtier knows, and prints the registers
# that the kernel takes on each. Warnings are errors. The library has the CUDA runtime inside and needs no driver to be
# loaded. NVCC=/path/to/nvcc selects a compiler; without it, that of .venv (requirements/cuda.lock) is taken.
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc=${NVCC:-$(ls .venv/lib/python*/site-packages/nvidia/cu13/bin/nvcc 2>/dev/null | head -n 1)}
if [ -z "$nvcc" ] || ! command -v "$nvcc" >/dev/null; then
  echo "nvcc: not found${NVCC:+ ($NVCC)}; scripts/setup.sh cuda installs it, or NVCC=/path/to/nvcc selects one" >&2
  exit 1
fi
library=python/kvtier/libkvtier_cuda.so
work=target/cuda
mkdir -p "$work"

# PTX of the oldest architecture: whatever is newer, and has no code of its own here, compiles it when it is loaded.
codes=(-gencode "arch=compute_80,code=[sm_80,compute_80]")
for architecture in 90 100 120; do
  codes+=(-gencode "arch=compute_$architecture,code=sm_$architecture")
done
host=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror
nvcc=$(command -v "$nvcc")
compile_and_link() { # nvcc would link too, but write the paths of this machine into the library
  local file
  for file in csrc/*.cc csrc/*.cu; do
    PATH="$(dirname "$nvcc"):$PATH" "$nvcc" -std=c++17 -O3 "${codes[@]}" -Werror all-warnings -Xcompiler "$host" \
      -Xptxas -v,-warn-spills -DKVTIER_COMPARE_WITH_DRIVER -c "$file" -o "$work/$(basename "$file").o" || return 1
  done
  "${CXX:-g++}" -shared -s -Wl,-z,defs -Wl,--version-script=csrc/exports.map "$work"/*.o \
    -L"$(dirname "$nvcc")/../lib" -L"$(dirname "$nvcc")/../lib64" -lcudart_static -lpthread -ldl -lrt -o "$work/libkvtier_cuda.so"
}
rm -f "$work"/*.o # what is left must not stand in for what no longer compiles
compile_and_link >"$work/log" 2>&1 || {
  cat "$work/log" >&2
  exit 1
}
awk '/Compiling entry/ { name = $(NF - 2) " " $NF } / Used [0-9]+ registers/ { print name ": " $5 " registers" }' "$work/log" |
  sed "s/'//g; s/^_ZN6kvtier11copy_kernel[^ ]*/copy_kernel/"
mv "$work/libkvtier_cuda.so" "$library"
ls -l "$library"
