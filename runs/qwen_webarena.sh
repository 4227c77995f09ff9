#!/usr/bin/env bash
# webarena with the paper's model and settings (AgentGym-RL's public script, arXiv 2509.08755): GRPO with ScalingInter on
# Qwen2.5-7B-Instruct (Apache 2.0). NOT RUN BY US: no GPU was at hand.
#
# The paper: WebArena, 50 tasks: Qwen2.5-7B 10 %, AgentGym-RL-7B 22, ScalingInter-7B 26; 3B: 10, AgentGym-RL-3B 18.
# On a deployment: set SHOPPING, SHOPPING_ADMIN, REDDIT, GITLAB, MAP, WIKIPEDIA and HOMEPAGE (docs/families.md).
#
# For one node of 8 GPUs with 80 GB. By `train.py --estimate 8` with these flags: 30 GiB of each in an update (120
# without --activation-checkpointing), and 12 GiB beside vLLM's half of the GPU while it plays; 3B: 14 and 5.
#
#     bash runs/qwen_webarena.sh
#     bash runs/qwen_webarena.sh --stages 15                             # the fixed horizon, to compare with
#     bash runs/qwen_webarena.sh --model Qwen/Qwen2.5-3B-Instruct       # for research only: see its licence
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # with requirements-gpu.txt installed too

torchrun --standalone --nproc_per_node=8 train.py --env webarena --options source=deployment --model Qwen/Qwen2.5-7B-Instruct \
  --algo grpo --tasks-per-step 32 --group-size 4 --minibatches 8 --steps 275 \
  --stages 8 12 15 --interval 80 --lr 5e-7 --warmup 0 --decay 0 --kl-coef 0.001 \
  --kl-in loss --kl-estimator k3 --entropy-coef 0.001 --max-invalid 0 --max-new-tokens 512 \
  --max-tokens 14848 --max-observation-tokens 2048 --micro-tokens 16384 --activation-checkpointing --engine auto \
  --eval-every 25 --save-every 25 "$@"
