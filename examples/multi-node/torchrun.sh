#!/bin/sh
# Starts one machine's ranks of a run over several machines. If a rank is lost, torchrun starts all of them again from the newest checkpoint.
# Run it on every machine, with its own NODE_RANK:
#
#   MASTER_ADDR=10.0.0.1 NNODES=2 NODE_RANK=0 NPROC=2 examples/multi-node/torchrun.sh examples/multi-node/run.yaml
#
# Use a private network: torchrun's store at MASTER_ADDR:MASTER_PORT has no authentication. Words after the file are KEY=VALUE settings.
set -eu
program=${TUNESMITH:-tunesmith}
torchrun=${TORCHRUN:-torchrun}
exec "$torchrun" --no-python \
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${NPROC:-1}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    --max-restarts "${MAX_RESTARTS:-2}" \
    "$program" train "$@" --resume
