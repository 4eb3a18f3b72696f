#!/usr/bin/env bash
# Loop-aware training of DSpark with the paper's settings:  DATA=<jsonl> bash examples/run_dloop_dspark.sh 4B|8B
. "$(dirname "$0")/host.sh"
train_host dspark train_dflash.py "deepseek-ai/dspark_qwen3_${size}_block7" 4096 \
    --num-anchors 512 --loss-decay-gamma 4.0 \
    --dloop-max-stage 3 --dloop-loss-weight 0.25
