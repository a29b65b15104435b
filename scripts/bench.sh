#!/usr/bin/env bash
# Times Paceline on examples/bench-gpt.pace: check, compile, and training on two ranks; and the check of a large schedule. With a Python that has torch,
# also times PyTorch's two-stage 1F1B on the same work, in turn with Paceline, and prints the ratio of the medians.
#
# usage: bench.sh PACELINE [PYTHON]
set -euo pipefail
shopt -s inherit_errexit
export LC_ALL=C
cd "$(dirname "$0")/.."
paceline=$1
python=${2:-}
spec=examples/bench-gpt.pace
pairs=${PACELINE_BENCH_PAIRS:-3}
updates=12 # of which the first 3 are not timed
out=target/bench
mkdir -p "$out"

fail() {
  printf 'bench: %s\n' "$@" >&2
  exit 3
}

if [ -n "$python" ] && ! "$python" -c 'import torch' 2>/dev/null; then
  fail "$python has no torch; install it by hand: pip install torch numpy"
fi

median() { # of the numbers on standard input, one a line
  sort -g | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}

seconds() { # COMMAND...: wall time
  local start=$EPOCHREALTIME
  "$@" >/dev/null
  awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.4f\n", b - a }'
}

cpu_seconds() { # COMMAND...: user and system time
  local TIMEFORMAT='%U %S'
  { time "$@" >/dev/null 2>&1; } 2>&1 | awk '{ printf "%.4f\n", $1 + $2 }'
}

fresh_compile() {
  rm -rf "$out/bundle"
  "$paceline" compile "$spec" -o "$out/bundle"
}

train() { # tokens per second after the first updates
  "$paceline" run "$out/bundle" --data LICENSE-APACHE --updates "$updates" --metrics "$out/run.jsonl" >"$out/log" 2>&1 ||
    fail "training failed:" "$(cat "$out/log")"
  # Lines are {"update":U,"loss":L,"tokens":T,"elapsed_s":S,...}; tokens and seconds count from the run's start.
  awk -F'[:,]' '
    /"update":/ {
      for (i = 1; i < NF; i++) {
        if ($i ~ /"tokens"$/) tokens = $(i + 1)
        if ($i ~ /"elapsed_s"$/) elapsed = $(i + 1)
      }
      if (++updates == 3) { tokens_0 = tokens; elapsed_0 = elapsed }
    }
    END { printf "%.0f\n", (tokens - tokens_0) / (elapsed - elapsed_0) }' "$out/run.jsonl"
}

torch() {
  "$python" scripts/torch_pipeline.py 1f1b --stages 2 2>"$out/log" | sed -n 's/.*tokens_per_s=//p' ||
    fail "PyTorch failed:" "$(cat "$out/log")"
}

check_s=$(for _ in $(seq 11); do seconds "$paceline" check "$spec"; done | median)
awk -v s="$check_s" 'BEGIN { printf "check      %8.1f ms   (below 50)\n", 1000 * s }'
large_s=$(for _ in $(seq 11); do cpu_seconds "$paceline" check scripts/bench-large.pace; done | median)
awk -v s="$large_s" 'BEGIN { printf "large      %8.1f ms   (below 100; time of the CPU, check of 64 ranks x 2 x 1024 micro-batches)\n", 1000 * s }'
compile_s=$(for _ in 1 2 3; do seconds fresh_compile; done | median)
awk -v s="$compile_s" 'BEGIN { printf "compile    %8.1f s    (below 20)\n", s }'

: >"$out/ours"
: >"$out/torch"
for pair in $(seq "$pairs"); do
  ours=$(train)
  echo "$ours" >>"$out/ours"
  if [ -n "$python" ]; then
    theirs=$(torch)
    echo "$theirs" >>"$out/torch"
  fi
  echo "pair $pair     $ours tokens/s${python:+, PyTorch $theirs}"
done
ours=$(median <"$out/ours")
echo "train      $(printf %8.0f "$ours") tokens/s on 2 ranks, median of $pairs"
if [ -n "$python" ]; then
  theirs=$(median <"$out/torch")
  echo "PyTorch    $(printf %8.0f "$theirs") tokens/s, two-stage 1F1B, median of $pairs"
  awk -v a="$ours" -v b="$theirs" 'BEGIN { printf "ratio      %8.2f      (at least 1)\n", a / b }'
fi
