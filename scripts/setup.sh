#!/usr/bin/env bash
# Installs what a build of Paceline needs beside Rust, on Debian 12: LLVM/MLIR 22, a libclang for the bindings, a C++
# compiler. Packages come from the machine's own apt sources. Running it again changes nothing.
#
# usage: setup.sh [--check | --with PACKAGE...]
#   --check  only reports what is missing (status 1 when something is)
#   --with   installs these packages too
set -euo pipefail

packages=(
  # LLVM and MLIR, static libraries and headers (llvm-config is in llvm-22, which llvm-22-dev brings).
  libmlir-22-dev llvm-22-dev libpolly-22-dev
  # What those libraries link to.
  libzstd-dev zlib1g-dev libxml2-dev libz3-dev
  # Bindings to MLIR's C interface are generated with this libclang; the wrapper of LLVM's TableGen is C++.
  libclang-19-dev g++
  # For the commands of the README.
  make
)

fail() {
  echo "setup: $*" >&2
  exit 3
}

missing_packages() {
  local package
  for package in "${packages[@]}"; do
    # "installed" is the third word of a complete installation ("install ok installed").
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
  done
}

install() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if sudo -n true 2>/dev/null; then
      as_root=(sudo)
    else
      fail "these packages are missing and installing them needs root: $*
Run this as root, then try again:  apt-get update && apt-get install -y --no-install-recommends $*
Without LLVM, check, plan and timeline still build:  cargo install --path . --no-default-features"
    fi
  fi
  echo "setup: installing $*"
  "${as_root[@]}" apt-get update -qq || fail "apt-get update failed"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
    fail "apt-get install failed (LLVM 22 is in Debian 12's current sources; on another system, install LLVM/MLIR 22
and point MLIR_SYS_220_PREFIX, TABLEGEN_220_PREFIX and LIBCLANG_PATH at it)"
}

command -v cargo >/dev/null || fail "cargo is not on PATH: install Rust with rustup first"
command -v dpkg-query >/dev/null || fail "this is not a Debian system: install LLVM/MLIR 22, a libclang and a C++ compiler yourself,
and point MLIR_SYS_220_PREFIX, TABLEGEN_220_PREFIX and LIBCLANG_PATH at them"

if [ "${1:-}" = --with ]; then
  packages+=("${@:2}")
fi
mapfile -t missing < <(missing_packages)
if [ "${1:-}" = --check ]; then
  [ ${#missing[@]} -eq 0 ] && echo "setup: nothing is missing" && exit 0
  echo "setup: missing: ${missing[*]}"
  exit 1
fi
[ ${#missing[@]} -eq 0 ] || install "${missing[@]}"
