#!/usr/bin/env bash
# The README's first table: the default configuration from three seeds, and beside each run the same
# time spent on cloning alone. On one thread each, four jobs on two cores: half an hour for a seed, 22 minutes for
# more cloning. On an idle machine probably less than half of that.
#
#     runs/seeds.sh                 # seeds 0 1 2
#     runs/seeds.sh 3 4             # others
#     MORE=30 TRAIN="--steps 5" EVALUATE="--limit 20" runs/seeds.sh 5     # a look at it
#
# The gains that it prints after each training run are the README's; docs/curve.png is seed 0's curve.png.
# Then: python evaluate.py --compare out/more-cloning-0 out/seed0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # made by `make train` or `make test`
mkdir -p out

# 300 updates take 53 s on one idle thread, so in the 9 or 10 minutes of 200 training steps cloning does about
# 3,000, beside the 300 of the default.
MORE=${MORE:-3300}
for seed in ${@:-0 1 2}; do
  torchrun --standalone --nproc_per_node=1 train.py --seed "$seed" --name "seed$seed" ${TRAIN:-}
  python sft.py --seed "$seed" --updates "$MORE" | tee "out/more-cloning-$seed.txt"
  more=$(sed -n 's/^starting policy: //p' "out/more-cloning-$seed.txt")
  python evaluate.py --model "$more" --samples 2 --seed "$seed" --name "more-cloning-$seed" ${EVALUATE:-}
done
