#!/usr/bin/env bash
# Loop-aware training of DFlash:  DATA=<jsonl> bash examples/run_dloop_dflash.sh 4B|8B
# The published page gives DSpark's command alone: anchors, gamma and length are those of DFlash's own training.
. "$(dirname "$0")/host.sh"
train_host dflash train_dflash.py "z-lab/Qwen3-$SIZE-DFlash-b16" 3072 \
    --num-anchors 512 --loss-decay-gamma 7.0 \
    --dloop-max-stage 3 --position-offset-max 28672
