#!/bin/sh
# One machine's part of a run over several: torchrun starts its ranks, and starts all of them again from the newest checkpoint when one is lost.
# On every machine, with its own NODE_RANK:
#
#   MASTER_ADDR=10.0.0.1 NNODES=2 NODE_RANK=0 NPROC=2 examples/multi-node/torchrun.sh examples/multi-node/run.yaml
#
# torchrun's store at MASTER_ADDR:MASTER_PORT is open to who reaches it: a private network, please. The words after the file are KEY=VALUE.
set -eu
program=${TUNESMITH:-tunesmith}
torchrun=${TORCHRUN:-torchrun}
exec "$torchrun" --no-python \
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${NPROC:-1}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    --max-restarts "${MAX_RESTARTS:-2}" \
    "$program" train "$@" --resume
