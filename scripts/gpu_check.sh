#!/usr/bin/env bash
# Checks this machine's GPU with the pack that this script lies in: every kernel against the emulator's results, small trainings against
# the CPU's losses. Needs nothing else, writes report.txt beside itself, and ends within six minutes.
#
# Status: 0 all as expected, 1 something is wrong, 3 no GPU to check, 124 out of time.
set -uo pipefail
cd "$(dirname "$0")" || exit 3
# One GPU, which the ranks of a training share.
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
timeout 350 ./paceline gpu-check . 2>&1 | tee report.txt
exit "${PIPESTATUS[0]}"
