#!/usr/bin/env bash
# A real pretrained chat model, SmolLM2-135M-Instruct, on TextCraft, sampled with vLLM: clone a few hundred
# games of the expert, then GRPO. On 2 CPU cores three training steps are what an hour has room for; with
# `--steps 200` on a GPU it is a real run.
#
#     runs/smollm2_textcraft.sh
#     runs/smollm2_textcraft.sh --steps 200 --tasks-per-step 16 --group-size 8 --stages 4 8 12 --interval 50
#
# More flags go to train.py, and those in CLONE to sft.py, where out/smollm2-clone is not there yet. The model's
# weights come in a package of the Python Package Index (Apache 2.0), no hub is needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # made by `make test`, which installs vLLM's CPU build too

# One crafting level: short games, short lists of recipes. A learning rate for a pretrained model.
start=out/smollm2-clone/policy
[ -e "$start/config.json" ] || python sft.py --env textcraft --options max_depth=1 --model smollm2 --demos 300 --updates 60 \
  --batch-tokens 2048 --lr 2e-4 --name smollm2-clone ${CLONE:-}

torchrun --standalone --nproc_per_node=1 train.py --engine vllm --env textcraft --options max_depth=1 \
  --model "$start" --steps 3 --tasks-per-step 4 --group-size 4 --stages 4 \
  --lr 1e-5 --minibatches 1 --warmup 1 --max-tokens 2048 --max-observation-tokens 1024 --eval-every 0 "$@"
