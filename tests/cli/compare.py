"""Compares what two runs wrote; used by the scripts in this folder. No module beyond the standard
library.

    compare.py steps A B BOUND      losses and norms of two dumps, relative (0: the same bits)
    compare.py tensors A B BOUND    norm of the difference of each tensor, relative (0: same bits)
    compare.py dtypes FILE NAME     every tensor of the file has this dtype
    compare.py shape FILE NAME N…   the tensor has this shape and no NaN, no infinity
    compare.py json FILE [KEY…]     every line is a JSON object; those of steps have the keys
    compare.py column FILE KEY      prints the values of a key, one a line
    compare.py sum FILE FIRST LAST  prints the samples of the steps FIRST … LAST
    compare.py mean FILE FIRST LAST prints the mean loss of these steps, weighted by samples
    compare.py near A B BOUND       two numbers, relative
"""
import array
import json
import math
import signal
import struct
import sys


def read_safetensors(path):
    """Returns {name: (dtype, shape, bytes)} and the metadata."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors, metadata


def write_safetensors(path, tensors, metadata):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def relative(a, b):
    if math.isnan(a) or math.isnan(b):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def read_steps(path):
    with open(path) as file:
        rows = [line.split() for line in file]
    return [(int(step), float.fromhex(loss), float.fromhex(norm)) for step, loss, norm in rows]


def compare_steps(path_a, path_b, bound):
    a, b = read_steps(path_a), read_steps(path_b)
    if not a or [row[0] for row in a] != [row[0] for row in b]:
        return "other steps: %s and %s" % ([row[0] for row in a], [row[0] for row in b])
    worst = max((relative(x[k], y[k]), x[0], k) for x, y in zip(a, b) for k in (1, 2))
    if worst[0] > bound:
        return "step %d: %s differs by %.2e" % (worst[1], ("loss", "norm")[worst[2] - 1], worst[0])
    return None


def tensor_distance(raw_a, raw_b):
    a, b = array.array("f", raw_a), array.array("f", raw_b)
    difference = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))
    size = math.sqrt(sum(x * x for x in b))
    if math.isnan(difference) or math.isnan(size):
        return math.inf
    return difference / size if size else (0.0 if not difference else math.inf)


def compare_tensors(path_a, path_b, bound):
    a, b = read_safetensors(path_a)[0], read_safetensors(path_b)[0]
    if not a or list(a) != list(b):
        return "other tensors: %s" % sorted(set(a) ^ set(b))[:4]
    for name in a:
        if a[name][:2] != b[name][:2]:
            return "%s: %s and %s" % (name, a[name][:2], b[name][:2])
        if a[name][2] != b[name][2] and not tensor_distance(a[name][2], b[name][2]) <= bound:
            return "%s differs by %.2e" % (name, tensor_distance(a[name][2], b[name][2]))
        if bound == 0 and a[name][2] != b[name][2]:
            return "%s has other bits" % name
    return None


def no_constant(word):
    raise ValueError("%s is not JSON" % word)


def read_json(path):
    with open(path) as file:
        text = file.read()
    if text and not text.endswith("\n"):
        raise ValueError("the last line is cut off")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def steps_of(rows):
    return [row for row in rows if "loss" in row]


def check_json(path, keys):
    rows = read_json(path)
    steps = steps_of(rows)
    if not rows or not all(isinstance(row, dict) for row in rows):
        return "no objects"
    if keys and not steps:
        return "no steps"
    for row in steps:
        missing = [key for key in keys if not isinstance(row.get(key), (int, float))]
        if missing:
            return "step %s has no number for %s" % (row.get("step"), missing)
    numbers = [row["step"] for row in steps]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False:
        return "steps %s" % numbers
    return None


def rows_between(path, first, last):
    rows = [row for row in steps_of(read_json(path)) if int(first) <= row["step"] <= int(last)]
    assert len(rows) == int(last) - int(first) + 1, "not all steps are there"
    return rows


def main(what, *args):
    if what == "steps":
        return compare_steps(args[0], args[1], float(args[2]))
    if what == "tensors":
        return compare_tensors(args[0], args[1], float(args[2]))
    if what == "dtypes":
        found = {entry[0] for entry in read_safetensors(args[0])[0].values()}
        return None if found == {args[1]} else "dtypes %s" % found
    if what == "shape":
        dtype, shape, raw = read_safetensors(args[0])[0].get(args[1], (None, None, b""))
        finite = all(math.isfinite(x) for x in array.array("f", raw))
        return None if shape == [int(n) for n in args[2:]] and finite else "%s %s" % (dtype, shape)
    if what == "json":
        return check_json(args[0], args[1:])
    if what == "column":
        print("\n".join(repr(row[args[1]]) for row in read_json(args[0]) if args[1] in row))
        return None
    if what == "sum":
        print(sum(row["samples"] for row in rows_between(*args)))
        return None
    if what == "mean":
        rows = rows_between(*args)
        total = math.fsum(row["samples"] * row["loss"] for row in rows)
        print(repr(total / sum(row["samples"] for row in rows)))
        return None
    if what == "near":
        distance = relative(float(args[0]), float(args[1]))
        return None if distance <= float(args[2]) else "%s and %s differ by %.2e" % (args[0], args[1], distance)
    return "unknown: %s" % what


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    message = main(*sys.argv[1:])
    if message:
        sys.exit(message)
