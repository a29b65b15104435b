#!/usr/bin/env bash
# Proves that `--no-default-features` needs no LLVM: builds it where none can be found, looks at what it depends on, and
# checks, plans and draws every example with it.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/no-llvm

fail() {
  echo "no-llvm: $*" >&2
  exit 1
}

# A PATH with Rust and a linker and nothing else: no llvm-config under any name.
tools=$target/tools
rm -rf "$tools"
mkdir -p "$tools"
for tool in cargo rustc cc ld as ar; do
  found=$(command -v "$tool") || fail "$tool is not on PATH"
  ln -s "$found" "$tools/$tool"
done
isolated() {
  env -i HOME="$HOME" PATH="$tools" CARGO_TARGET_DIR="$target" \
    ${CARGO_HOME:+CARGO_HOME="$CARGO_HOME"} ${RUSTUP_HOME:+RUSTUP_HOME="$RUSTUP_HOME"} \
    MLIR_SYS_220_PREFIX=/nonexistent TABLEGEN_220_PREFIX=/nonexistent LIBCLANG_PATH=/nonexistent "$@"
}

tree=$(isolated cargo tree --locked --no-default-features -e normal,build --prefix none -p paceline)
if grep -E '^(melior|mlir-sys|tblgen|paceline-codegen|bindgen) ' <<<"$tree"; then
  fail "the build without default features depends on LLVM"
fi
isolated cargo build --locked --no-default-features -p paceline
paceline=$target/debug/paceline

out=$target/drawn
mkdir -p "$out"
for spec in examples/*.pace; do
  case $spec in
    */refused-*)
      status=0
      isolated "$paceline" check "$spec" >/dev/null 2>&1 || status=$?
      [ "$status" -eq 1 ] || fail "check $spec ended with $status, not 1"
      ;;
    *)
      isolated "$paceline" check "$spec" >/dev/null || fail "check $spec failed"
      isolated "$paceline" plan "$spec" >/dev/null || fail "plan $spec failed"
      isolated "$paceline" timeline "$spec" -o "$out/$(basename "$spec" .pace).svg" || fail "timeline $spec failed"
      ;;
  esac
done
# Compiling is what it can't: a sentence, not a crash.
status=0
said=$(isolated "$paceline" compile examples/gpt-paci.pace -o "$out/bundle" 2>&1) || status=$?
[ "$status" -ne 0 ] && [ "$status" -lt 4 ] || fail "compile without LLVM ended with $status: $said"
echo "no-llvm: $(ls examples/*.pace | wc -l) examples checked without LLVM"
