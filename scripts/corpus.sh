#!/usr/bin/env bash
# Prepares the studies' text: the manual pages of Debian's perl-doc, 8.7 MB of English and code, as ASCII. The package is
# downloaded and unpacked, not installed, so nothing outside the folder changes and no root is needed.
#
# usage: corpus.sh [FOLDER]     (default target/corpus) writes train.txt and heldout.txt there and prints their hashes.
# A folder that already holds both is left alone.
set -euo pipefail
shopt -s inherit_errexit
export LC_ALL=C
cd "$(dirname "$0")/.."
package=perl-doc
block=8192 # bytes; of every `share` blocks the middle one is held out
share=90
folder=${1:-target/corpus}

fail() {
  printf 'corpus: %s\n' "$@" >&2
  exit 3
}

if [ ! -s "$folder/train.txt" ] || [ ! -s "$folder/heldout.txt" ]; then
  mkdir -p "$folder"
  folder=$(realpath "$folder")
  scratch=$(mktemp -d "$folder/scratch.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  cd "$scratch"
  apt-get download "$package" >log 2>&1 ||
    fail "apt-get download $package failed (apt-get update brings fresh lists):" "$(cat log)"
  dpkg-deb -x ./*.deb unpacked
  # In the order of their names, which is the same everywhere under LC_ALL=C.
  find unpacked -type f -name '*.pod' -print0 | sort -z | xargs -0 cat | tr -c '\000-\177' '?' >all.txt
  bytes=$(stat -c %s all.txt)
  [ "$bytes" -ge 5000000 ] || fail "$package holds only $bytes bytes of text, 5 MB are needed"
  split --bytes="$block" --numeric-suffixes --suffix-length=5 all.txt block.
  : >heldout.txt
  : >train.txt
  n=0
  for part in block.*; do
    if [ $((n % share)) -eq $((share / 2)) ]; then cat "$part" >>heldout.txt; else cat "$part" >>train.txt; fi
    n=$((n + 1))
  done
  # train.txt last: its presence says that the folder is complete.
  mv heldout.txt "$folder"
  mv train.txt "$folder"
  cd "$folder"
else
  cd "$folder"
fi
wc -c train.txt heldout.txt | sed '$d'
sha256sum train.txt heldout.txt
