#!/usr/bin/env bash
# TextCraft with the tiny model, by the same scripts as BabyAI: clone the expert, then GRPO with
# ScalingInter. For 2 CPU cores, no GPU. NOT MEASURED with these flags.
#
# More flags go to train.py, and those in CLONE to sft.py (else the clone stays that of seed 0):
#
#     runs/textcraft.sh --seed 1
#     CLONE='--updates 100' runs/textcraft.sh --steps 5       # a look at it, in a few minutes
#     runs/textcraft.sh --stages 12 --name textcraft-fixed    # no curriculum, to compare with
#     runs/textcraft.sh --options max_depth=2                 # goals of at most two crafting levels
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # made by `make train` or `make test`

# With 1,536 tokens item names are a word or two: a fifth less to read and write than with BabyAI's
# 512. Recipes must be copied exactly, numbers included: hence the copy head, and more updates. They end at
# .02 nats a token, in 12 minutes on one thread. The clone is cached by its flags: a second run starts at once.
mkdir -p out
python sft.py --env textcraft --vocab 1536 --layers 4 --copy-head --demos 4000 --updates 1500 --lr 1e-3 ${CLONE:-} |
  tee out/textcraft-sft.txt
start=$(sed -n 's/^starting policy: //p' out/textcraft-sft.txt)

# Lists of recipes have up to 814 of those tokens, and one that lost its middle may have lost the
# recipe that matters. Turns take up to 74. The expert needs 2 to 11 turns on test, so training ends
# at 12; evaluation goes on to 30. A cloned policy is nearly sure of itself: whole groups succeed or
# fail together and teach nothing. Larger groups and a small entropy bonus keep more of them mixed.
torchrun --standalone --nproc_per_node=1 train.py --env textcraft --model "$start" \
  --steps 120 --tasks-per-step 12 --group-size 16 --stages 4 8 12 --interval 40 \
  --entropy-coef 0.003 --max-new-tokens 96 --max-observation-tokens 1024 --max-tokens 2560 \
  --eval-every 40 --eval-limit 50 "$@"
