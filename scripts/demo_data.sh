#!/usr/bin/env bash
# Prints the project's own documents and sources, one path a line, in a fixed order: the text that the demo trains on.
set -euo pipefail
cd "$(dirname "$0")/.."
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  git ls-files -- '*.md' '*.rs' '*.pace'
else
  find . -name target -prune -o -type f \( -name '*.md' -o -name '*.rs' -o -name '*.pace' \) -print | sed 's|^\./||'
fi | LC_ALL=C sort
