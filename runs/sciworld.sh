#!/usr/bin/env bash
# SciWorld's four shortest task types with the tiny model: clone the simulator's own solutions, then GRPO.
# NOT MEASURED with these flags.
#
# More flags go to train.py, and those in CLONE to sft.py (else the clone stays that of seed 0):
#
#     runs/sciworld.sh --seed 1
#     CLONE='--updates 100' runs/sciworld.sh --steps 5       # a look at it, in a few minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # made by `make train` or `make test`

# Find something living, not living, a plant, an animal, and put it into a box: about 12 turns of the expert's.
mkdir -p out
python sft.py --env sciworld --options types=find-living-thing,find-non-living-thing,find-plant,find-animal \
  --vocab 1024 --copy-head --demos 800 --demo-turns 20 \
  --updates 800 ${CLONE:-} | tee out/sciworld-sft.txt
start=$(sed -n 's/^starting policy: //p' out/sciworld-sft.txt)

torchrun --standalone --nproc_per_node=1 train.py --env sciworld --model "$start" \
  --options types=find-living-thing,find-non-living-thing,find-plant,find-animal \
  --steps 20 --tasks-per-step 8 --group-size 8 --stages 10 20 --interval 10 --max-new-tokens 48 \
  --max-observation-tokens 512 --max-tokens 3072 --eval-every 20 --eval-limit 40 --test-samples 1 "$@"
