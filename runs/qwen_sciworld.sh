#!/usr/bin/env bash
# sciworld with the paper's model and settings (AgentGym-RL's public script, arXiv 2509.08755): GRPO with ScalingInter on
# Qwen2.5-7B-Instruct (Apache 2.0). NOT RUN BY US: no GPU was at hand.
#
# The paper: SciWorld, 200 tasks: Qwen2.5-7B 1.5 %, AgentGym-RL-7B 50.5, ScalingInter-7B 57; 3B: 1, AgentGym-RL-3B 22.5.
#
# For one node of 8 GPUs with 80 GB. By `train.py --estimate 8` with these flags: 30 GiB of each in an update (120
# without --activation-checkpointing), and 12 GiB beside vLLM's half of the GPU while it plays; 3B: 14 and 5.
#
#     bash runs/qwen_sciworld.sh
#     bash runs/qwen_sciworld.sh --stages 20                             # the fixed horizon, to compare with
#     bash runs/qwen_sciworld.sh --model Qwen/Qwen2.5-3B-Instruct       # for research only: see its licence
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # with requirements-gpu.txt installed too

torchrun --standalone --nproc_per_node=8 train.py --env sciworld --model Qwen/Qwen2.5-7B-Instruct \
  --algo grpo --tasks-per-step 16 --group-size 8 --minibatches 2 --steps 1320 \
  --stages 10 20 30 --interval 100 --lr 1e-6 --warmup 0 --decay 0 --kl-coef 0.001 \
  --kl-in loss --kl-estimator k3 --entropy-coef 0.001 --max-invalid 0 --max-new-tokens 200 \
  --max-tokens 9216 --max-observation-tokens 2048 --micro-tokens 16384 --activation-checkpointing --engine auto \
  --eval-every 25 --save-every 25 "$@"
