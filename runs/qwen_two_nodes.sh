#!/usr/bin/env bash
# SciWorld on two nodes of 8 GPUs with 80 GB: runs/qwen_sciworld.sh with twice the groups in a step, by the same
# train.py. Qwen2.5-7B-Instruct (Apache 2.0). NOT RUN BY US: no GPU was at hand.
#
# The paper (one node): SciWorld, 200 tasks: Qwen2.5-7B 1.5 %, AgentGym-RL-7B 50.5, ScalingInter-7B 57.
#
# On both nodes, in the same checkout on a file system that both see (checkpoints are written by all ranks); HEAD is
# the name or address of one of the two, and its port 29500 must be open to the other:
#
#     HEAD=node-1 bash runs/qwen_two_nodes.sh
#     HEAD=node-1 NODES=4 bash runs/qwen_two_nodes.sh --tasks-per-step 64      # or any other number
#
# Each node starts environment servers of its own. If NCCL picks the wrong network: export NCCL_SOCKET_IFNAME=eth0.
# Memory, by `train.py --estimate 16` with these flags: 22 GiB of each GPU in an update, and 6 GiB beside vLLM's half
# of it while it plays. Rank 0 needs 30 GiB of its node's memory to read the weights, and again to save them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # with requirements-gpu.txt installed too

torchrun --nnodes "${NODES:-2}" --nproc_per_node 8 --rdzv_id agents --rdzv_backend c10d --rdzv_endpoint "$HEAD:29500" \
  train.py --env sciworld --model Qwen/Qwen2.5-7B-Instruct --name sciworld-two-nodes \
  --algo grpo --tasks-per-step 32 --group-size 8 --minibatches 2 --steps 660 \
  --stages 10 20 30 --interval 50 --lr 1e-6 --warmup 0 --decay 0 --kl-coef 0.001 \
  --kl-in loss --kl-estimator k3 --entropy-coef 0.001 --max-invalid 0 --max-new-tokens 200 \
  --max-tokens 9216 --max-observation-tokens 2048 --micro-tokens 16384 --activation-checkpointing --engine auto \
  --eval-every 25 --save-every 25 "$@"
