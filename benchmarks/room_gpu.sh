#!/usr/bin/env bash
# room.py in processes that share one GPU, from the root of the repository; its arguments are room.py's:
#   benchmarks/room_gpu.sh PLAN.json OUT.jsonl --processes 12 --seconds 500 --done results/table1/results.csv
set -euo pipefail
export PYTHONPATH=. PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=2
export CUDA_MPS_PIPE_DIRECTORY="${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mps}" CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
if nvidia-cuda-mps-control -d; then # fails if one runs already: then its owner ends it
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
python benchmarks/room.py "$@"
