#!/usr/bin/env bash
# Looks for what `make` cannot install: Linux, CPython, a Rust toolchain, a C compiler and linker. Prints the path of the
# Python interpreter to use, or names on stderr everything that is missing or too old, with the version found and the
# version wanted, and exits with 1. With `--lint` it also wants rustfmt and clippy, with `--cxx` g++ and its sanitizers.
#
# PYTHON=... in the environment selects an interpreter; without it the first that fits is taken.
set -uo pipefail
cd "$(dirname "$0")/.."

rust_wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml)
python_wanted=$(sed -n 's/^requires-python *= *">=\(.*\)"/\1/p' pyproject.toml)
problems=()

at_least() { # at_least FOUND WANTED
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

# Prints "version<TAB>path of the interpreter itself, outside any venv<TAB>what is wrong with it".
probe='
import sys, sysconfig
wrong = ""
if sys.version_info < (3, 3):
    pass
elif sys.implementation.name != "cpython":
    wrong = "it is " + sys.implementation.name
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
    wrong = "it is a free-threaded build"
else:
    try:
        import ensurepip, venv
    except ImportError:
        wrong = "it has no venv or ensurepip (on Debian: apt-get install python3-venv)"
path = getattr(sys, "_base_executable", "") or sys.executable
sys.stdout.write("%d.%d.%d\t%s\t%s\n" % (tuple(sys.version_info[:3]) + (path, wrong)))
'

find_python() {
  local candidate line version path wrong seen=()
  local candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
  [ -n "${PYTHON:-}" ] && candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if ! command -v "$candidate" >/dev/null 2>&1; then
      [ -n "${PYTHON:-}" ] && seen+=("PYTHON=$candidate, which is not there")
      continue
    fi
    if ! line=$("$candidate" -E -s -c "$probe" 2>&1 </dev/null); then
      [ -n "${PYTHON:-}" ] && seen+=("PYTHON=$candidate, which does not run (${line%%$'\n'*})")
      continue
    fi
    line=${line##*$'\n'}
    IFS=$'\t' read -r version path wrong <<<"$line"
    if ! at_least "$version" "$python_wanted"; then
      seen+=("$version ($candidate)")
    elif [ -n "$wrong" ]; then
      seen+=("$version ($candidate), but $wrong")
    else
      echo "$path"
      return 0
    fi
  done
  local found="not found"
  [ ${#seen[@]} -gt 0 ] && found="found $(printf '%s; ' "${seen[@]}" | sed 's/; $//')"
  problems+=("Python: $found; wanted: CPython $python_wanted or later. PYTHON=/path/to/python selects one.")
  return 1
}

check_rust() { # check_rust PROGRAM
  local line version
  if ! command -v "$1" >/dev/null 2>&1; then
    problems+=("$1: not found; wanted: $rust_wanted or later. rustup.rs tells how to install Rust.")
    return
  fi
  if ! line=$("$1" --version 2>&1 </dev/null); then
    problems+=("$1: found $(command -v "$1"), which does not run ($(head -n 1 <<<"$line")); wanted: $rust_wanted or later.")
    return
  fi
  version=$(awk '{print $2; exit}' <<<"$line")
  at_least "${version%%-*}" "$rust_wanted" ||
    problems+=("$1: found $version ($(command -v "$1")); wanted: $rust_wanted or later (\`rustup update stable\`).")
}

check_rust_component() { # check_rust_component SUBCOMMAND COMPONENT DEBIAN_PACKAGE
  cargo "$1" --version >/dev/null 2>&1 </dev/null ||
    problems+=("$2: not found; wanted: the one of this Rust (\`rustup component add $2\`; on Debian: apt-get install $3).")
}

check_cc() { # Rust links with `cc`; a compiler without the C library's start files and headers cannot link.
  if ! command -v cc >/dev/null 2>&1; then
    problems+=("cc: not found; wanted: a C compiler and linker (on Debian: apt-get install gcc libc6-dev).")
  elif ! echo 'int main(void) { return 0; }' | cc -x c -o /dev/null - >/dev/null 2>&1; then
    problems+=("cc: found $(command -v cc), which cannot link a program; wanted: a C compiler, linker and C library (on Debian: apt-get install gcc libc6-dev).")
  fi
}

check_cxx() { # the host code of the CUDA extension is tested as C++
  local sanitizer
  if ! command -v g++ >/dev/null 2>&1; then
    problems+=("g++: not found; wanted: a C++17 compiler (on Debian: apt-get install g++).")
    return
  fi
  for sanitizer in address thread; do
    echo 'int main() {}' | g++ -x c++ -fsanitize=$sanitizer -o /dev/null - >/dev/null 2>&1 ||
      problems+=("g++: found $(command -v g++), without the $sanitizer sanitizer; wanted: its run-time libraries.")
  done
}

[ "$(uname -s)" = Linux ] || problems+=("operating system: found $(uname -s); wanted: Linux.")
python=""
python_file=$(mktemp) || exit 1
trap 'rm -f "$python_file"' EXIT
find_python >"$python_file" && python=$(<"$python_file") # not $(find_python): a subshell would lose `problems`
check_rust rustc
check_rust cargo
if [ "${1:-}" = --lint ] && command -v cargo >/dev/null 2>&1; then
  check_rust_component fmt rustfmt rustfmt
  check_rust_component clippy clippy rust-clippy
fi
check_cc
[ "${1:-}" = --cxx ] && check_cxx

if [ ${#problems[@]} -gt 0 ]; then
  echo "kvtier cannot be built on this machine yet:" >&2
  printf '  %s\n' "${problems[@]}" >&2
  exit 1
fi
echo "$python"
