#!/usr/bin/env bash
# run.sh PROGRAM FOLDER SECONDS [TARGET]: every target of the fuzzer in turn, or one, continuing from
# tests/ckpt/corpus and from what earlier runs found. FOLDER keeps what is found; crashes lie in FOLDER/crashes.
# FUZZ_TIMEOUT: seconds that one input may take, 10; more on a busy machine.
set -euo pipefail
program=$1 folder=$2 seconds=$3 only=${4:-}
here=$(cd "$(dirname "$0")" && pwd)
corpus=$here/../../tests/ckpt/corpus
bad=()
found=
mkdir -p "$folder/crashes"
while read -r target dictionary; do
  [ -z "$only" ] || [ "$only" = "$target" ] || continue
  found=1
  mkdir -p "$folder/$target"
  old=()
  [ ! -d "$corpus/$target" ] || old=("$corpus/$target")
  longest=16384
  [ "$dictionary" != folder ] || longest=49152  # several files
  echo "== $target, $seconds s"
  LOWBIT_FUZZ_TARGET=$target "$program" "$folder/$target" ${old[@]+"${old[@]}"} -dict="$here/$dictionary.dict" \
    -max_total_time="$seconds" -max_len="$longest" -timeout="${FUZZ_TIMEOUT:-10}" -rss_limit_mb=1024 \
    -malloc_limit_mb=512 -artifact_prefix="$folder/crashes/$target-" -print_final_stats=1 \
    >"$folder/$target.log" 2>&1 </dev/null || bad+=("$target")
  grep -E '^(stat::(number_of_executed_units|peak_rss_mb)|SUMMARY|broken promise)' "$folder/$target.log" || true
  grep -E 'DONE' "$folder/$target.log" | tail -n 1 || true
done < <("$program")
if [ -z "$found" ]; then
  echo "no target is called '$only'; there are:" >&2
  "$program" | cut -d' ' -f1 >&2
  exit 2
fi
if [ ${#bad[@]} -gt 0 ]; then
  echo "findings in: ${bad[*]}; the inputs are in $folder/crashes, the reports in $folder/*.log"
  exit 1
fi
echo "nothing found"
