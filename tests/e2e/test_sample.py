"""`rmdm sample` as people run it: texts on standard output, one clear line for what cannot be done."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

import rmdm
from rmdm.cli import main
from rmdm.terminal import Frames
from tests.release import LENGTH, save_release


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {kind: str(save_release(root / kind, kind)) for kind in ("mdlm", "rmdm", "ar")}


def said(capsys, *args: str) -> list[str]:
    assert main(["sample", *args, "--device", "cpu"]) == 0
    return capsys.readouterr().out.removesuffix("\n").split("\n\n")


def test_texts_are_those_of_the_python_api(runs, capsys):
    model = rmdm.load(runs["rmdm"], "cpu")
    assert said(capsys, runs["rmdm"], "--steps", "3") == model.generate(4, 3).texts
    flags = ["--n", "2", "--steps", "3", "--seed", "5", "--temperature", "0.8", "--top-p", "0.9", "--sampler", "margin"]
    flags += ["--remask", "0.2", "--guidance", "1.5", "--latent-temperature", "paper", "--latent-seed", "3"]
    expected = model.generate(
        2, 3, 5, temperature=0.8, top_p=0.9, sampler="margin", remask=0.2, guidance=1.5, latent_temperature="paper",
        latent_seed=3,
    )  # fmt: skip
    assert said(capsys, runs["rmdm"], *flags) == expected.texts
    anew = said(capsys, runs["mdlm"], "--steps", "4", "--sampler", "spaced", "--spacing", "2")
    assert anew == model_texts(runs["mdlm"], steps=4, sampler="spaced", spacing=2)
    assert anew != model_texts(runs["mdlm"], steps=4, sampler="spaced")
    assert said(capsys, runs["rmdm"], "--like", "anna was sad") == model.generate(4, like="anna was sad").texts
    between = said(capsys, runs["rmdm"], "--between", "anna", "tom", "--weight", "0.25")
    assert between == model.generate(4, between=("anna", "tom"), weight=0.25).texts
    affixes = said(capsys, runs["mdlm"], "--prefix", "anna was", "--suffix", "day .", "--tokens", "4")
    assert affixes == model_texts(runs["mdlm"], prefix="anna was", suffix="day .", tokens=4)
    infill = said(
        capsys, runs["rmdm"], "--infill", "anna [MASK:2] .", "--draws", "3", "--rounds", "2", "--given", "resample"
    )
    assert infill == model.infill("anna [MASK:2] .", 4, given="resample", draws=3, rounds=2).texts


def model_texts(run: str, **options) -> list[str]:
    return rmdm.load(run, "cpu").generate(4, **options).texts


def test_json_is_one_object_with_the_settings_used(runs, capsys):
    assert main(["sample", runs["rmdm"], "--n", "2", "--steps", "3", "--json", "--infill", "anna was [MASK] ."]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert printed["ok"] is True
    assert len(printed["texts"]) == 2
    assert [len(row) for row in printed["tokens"]] == [4, 4]
    assert printed["settings"]["steps"] == 3
    assert printed["settings"]["sampler"] == "ancestral"
    assert printed["model_step"] == 7


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("rmdm", ["--n", "0"], "--n 0 is below 1; use 4, for example"),
        ("rmdm", ["--steps", "0"], "--steps 0 is below 1; use 16, for example"),
        ("rmdm", ["--seed", "-1"], "--seed -1 is below 0; use 0, for example"),
        ("rmdm", ["--temperature", "-1"], "--temperature -1.0 is not a positive number; use 1.0, or 0.0001 for the "
         "likeliest\n"),
        ("rmdm", ["--top-p", "0"], "--top-p 0.0 is not above 0 and at most 1; use 0.9, or 1.0 to keep every token"),
        ("rmdm", ["--latent-temperature", "warm"], "argument --latent-temperature: 'warm' is neither"),
        ("rmdm", ["--sampler", "ancestrl"], "--sampler 'ancestrl' is unknown; did you mean 'ancestral'?"),
        ("rmdm", ["--given", "encod", "--prefix", "anna"], "--given 'encod' is unknown; did you mean 'encode'?"),
        ("rmdm", ["--infill", "anna was happy"], "--infill 'anna was happy' has no gap; write [MASK] or [MASK:3]"),
        ("rmdm", ["--infill", "anna [MASK:0]"], "'[MASK:0]' asks for no token"),
        ("rmdm", ["--infill", "anna [MASK:16]"], "--infill: 17 tokens do not fit the model's length"),
        ("rmdm", ["--infill", "anna [MASK]", "--prefix", "anna"], "--infill and --prefix exclude each other; "
         "write it all into the --infill text"),
        ("rmdm", ["--infill", "ana [MASK]"], "'ana' is not in the model's vocabulary of 28; did you mean 'anna'?"),
        ("rmdm", ["--like", "anna", "--between", "a", "a"], "--like and --between both name a latent"),
        ("rmdm", ["--between", "anna"], "argument --between: expected 2 arguments"),
        ("mdlm", ["--like", "anna"], "--like needs a latent, and tiny-mdlm has none; use an rmdm model"),
        ("mdlm", ["--guidance", "2"], "--guidance 2.0 on a model without a latent"),
        ("mdlm", ["--remask", "0.1"], "--remask 0.1 needs a sampler that knows how sure it was, not 'ancestral'; use "
         "max_prob or margin or entropy or balanced, or --remask 0"),
        ("rmdm", ["--weight", "0.3"], "--weight 0.3 is for --between; give two texts or latents, or drop it"),
        ("rmdm", ["--draws", "3"], "--draws 3 is about given tokens; give a --prefix, a --suffix or an --infill text"),
        ("rmdm", ["--like", "a", "--given", "prior", "--prefix", "anna"], "--given has no say where --like names the"),
        ("rmdm", ["--sampler", "foo"], "--sampler 'foo' is unknown; known: ancestral, balanced, entropy, margin, "
         "max_prob, spaced\n"),
        ("ar", ["--infill", "anna [MASK]"], "--infill does not fit an autoregressive model"),
    ],
)  # fmt: skip
def test_impossible_requests_are_one_line(runs, capsys, kind, flags, message):
    assert main(["sample", runs[kind], *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"rmdm: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("kind", ["rmdm", "ar"])
def test_without_a_terminal_a_few_frames_are_printed_beside_the_text(runs, capsys, kind):
    flags = [runs[kind], "--n", "2", "--steps", "10", "--prefix", "anna was", "--device", "cpu"]
    assert main(["sample", *flags, "--show"]) == 0
    captured = capsys.readouterr()
    assert captured.out.removesuffix("\n").split("\n\n") == said(capsys, *flags[:-2])
    said_first, *frames = captured.err.splitlines() if kind == "rmdm" else ["", *captured.err.splitlines()]
    assert ("fitting the latent to what is given (16 draws, 32 rounds;" in said_first) == (kind == "rmdm")
    assert len(frames) == 10
    total = LENGTH - 2 if kind == "ar" else 10
    assert frames[-1].startswith(f"step {total}/{total}  anna was")
    blocks = [frame.count("░░") for frame in frames[::2]]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] > blocks[-1] == 0


def test_values_are_checked_before_torch_is_imported():
    code = (
        "import sys; from rmdm.cli import main; code = main(['sample', 'x', '--weight', '2']);"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr == "rmdm: --weight 2.0 is outside 0..1; use 0.5 for the middle\n"


def test_frames_show_the_text_itself_with_spaces_between_its_words(runs):
    tokenizer = rmdm.load(runs["rmdm"], "cpu").tokenizer
    mask, words = tokenizer.mask_id, tokenizer.backend.encode("anna was sad", add_special_tokens=False).ids
    start_L = np.full(6, mask)
    frames = Frames(tokenizer, start_L, 1, Console(file=io.StringIO()), shown=slice(1, 5))
    (line,) = frames.render(np.array([[mask, *words]]))
    assert line.plain == "░░ anna was sad"
    out = frames.console.file
    frames(0, torch.tensor([[words[0], mask, *words, words[0]]]))
    assert out.getvalue() == "step 1/1  ░░ anna was sad\n"


def test_frames_are_drawn_with_signs_the_terminal_has(runs):
    tokenizer = rmdm.load(runs["rmdm"], "cpu").tokenizer
    written = io.BytesIO()
    console = Console(file=io.TextIOWrapper(written, encoding="ascii"))
    frames = Frames(tokenizer, np.full(3, tokenizer.mask_id), 1, console)
    frames(0, torch.tensor([[tokenizer.mask_id, *tokenizer.encode("anna")[:1], tokenizer.separator_id]]))
    assert written.getvalue() == b"step 1/1  __ anna |\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_frames(runs, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    frames = Frames(
        rmdm.load(runs["rmdm"], "cpu").tokenizer, np.zeros(4, dtype=np.int64), 1, Console(force_terminal=True)
    )
    assert frames.live is None
