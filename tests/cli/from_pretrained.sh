#!/usr/bin/env bash
# A folder that --save wrote, loaded by Hugging Face's transformers: same logits. Skipped where torch
# or transformers are missing; SHARD_PYTHON names another Python that has them.
# ctest: TIMEOUT 300
exec "${SHARD_PYTHON:-python3}" "$SHARD_ROOT/tests/cli/from_pretrained.py" \
    "$SHARD_BUILD/01_single_gpu/llama" "$PWD"
