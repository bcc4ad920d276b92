#!/usr/bin/env bash
# setup.sh [--wheel] [LOCK...]: brings .venv to where it has the packages of each requirements/LOCK.lock and, with
# `--wheel`, kvtier itself, built in release mode and installed from the wheel. What is already there is left alone: each
# stamp in .venv/stamps holds a checksum of what its part was made from, so a second call takes a second.
#
# An installation that was cut short (a kill, a full disk) leaves .venv/incomplete behind; the next call then starts .venv
# afresh, because pip takes a half-copied package for a whole one.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
[ -t 2 ] || say() { printf '%s\n' "$*" >&2; }

# One set-up at a time in one tree: two calls would take each other's unfinished work for a wreck.
if command -v flock >/dev/null 2>&1; then
  exec 9<.
  flock -w 3600 9 || [ $? -ne 1 ] || { # 1: timed out; else this file system has no locks
    say "another set-up has been running in this tree for an hour: giving up"
    exit 1
  }
fi

checksum() { # of the standard input
  sha256sum | cut -d ' ' -f 1
}

wheel_checksum() { # of everything that goes into the wheel, and of what builds it
  local roots=(Cargo.toml Cargo.lock pyproject.toml README.md LICENSE requirements/build.lock src python)
  local cuda_library=python/kvtier/libkvtier_cuda.so # there after `make build-cuda`
  {
    rustc --version
    printf '%s\n' "${RUSTFLAGS:-}"
    find "${roots[@]}" -type f -not -path '*/__pycache__/*' -not -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    [ ! -e "$cuda_library" ] || sha256sum "$cuda_library"
  } | checksum
}

quiet=(--quiet)
[ -t 2 ] && quiet=() # someone is watching
venv_python=.venv/bin/python
stamps=.venv/stamps

identity() { # identity PYTHON: what must stay the same for .venv to be of use
  "$1" -I -c 'import sys; print(sys._base_executable, "%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

make_venv() { # keeps .venv if it is whole, works, has not been moved, and is of the interpreter that PYTHON asks for
  local python=$1 here
  here=$(pwd -P)
  if [ ! -e .venv/incomplete ] && [ -e "$stamps/venv" ] &&
    [ "$(<"$stamps/venv")" = "$here $(identity "$venv_python")" ] &&
    { [ -z "${PYTHON:-}" ] || [ "$(identity "$python")" = "$(identity "$venv_python")" ]; }; then
    return
  fi
  say "making .venv with $python"
  rm -rf .venv
  "$python" -m venv .venv
  mkdir "$stamps"
  echo "$here $(identity "$venv_python")" >"$stamps/venv"
}

installed() { # a listing that changes with the first thing that pip writes into .venv
  find .venv/lib -path '*/site-packages/*' -prune -print | LC_ALL=C sort | checksum
}

pip_install() { # pip_install ARGUMENT...
  local before
  before=$(installed)
  : >.venv/incomplete
  mkdir -p .venv/tmp
  # TMPDIR: pip unpacks gigabytes, and /tmp is often small. Whatever it leaves goes away with .venv.
  if TMPDIR="$PWD/.venv/tmp" "$venv_python" -m pip install "${quiet[@]}" "$@"; then
    rm -rf .venv/incomplete .venv/tmp
    return
  fi
  [ "$(installed)" = "$before" ] && rm -f .venv/incomplete # it failed before it wrote anything: .venv is whole
  say "pip could not install what kvtier needs; run the same command again to go on"
  return 1
}

install_lock() { # install_lock NAME
  local lock=requirements/$1.lock sum
  sum=$(checksum <"$lock")
  [ -e "$stamps/$1" ] && [ "$(<"$stamps/$1")" = "$sum" ] && return
  say "installing $lock$([ "$1" = demo ] && echo ' (torch among it: some 3 GB to download, 5 GB on disk)' || true)"
  pip_install --require-hashes --requirement "$lock"
  echo "$sum" >"$stamps/$1"
}

install_wheel() {
  local sum
  sum=$(wheel_checksum)
  [ -e "$stamps/wheel" ] && [ "$(<"$stamps/wheel")" = "$sum" ] && [ -e "$(ls dist/kvtier-*.whl 2>/dev/null | head -n 1)" ] && return
  say "building the wheel in release mode"
  rm -f dist/kvtier-*.whl
  "$venv_python" -m maturin build --release --locked "${quiet[@]}" --interpreter "$venv_python" --out dist 9<&- # a compiler cache's server must not inherit the lock
  pip_install --no-index --no-deps --force-reinstall dist/kvtier-*.whl
  echo "$sum" >"$stamps/wheel"
}

wheel=""
[ "${1:-}" = --wheel ] && { wheel=yes; shift; }
python=$(scripts/prerequisites.sh)
make_venv "$python"
for lock in build "$@"; do install_lock "$lock"; done
[ -n "$wheel" ] && install_wheel
exit 0
