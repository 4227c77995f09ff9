#!/usr/bin/env bash
# WebArena's bundled sites with the tiny model, in a real Chromium: clone the expert, then GRPO. NOT MEASURED
# with these flags. Most of the time is the browser's.
#
# More flags go to train.py, and those in CLONE to sft.py (else the clone stays that of seed 0):
#
#     runs/webarena.sh --seed 1
#     CLONE='--updates 100' runs/webarena.sh --steps 5       # a look at it, in a few minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # made by `make train` or `make test`

mkdir -p out
python sft.py --env webarena --vocab 1024 --copy-head --demos 300 --demo-turns 12 --updates 600 ${CLONE:-} |
  tee out/webarena-sft.txt
start=$(sed -n 's/^starting policy: //p' out/webarena-sft.txt)

torchrun --standalone --nproc_per_node=1 train.py --env webarena --model "$start" \
  --steps 10 --tasks-per-step 6 --group-size 6 --stages 6 12 --interval 5 --max-new-tokens 96 \
  --max-observation-tokens 1024 --max-tokens 4096 --concurrency 16 \
  --eval-every 10 --eval-limit 20 --test-samples 1 "$@"
