"""Makes broken checkpoints; used by resume.sh.

    tamper.py FOLDER OUT    copies FOLDER into many folders OUT/CASE, each with one fault

Prints "CASE WHAT" for each, where WHAT is `refused`, or `either` if the fault may also go unseen:
then the weights must be what they were, or the fault lies in bytes that no check can know.
"""
import json
import os
import random
import shutil
import struct
import sys

from compare import read_safetensors, write_safetensors

source, out = sys.argv[1:3]


def case(name, what="refused"):
    folder = f"{out}/{name}"
    shutil.copytree(source, folder)
    print(name, what)
    return folder


def change(name, file, function, what="refused"):
    path = f"{case(name, what)}/{file}"
    with open(path, "rb") as old:
        raw = old.read()
    with open(path, "wb") as new:
        new.write(function(raw))


def change_header(name, file, function, what="refused"):
    """The JSON is replaced, the data stay."""

    def replace(raw):
        length = struct.unpack("<Q", raw[:8])[0]
        text = function(json.loads(raw[8 : 8 + length]))
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    change(name, file, replace, what)


def change_tensors(name, file, function, what="refused"):
    path = f"{case(name, what)}/{file}"
    tensors, metadata = read_safetensors(path)
    function(tensors, metadata)
    write_safetensors(path, tensors, metadata)


def edited(header, name, **fields):
    header[name].update(fields)
    return header


def cuts(file, short):
    with open(f"{source}/{file}", "rb") as old:
        raw = old.read()
    data = 8 + struct.unpack("<Q", raw[:8])[0]
    for keep in (0, 1, 7, 8, 9, data - 1, data, data + 4, len(raw) - 1):
        change(f"{short}_cut_{keep}", file, lambda raw: raw[:keep])
    change(f"{short}_long", file, lambda raw: raw + b"\0")
    change(f"{short}_zeros", file, lambda raw: bytes(len(raw)))
    change(f"{short}_huge_header", file, lambda raw: struct.pack("<Q", 2**63 - 1) + raw[8:])
    change(f"{short}_gigabytes", file, lambda raw: struct.pack("<Q", 1 << 32) + raw[8:])
    change(f"{short}_html", file, lambda raw: b"<!DOCTYPE html>" * 100)


def flips(file, short, count):
    """Single bits of the header, spread over it, with a little chance."""
    rng = random.Random(1)
    with open(f"{source}/{file}", "rb") as old:
        length = struct.unpack("<Q", old.read(8))[0]
    for k in range(count):
        at = min(8 + length - 1, int((k + rng.random()) * (8 + length) / count))
        bit = 1 << rng.randrange(8)
        flip = lambda raw: raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]
        change(f"{short}_flip_{at}_{bit}", file, flip, "either")


def headers(file, short):
    with open(f"{source}/{file}", "rb") as old:
        length = struct.unpack("<Q", old.read(8))[0]
        names = [name for name in json.loads(old.read(length)) if name != "__metadata__"]
    first, last = names[0], names[-1]
    change_header(f"{short}_no_json", file, lambda header: b"[1, 2, 3]")
    change_header(f"{short}_deep", file, lambda header: b'{"a": ' * 50000)
    change_header(f"{short}_twice", file,
                  lambda h: (json.dumps(h)[:-1] + ', "%s": %s}' % (first, json.dumps(h[first]))).encode())
    change_header(f"{short}_dtype", file, lambda h: edited(h, first, dtype="I32"))
    change_header(f"{short}_odd_dtype", file, lambda h: edited(h, first, dtype="F31"))
    change_header(f"{short}_shape", file, lambda h: edited(h, first, shape=[2] + h[first]["shape"]))
    change_header(f"{short}_negative", file, lambda h: edited(h, first, shape=[-1, -32]))
    change_header(f"{short}_overflow", file, lambda h: edited(h, first, shape=[2**33, 2**33]))
    change_header(f"{short}_outside", file, lambda h: edited(h, last, data_offsets=[2**40, 2**40 + 128]))
    change_header(f"{short}_overlap", file, lambda h: edited(h, last, data_offsets=h[first]["data_offsets"]))
    change_header(f"{short}_no_offsets", file, lambda h: edited(h, last, data_offsets=[]))
    change_tensors(f"{short}_missing", file, lambda t, m: t.pop(last))
    change_tensors(f"{short}_renamed", file, lambda t, m: t.update({first + "x": t.pop(first)}))
    change_tensors(f"{short}_empty", file, lambda t, m: t.clear())


def metadata(key, value, what="refused"):
    def edit(tensors, facts):
        facts.pop(key) if value is None else facts.update({key: value})
    spelt = "missing" if value is None else value.replace(" ", "blank").replace("+", "plus")
    name = f"training_{key}_{spelt}"
    change_tensors(name, "training.safetensors", edit, what)


cuts("model.safetensors", "model")
cuts("training.safetensors", "training")
flips("model.safetensors", "model", 24)
flips("training.safetensors", "training", 24)
headers("model.safetensors", "model")
headers("training.safetensors", "training")
change_tensors("model_stranger", "model.safetensors", lambda t, m: t.update({"odd": ("F32", [1], b"1234")}))
for key in ("step", "seed", "data", "optimizer", "batch"):
    metadata(key, None)
metadata("step", "-3")
metadata("step", "ten")
metadata("step", "9" * 30)
metadata("step", "10x")
metadata("step", "")
metadata("step", " 4")
metadata("step", "+4")
metadata("step", "1000000000001")
metadata("step", "9223372036854775807")
for file in ("model", "training"):
    os.remove(f"{case(file + '_no_file')}/{file}.safetensors")
    folder = case(file + "_is_folder")
    os.remove(f"{folder}/{file}.safetensors")
    os.mkdir(f"{folder}/{file}.safetensors")


def config(kind, what, **members):
    """config.json with other members; None: without."""
    path = f"{case('config_' + kind, what)}/config.json"
    with open(path) as old:
        facts = json.load(old)
    for key, value in members.items():
        facts.pop(key, None)
        if value is not None:
            facts[key] = value
    with open(path, "w") as new:
        json.dump(facts, new, separators=(" ,\n", " : "))


os.remove(f"{case('config_no_file', 'either')}/config.json")
change("config_empty", "config.json", lambda raw: b"")
change("config_cut", "config.json", lambda raw: raw[:-3])
change("config_list", "config.json", lambda raw: b"[" + raw + b"]")
change("config_html", "config.json", lambda raw: b"<!DOCTYPE html>")
change("config_tail", "config.json", lambda raw: raw + b"x")
change("config_zero", "config.json", lambda raw: raw + b"\0")
change("config_no_comma", "config.json", lambda raw: raw.replace(b",", b"", 1))
change("config_long", "config.json", lambda raw: raw + b" " * 70000)
change("config_deep", "config.json", lambda raw: b'{"a": ' * 5000)
config("same", "either")
config("unknown", "either", torch_dtype="bfloat16", quantization=[{"a": "}"}, "]"], name='a"b\\')
config("sparse", "either", hidden_act=None, rms_norm_eps=None, rope_theta=None, attention_bias=None)
config("default_scaling", "either", rope_scaling={"rope_type": "default"})
config("parameters", "either", rope_theta=None,
       rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
config("heads", "refused", num_attention_heads=4)
config("kv_heads", "refused", num_key_value_heads=2)
config("eps", "refused", rms_norm_eps=1e-6)
config("act", "refused", hidden_act="gelu")
config("bias", "refused", attention_bias=True)
config("mlp_bias", "refused", mlp_bias=True)
config("tied", "refused", tie_word_embeddings=True)
config("type", "refused", model_type="mistral")
config("llama3", "refused", rope_scaling={"factor": 8.0, "rope_type": "llama3"})
config("linear", "refused", rope_scaling={"factor": 2.0, "type": "linear"})
config("yarn", "refused", rope_theta=None,
       rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0})
config("theta_inside", "refused", rope_theta=None,
       rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
path = case("config_is_folder")
os.remove(f"{path}/config.json")
os.mkdir(f"{path}/config.json")
