#!/usr/bin/env bash
# searchqa with the paper's model and settings (AgentGym-RL's public script, arXiv 2509.08755): GRPO with ScalingInter on
# Qwen2.5-7B-Instruct (Apache 2.0). NOT RUN BY US: no GPU was at hand.
#
# The paper: deep search, 400 questions: Qwen2.5-7B 18.75 %, AgentGym-RL-7B 34, ScalingInter-7B 38.25; 3B: 13.5, AgentGym-RL-3B 25.75.
# As it stands on the bundled corpus. The paper's: --options retriever=http://HOST:PORT/retrieve questions=FOLDER
# with Search-R1's retriever over Wikipedia and FlashRAG's Natural Questions and HotpotQA. It stops
# near step 400: the public script would go on for 106,000.
#
# For one node of 8 GPUs with 80 GB. By `train.py --estimate 8` with these flags: 30 GiB of each in an update (120
# without --activation-checkpointing), and 12 GiB beside vLLM's half of the GPU while it plays; 3B: 14 and 5.
#
#     bash runs/qwen_searchqa.sh
#     bash runs/qwen_searchqa.sh --stages 5                             # the fixed horizon, to compare with
#     bash runs/qwen_searchqa.sh --model Qwen/Qwen2.5-3B-Instruct       # for research only: see its licence
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # with requirements-gpu.txt installed too

torchrun --standalone --nproc_per_node=8 train.py --env searchqa --model Qwen/Qwen2.5-7B-Instruct \
  --algo grpo --tasks-per-step 32 --group-size 4 --minibatches 4 --steps 400 \
  --stages 5 8 10 --interval 100 --lr 1e-6 --warmup 0 --decay 0 --kl-coef 0.001 \
  --kl-in loss --kl-estimator k3 --entropy-coef 0.001 --max-invalid 0 --max-new-tokens 512 \
  --max-tokens 9216 --max-observation-tokens 2048 --micro-tokens 16384 --activation-checkpointing --engine auto \
  --eval-every 25 --save-every 25 "$@"
