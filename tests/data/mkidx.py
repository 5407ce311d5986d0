#!/usr/bin/env python3
"""Writes small data sets in MNIST's format, good and broken, into folders of the current directory.

    python3 mkidx.py

good, plain         100 images (20 for the test part), gzip and not
n10, n101, n997     as many images
badlabel, label255  label 37 is 10, 255
cut, short          nine tenths of a gzip file, of a plain file
flip                one bit of a gzip file is wrong
swapped             images and labels have each other's names
html, empty         a web page, nothing instead of the images
fewer               99 labels for 100 images
little              sizes in little-endian order
huge                the header promises 2^32 - 1 images, one follows
float               32-bit floats instead of bytes
large               images of 32 x 32
"""
import gzip
import os
import random
import struct

SIDE = 28
UNSIGNED_BYTE = 0x08
FLOAT = 0x0D
TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"


def write_idx(path, body, dims, element=UNSIGNED_BYTE, little=False):
    """Writes a header and the body; compressed if the name ends in .gz."""
    order = "<" if little else ">"
    header = struct.pack("BBBB", 0, 0, element, len(dims))
    header += struct.pack(order + "I" * len(dims), *dims)
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "wb") as file:
        file.write(header + body)


def write_set(folder, count=100, label=lambda i: i % 10, suffix=".gz"):
    """Writes both parts of a data set: random pixels, label(i) for image i."""
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(1)
    for part, images in (("train", count), ("t10k", max(count // 5, 1))):
        pixels = bytes(rng.randrange(256) for _ in range(images * SIDE * SIDE))
        labels = bytes(label(i) for i in range(images))
        write_idx(f"{folder}/{part}-images-idx3-ubyte{suffix}", pixels, (images, SIDE, SIDE))
        write_idx(f"{folder}/{part}-labels-idx1-ubyte{suffix}", labels, (images,))


def change_bytes(path, change):
    """Replaces the content of a file by change(content)."""
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(change(content))


def keep_most(content):
    return content[: len(content) * 9 // 10]


def flip_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :]


def swap_names(a, b):
    os.rename(a, a + ".moved")
    os.rename(b, a)
    os.rename(a + ".moved", b)


def write_good_sets():
    write_set("good")
    write_set("plain", suffix="")
    write_set("n10", 10)
    write_set("n101", 101)
    write_set("n997", 997)


def write_bad_labels():
    write_set("badlabel", label=lambda i: 10 if i == 37 else i % 10)
    write_set("label255", label=lambda i: 255 if i == 37 else i % 10)
    write_set("fewer")
    write_idx(f"fewer/{TRAIN_LABELS}.gz", bytes(i % 10 for i in range(99)), (99,))


def write_damaged_files():
    write_set("cut")
    change_bytes(f"cut/{TRAIN_IMAGES}.gz", keep_most)
    write_set("flip")
    change_bytes(f"flip/{TRAIN_IMAGES}.gz", flip_bit)
    write_set("short", suffix="")
    change_bytes(f"short/{TRAIN_IMAGES}", keep_most)
    write_set("html")
    change_bytes(f"html/{TRAIN_IMAGES}.gz", lambda _: b"<!DOCTYPE html><title>404</title>" * 20)
    write_set("empty")
    change_bytes(f"empty/{TRAIN_IMAGES}.gz", lambda _: b"")
    write_set("swapped")
    swap_names(f"swapped/{TRAIN_IMAGES}.gz", f"swapped/{TRAIN_LABELS}.gz")


def write_odd_headers():
    images = bytes(100 * SIDE * SIDE)
    write_set("little")
    write_idx(f"little/{TRAIN_IMAGES}.gz", images, (100, SIDE, SIDE), little=True)
    write_set("huge")
    write_idx(f"huge/{TRAIN_IMAGES}.gz", bytes(SIDE * SIDE), (2**32 - 1, SIDE, SIDE))
    write_set("float")
    write_idx(f"float/{TRAIN_IMAGES}.gz", 4 * images, (100, SIDE, SIDE), element=FLOAT)
    write_set("large")
    write_idx(f"large/{TRAIN_IMAGES}.gz", bytes(100 * 32 * 32), (100, 32, 32))


if __name__ == "__main__":
    write_good_sets()
    write_bad_labels()
    write_damaged_files()
    write_odd_headers()
