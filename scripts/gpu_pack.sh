#!/usr/bin/env bash
# Makes a folder with all that a machine with a GPU needs to check this project there: copy it, run its gpu-check.
#
# usage: gpu_pack.sh PACELINE RUNTIME OUT [CHIP...]
#   PACELINE  a program that compiles    RUNTIME  the program that goes into the pack, without LLVM    OUT  the folder
# Chips are sm_80 and sm_90 unless named; `emulated` checks the pack itself where there is no GPU.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
paceline=$(realpath "$1") runtime=$(realpath "$2") out=$(realpath -m "$3")
shift 3
chips=("$@")
[ $# -gt 0 ] || chips=(sm_80 sm_90)
BYTES_MAX=$((50 * 1024 * 1024))

rm -rf "$out"
mkdir -p "$out"
specs=$(mktemp -d)
trap 'rm -rf "$specs"' EXIT
cd "$specs"

target() { [ "$1" = emulated ] && echo cuda-emulated || echo "cuda:$1"; }
quietly() { "$@" >/dev/null 2>"$specs/said" || { cat "$specs/said" >&2; exit 1; }; }

# Every kind of kernel: products with fused and unfused updates, three optimizers, attention, norms; each in f32, tf32 and bf16.
cat >kernels.pace <<'SPEC'
model gpt { layers = 2, width = 64, heads = 2, context = 32, vocab = 256 }
machine { ranks = 1 }
pipeline { schedule = one_f_one_b, microbatch = 2, accumulate = 2 }
optimizer = muon {
  lr = 1e-2
  group [embedding, head] = adamw { lr = 3e-3 }
  group "block.0.*"       = adamw { lr = 3e-3 }
  group vector            = lion { lr = 1e-3 }
}
SPEC
# The other optimizers' updates, in parts and fused; bases turn at the update that kernels are given the numbers of.
cat >updates.pace <<'SPEC'
model gpt { layers = 2, width = 64, heads = 2, context = 32, vocab = 256 }
machine { ranks = 1 }
pipeline { schedule = one_f_one_b, microbatch = 2, accumulate = 2 }
optimizer = nadam {
  lr = 1e-3
  group "block.0.attn.qkv.weight" = soap { lr = 1e-3, frequency = 1 }
  group "block.0.attn.out.weight" = mars { lr = 1e-3 }
  group "block.0.mlp.up.weight"   = normuon { lr = 1e-3 }
  group "block.0.mlp.down.weight" = sgd { lr = 1e-3, momentum = 0.9 }
  group "block.1.attn.qkv.weight" = signum { lr = 1e-3 }
  group "embed.tok"               = lion { lr = 1e-3 }
  group vector                    = adan { lr = 1e-3 }
}
SPEC
# A small GPT on one rank, and on several that share the GPU.
training() { # RANKS SCHEDULE ACCUMULATE
  cat <<SPEC
model gpt { layers = 4, width = 64, heads = 2, context = 32, vocab = 256 }
machine { ranks = $1 }
pipeline { schedule = $2, microbatch = 2, accumulate = $3 }
optimizer = adamw { lr = 3e-3 }
SPEC
}
training 1 one_f_one_b 2 >one.pace
training 2 one_f_one_b 4 >two.pace
training 4 async_1f1b 1 >four.pace
updates=20
setting() { # NAME: what differs from f32
  case "$1" in
    tf32) echo --set pipeline.matmul=tf32 ;;
    bf16) echo --set model.dtype=bf16 ;;
  esac
}

cat "$root"/LICENSE-APACHE "$root"/docs/*.md >"$out/text"
for name in f32 tf32 bf16 updates; do
  spec=kernels.pace
  [ "$name" = updates ] && spec=updates.pace
  read -ra set < <(setting "$name") || true
  for chip in "${chips[@]}"; do
    quietly "$paceline" compile "$spec" "${set[@]}" --target "$(target "$chip")" -o "$out/kernels-$name-$chip"
  done
  quietly "$paceline" compile "$spec" "${set[@]}" --target cuda-emulated -o emulated
  quietly "$paceline" gpu-expect emulated -o "$out/expected-$name"
done
cp one.pace tf32.pace
cp one.pace bf16.pace
for name in one two four tf32 bf16; do
  read -ra set < <(setting "$name") || true
  for chip in "${chips[@]}"; do
    quietly "$paceline" compile "$name.pace" "${set[@]}" --target "$(target "$chip")" -o "$out/train-$name-$chip"
  done
  # A CPU multiplies in f32 where the spec says tf32.
  quietly "$paceline" run "$name.pace" "${set[@]}" --data "$out/text" --updates "$updates" --metrics "$out/losses-$name.jsonl"
done
cp "$runtime" "$out/paceline"
strip "$out/paceline" 2>/dev/null || true
cp "$root/scripts/gpu_check.sh" "$out/gpu-check"
chmod +x "$out/gpu-check" "$out/paceline"

bytes=$(du -sb "$out" | cut -f1)
echo "$out: $((bytes / 1024)) KiB"
if [ "$bytes" -gt "$BYTES_MAX" ]; then
  echo "gpu-pack: larger than $((BYTES_MAX / 1024 / 1024)) MiB" >&2
  exit 1
fi
