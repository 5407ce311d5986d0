#!/usr/bin/env python3
"""A folder that --save wrote, loaded by transformers: the same logits as the program's own.

    from_pretrained.py PROGRAM WORK_DIR

Exit code 77 (skipped, for CTest) where torch, transformers or safetensors are not installed.
"""
import subprocess
import sys

try:
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

BOUND = 1e-4


def main():
    program, work = sys.argv[1:]
    text = f"{work}/text.txt"
    with open(text, "w") as file:
        file.write("In the beginning was the Word, and the Word was with someone. " * 60)
    flags = ["--data", text, "--seq", "64", "--steps", "30", "--warmup", "5", "--batch", "4"]
    subprocess.run(
        [program, *flags, "--save", f"{work}/saved", "--logits", f"{work}/logits.safetensors"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    ours = load_file(f"{work}/logits.safetensors")
    model = LlamaForCausalLM.from_pretrained(f"{work}/saved", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(ours["input"].long()).logits[0]
    error = (ours["logits"] - theirs).abs().max().item()
    verdict = "PASS" if error <= BOUND else "FAIL"
    print(
        f"{verdict} logits of {theirs.shape[0]} tokens, largest |difference| {error:.2e} "
        f"(largest |logit| {theirs.abs().max().item():.2f}), bound {BOUND:.0e}"
    )
    sys.exit(0 if error <= BOUND else 1)


main()
