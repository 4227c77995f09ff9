#!/usr/bin/env bash
# SearchQA's one-hop questions with the tiny model: clone the expert, then GRPO.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # made by `make train` or `make test`
