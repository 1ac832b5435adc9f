"""Hostile files and folders given to the commands that read them: each must be served, or refused in one line.

    python benchmarks/hostile_inputs.py [NUMBER…]

Within 60 s, below 4 GB, with no code of theirs run and nothing left behind by what refuses them. About 12 minutes.
"""

import gzip
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
LONGEST, MOST = 60.0, 4e9  # seconds, bytes
WRITE = "inference/run.py model.path=target prompt=hello max_new_tokens=4"
CHAT = f"{WRITE} chat=true"
SHOW = "data/run.py model.path=target data.path=given data.held_out=0 inspect=1"
RUN = "inference/run.py run=run prompt=hello max_new_tokens=4"
EVALUATE = (
    "eval/run.py model.path=target drafter=prompt_lookup workload=x.jsonl prompts=1 max_new_tokens=4 hf=false out=o"
)
LOOK = "eval/run.py run=run prompts=1 max_new_tokens=4 hf=false repeats=1 warmup=0 tier=live out=o"
CONVERT = "train/convert.py pickle=pytorch_model.bin out=d"
Attempt = tuple[str, str, Callable[[Path], object]]  # a name, a command, and what writes the input into a folder


class Code:
    """What runs code where a pickle of it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Return the call."""
        return os.system, ("touch ran",)


def changed(file: str, **values: Any) -> Callable[[Path], object]:
    """Return what changes keys of a JSON file of the target or the run."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def head(**values: Any) -> Callable[[Path], object]:
    """Return what changes keys of a head's configuration."""

    def change(folder: Path) -> None:
        path = folder / "run" / "head" / "config.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"head": content["head"] | values}))

    return change


def written(file: str, content: bytes | str) -> Callable[[Path], object]:
    """Return what writes a file."""
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return what changes the tensors of a file."""

    def do(folder: Path) -> None:
        found = load_file(folder / file)
        change(found)
        save_file(found, folder / file, metadata={"format": "pt"})

    return do


def header(**entries: Any) -> Callable[[Path], object]:
    """Return what writes weights that have a header alone."""
    text = json.dumps(entries).encode()
    return written("target/model.safetensors", struct.pack("<Q", len(text)) + text + bytes(64))


def instead(file: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what puts something else in a file's place."""

    def do(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return do


def linked(path: Path) -> None:
    """Let a folder hold a link to itself beside a record."""
    path.mkdir()
    (path / "again").symlink_to(path)
    (path / "a.jsonl").write_text('{"text": "x y"}\n')


def weight(name: str) -> str:
    """Return the name of a matrix of the first layer."""
    return f"model.layers.0.self_attn.{name}.weight"


def chats(*messages: Any) -> str:
    """Return a line with one chat."""
    return json.dumps({"messages": list(messages)}) + "\n"


CONFIG: dict[str, dict[str, Any]] = {
    "no KV heads": {"num_key_value_heads": 0}, "negative heads": {"num_attention_heads": -4},
    "odd KV heads": {"num_key_value_heads": 3}, "a size in words": {"hidden_size": "wide"},
    "an eps that is no number": {"rms_norm_eps": float("nan")}, "a list for rope": {"rope_parameters": [1]},
    "a negative theta": {"rope_parameters": {"rope_theta": -1.0, "rope_type": "default"}},
    "rope of no kind": {"rope_parameters": {"rope_type": "../x"}}, "a trillion tokens": {"vocab_size": 10**12},
    "half a layer": {"num_hidden_layers": 2.5}, "an activation that is none": {"hidden_act": "os.system"},
    "a model type that is a path": {"model_type": "../../x"}, "no architecture": {"architectures": []},
    "code in auto_map": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}},
    "a quantisation that is none": {"quantization_config": {"quant_method": "evil"}},
    "a quantisation in words": {"quantization_config": "gptq"}, "no context": {"max_position_embeddings": 0},
    "a million ends": {"eos_token_id": [*range(1_000_000)]}, "an end in words": {"eos_token_id": "end"},
    "a dtype that is none": {"dtype": "object"}, "a huge head": {"head_dim": 10**9},
    "padding beyond all": {"pad_token_id": 10**12}, "a dropout of 7": {"attention_dropout": 7.0},
    "another attention": {"_attn_implementation": "me/kernel"},
    "a deep value": {"x": json.loads("[" * 900 + "]" * 900)},
}  # fmt: skip
TEMPLATES: dict[str, str] = {
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "attributes of a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "code by a global": "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "a long loop": "{% for i in range(10**9) %}{% endfor %}", "a long text": "{{ 'x' * 10**10 }}",
    "a wide format": "{{ '%1000000000d' % 1 }}", "a division by zero": "{{ 1 // 0 }}",
    "an include": "{% include '/etc/passwd' %}",
    "escape codes in an error": "{{ raise_exception('\x1b[2J\\n\\ntwo lines') }}", "no syntax": "{% if %}",
    "nested loops": "{% for a in range(9**5) %}{% for b in range(9**5) %}{{ a }}{% endfor %}{% endfor %}",
    "a thousand filters": "{{ messages" + "|list" * 5000 + " }}", "a lipsum": "{{ lipsum(10000000) }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a set that grows": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x*2 %}{% endfor %}",
}  # fmt: skip
DATA: dict[str, str] = {
    "content that is a number": chats({"role": "user", "content": 7}, {"role": "assistant", "content": "y"}),
    "content of parts of parts": chats({"role": "user", "content": [[["x"]]]}, {"role": "assistant", "content": "y"}),
    "a role that is a list": chats({"role": ["user"], "content": "x"}, {"role": "assistant", "content": "y"}),
    "messages that are text": '{"messages": "user: x"}\n', "messages of null": '{"messages": [null, null]}\n',
    "half a surrogate": '{"text": "a \\ud800 b"}\n', "an infinite number": '{"text": "x y", "n": 1e999}\n',
    "NUL bytes": b'{"text": "x\x00y"}\n', "a byte order mark": b'\xef\xbb\xbf{"text": "x y"}\r\n',
    "two keys of one name": '{"text": 1, "text": "x y"}\n', "UTF-16": '{"text": "x"}'.encode("utf-16"),
    "a key of 10 MB": json.dumps({"k" * 10**7: 1, "text": "x y"}), "a million keys": json.dumps(
        {"text": "x y"} | {str(i): i for i in range(10**6)}),
    "tool calls of a string": chats({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "run(x)"}),
    "arguments in arguments": chats({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 9000}}]}),
}  # fmt: skip
YAML: dict[str, str] = {
    "a YAML of laughs": "a0: &a0 [x, x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 30)),
    "a YAML that makes objects": "model: !!python/object/apply:os.system [touch ran]",
    "a YAML with an interpolation": "model: {path: '${oc.env:HOME}'}", "a YAML of a number": "7",
    "a YAML without an end": "model: {path: [", "a YAML of a target elsewhere": "model: {path: /dev/zero}",
}  # fmt: skip


def attempts() -> list[Attempt]:
    """Return all, in their order."""
    name, other = weight("q_proj"), weight("k_proj")
    found: list[Attempt] = [(each, WRITE, changed("target/config.json", **values)) for each, values in CONFIG.items()]
    found += [(each, CHAT, written("target/chat_template.jinja", text)) for each, text in TEMPLATES.items()]
    found += [(each, SHOW.replace("given", "x.jsonl"), written("x.jsonl", text)) for each, text in DATA.items()]
    found += [(each, LOOK, written("run/config.yaml", text)) for each, text in YAML.items()]
    cut = (ROOT / "examples" / "tiny" / "tokenizer.json").read_bytes()[:5000]
    weights = "target/model.safetensors"
    return [*found,
        ("a tokenizer cut", WRITE, written("target/tokenizer.json", cut)),
        ("a tokenizer of a list", WRITE, written("target/tokenizer.json", "[]")),
        ("a tokenizer of a class", WRITE, changed("target/tokenizer_config.json", tokenizer_class="os.system")),
        ("an end that is a number", WRITE, changed("target/tokenizer_config.json", eos_token=7)),
        ("a normalizer of none", WRITE, changed("target/tokenizer.json", normalizer={"type": "Evil"})),
        ("added tokens beyond all", WRITE, changed("target/tokenizer.json", added_tokens=[{
            "id": 2**31, "content": "x", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True}])),
        ("a generation config of a list", WRITE, written("target/generation_config.json", "[1]")),
        ("offsets beyond the file", WRITE, header(**{
            name: {"dtype": "F32", "shape": [9], "data_offsets": [0, 10**12]}})),
        ("offsets that overlap", WRITE, header(**{
            each: {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]} for each in (name, other)})),
        ("a dtype of none", WRITE, header(**{name: {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}})),
        ("a shape of billions", WRITE, header(**{name: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 64]}})),
        ("a matrix of another shape", WRITE, tensors(weights, lambda t: t.update({name: t[name][:7].clone()}))),
        ("infinite weights", WRITE, tensors(weights, lambda t: t[name].fill_(float("inf")))),
        ("an extra tensor", WRITE, tensors(weights, lambda t: t.update({"evil": torch.ones(3)}))),
        ("a folder for weights", WRITE, instead(weights, Path.mkdir)),
        ("a link to itself for weights", WRITE, instead(weights, lambda path: path.symlink_to(path))),
        ("a pipe for weights", WRITE, instead(weights, os.mkfifo)),
        ("a device for weights", WRITE, instead(weights, lambda path: path.symlink_to("/dev/zero"))),
        ("an index out of the folder", WRITE, instead(weights, lambda path: path.with_name(
            path.name + ".index.json").write_text(json.dumps({"weight_map": {name: "../../x.safetensors"}})))),
        ("a pickle for weights", WRITE, instead(weights, lambda path: torch.save(
            Code(), path.with_name("pytorch_model.bin")))),
        ("a bomb of gzip", SHOW.replace("given", "x.jsonl.gz"), written("x.jsonl.gz", gzip.compress(b" " * 2**29))),
        ("a bomb of xz", SHOW.replace("given", "x.txt.xz"), written("x.txt.xz", lzma.compress(b"a" * 2**29))),
        ("a parquet that is none", SHOW.replace("given", "x.parquet"), written("x.parquet", b"PAR1" + bytes(99))),
        ("a folder in itself", SHOW, instead("given", linked)),
        ("a pipe for data", SHOW.replace("given", "x.jsonl"), lambda folder: os.mkfifo(folder / "x.jsonl")),
        ("a workload of numbers", EVALUATE, written("x.jsonl", "1\n2\n")),
        ("a workload of a deep chat", EVALUATE, written("x.jsonl", "[" * 10**5)),
        ("a prompt of 4 MB", EVALUATE, written("x.jsonl", json.dumps({"prompt": "a b " * 10**6}))),
        ("a head of a million layers", RUN, head(layers=10**6)), ("a head of a class", RUN, head(name="__class__")),
        ("a head of half a width", RUN, head(intermediate_size=0.5)),
        ("a head that rotates none", RUN, head(rope_theta=0)), ("a head longer than all", RUN, head(length=10**18)),
        ("a head of unknown keys", RUN, head(_target_="os.system")),
        ("a tree of a billion nodes", RUN, changed("run/head/config.json", tree={
            "kind": "dynamic", "depth": 5, "top_k": 3, "nodes": 10**9, "paths": [], "widths": []})),
        ("a tree of another kind", RUN, changed("run/head/config.json", tree={"kind": "evil"})),
        ("a head's weights cut", RUN, written("run/head/model.safetensors", b"\x08" + bytes(7) + b"{}")),
        ("a head's weights without numbers", RUN, tensors("run/head/model.safetensors", lambda t: [
            each.fill_(float("nan")) for each in t.values()])),
        ("a report of no report", "eval/run.py compare=[a.json,b.json] out=o", lambda folder: [
            (folder / each).write_text('{"schema": 1, "rows": [{"tau": NaN}]}') for each in ("a.json", "b.json")]),
        ("a card that is a link", "train/publish.py run=run repo=me/x dry_run=true", lambda folder: (
            folder / "run" / "report.html").symlink_to("/etc/passwd")),
        ("a pickle that runs", CONVERT, lambda folder: torch.save({"x": Code()}, folder / "pytorch_model.bin")),
        ("a pickle cut", CONVERT, written("pytorch_model.bin", b"PK\x03\x04" + bytes(99))),
        ("stored features of a list", "train/run.py model.path=target features=stored features.path=s out=o",
         lambda folder: ((folder / "s").mkdir(), (folder / "s" / "meta.json").write_text("[1]"))),
    ]  # fmt: skip


def verdict(folder: Path, command: str) -> str:
    """Run a command, and return what came of it; what begins with NOT is not as promised."""
    before = set(folder.rglob("*"))
    script, *words = command.split()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (folder.parent / "said").open("w+", encoding="utf-8", errors="replace") as said:
        begin = time.perf_counter()
        started = ["timeout", "-s", "KILL", str(LONGEST), sys.executable, str(ROOT / script), *words]
        job = subprocess.Popen(started, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        _, status, usage = os.wait4(job.pid, 0)
        seconds, code = time.perf_counter() - begin, os.waitstatus_to_exitcode(status)
        job.returncode = code
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip() and "it/s]" not in line]
    left = sorted(str(path.relative_to(folder)) for path in set(folder.rglob("*")) - before)
    told = f"status {code}, {seconds:.0f} s, {usage.ru_maxrss / 1e6:.1f} GB: {(lines or [''])[-1][:200]}"
    odd = [line for line in lines if not line.startswith("error: ")] if code else []
    wrong = "ran" in left or usage.ru_maxrss * 1024 > MOST or code not in (0, 1, 2) or (code and (odd or left))
    return f"NOT AS PROMISED {told} {[*left[:3], *odd[:3]]}" if wrong else f"{'refused' if code else 'served'}, {told}"


def main() -> None:
    """Try and print."""
    every = attempts()
    wanted = sorted({int(word) for word in sys.argv[1:]}) or [*range(len(every))]
    right = 0
    with tempfile.TemporaryDirectory() as place:
        base = Path(place, "base")
        shutil.copytree(
            ROOT / "examples" / "tiny", base / "target", ignore=shutil.ignore_patterns("*.py", "*.xz", "*.md")
        )
        words = ["trainer=debug", "trainer.steps=1", "eval.prompts=0", "model.path=target", "out=run"]
        words += [f"data.path={ROOT / 'examples' / 'tiny' / 'chats.jsonl.xz'}"]
        subprocess.run(
            [sys.executable, str(ROOT / "train" / "run.py"), *words], cwd=base, check=True, capture_output=True
        )
        for number in wanted:
            name, command, write = every[number]
            folder = Path(place, "given")
            shutil.copytree(base, folder)
            write(folder)
            found = verdict(folder, command)
            right += not found.startswith("NOT")
            print(f"{number} {name}: {found}", flush=True)
            shutil.rmtree(folder)
    print(f"{right} of {len(wanted)} served, or refused in one line")


if __name__ == "__main__":
    main()
