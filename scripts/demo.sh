#!/usr/bin/env bash
# Trains examples/gpt-paci.pace and its synchronous twin on the project's own text, a tenth of each file held out, and
# compares the two.
#
# usage: demo.sh PACELINE       (the built binary; `make demo` builds it first)
set -euo pipefail
cd "$(dirname "$0")/.."
paceline=$1
out=target/demo
mkdir -p "$out"
mapfile -t data < <(scripts/demo_data.sh)

train() { # NAME SPEC: compiles the spec to a bundle and runs it
  echo
  echo "== $2"
  rm -rf "${out:?}/$1"
  "$paceline" compile "$2" -o "$out/$1"
  "$paceline" run "$out/$1" --data "${data[@]}" --holdout 0.1 --metrics "$out/$1.jsonl" --save "$out/$1.safetensors"
}

# The value of a key of the summary line of a run's metrics.
summary() { # NAME KEY
  sed -n 's/^{"summary":.*"'"$2"'":\([-0-9.e]*\).*/\1/p' "$out/$1.jsonl"
}

train paci examples/gpt-paci.pace
train 1f1b examples/gpt-1f1b.pace

# Each rank on a core of its own would need this long for the same work: what the bubble costs there.
bubble_max() { # NAME: largest replayed bubble of the run's ranks, in percent
  grep '^{"summary"' "$out/$1.jsonl" | grep -o '"bubble_replayed":[0-9.e-]*' | cut -d: -f2 |
    LC_ALL=C sort -g | tail -n 1 | LC_ALL=C awk '{ printf "%.1f", 100 * $1 }'
}

echo
echo "The same tokens in the same order, $(summary paci tokens) of them:"
printf '%-22s %12s %12s\n' "" async_1f1b one_f_one_b
row() { # TEXT FORMAT PACI TWIN
  LC_ALL=C printf "%-22s %12$2 %12$2\n" "$1" "$3" "$4"
}
for key in first last; do
  row "held-out loss, $key" .4f "$(summary paci "eval_loss_$key")" "$(summary 1f1b "eval_loss_$key")"
done
row "bubble replayed, %" s "$(bubble_max paci)" "$(bubble_max 1f1b)"
row "seconds here" .1f "$(summary paci elapsed_s)" "$(summary 1f1b elapsed_s)"
LC_ALL=C awk -v a="$(summary paci eval_loss_last)" -v b="$(summary 1f1b eval_loss_last)" \
  'BEGIN { printf "\nasynchronous minus synchronous held-out loss: %+.4f\n", a - b }'
echo "weights: $out/paci.safetensors, metrics: $out/paci.jsonl"
