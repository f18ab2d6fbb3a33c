"""The stages behind the verbs: prepare, train, sample and, for storyworld, measure. Each returns what --json prints."""

import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from rmdm.config import Config, needs_latents, stage_one_run
from rmdm.errors import ConfigError, DataError
from rmdm.presets import load_config, save_config
from rmdm.request import Request

Show = Callable[[str], None]
Outcome = dict[str, Any]


def is_main() -> bool:
    """Whether this process is the only rank or the first."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def own(out: Path, device: str) -> Generator[None]:
    """Join the ranks, and hold the run against other processes until it is left; before that nothing is written."""
    from rmdm.training.distributed import world
    from rmdm.training.guards import alone

    # A GPU that is not there is refused by the stage that needs it: a finished run needs none.
    with world(torch_device(device).type) as here, alone(out, here):
        yield


@contextmanager
def own_reading(config: Config) -> Generator[None]:
    """Hold the run whose flow is used, if it is another, against being trained meanwhile."""
    from rmdm.training.distributed import world
    from rmdm.training.guards import unchanged

    if not needs_latents(config) or config.latent.flow is None:
        yield
        return
    with world(torch_device(config.train.device).type) as here, unchanged(Path(config.latent.flow), here):
        yield


def with_own_flow(config: Config, out: Path, show: Show) -> Config:
    """The config with what its run's flow was made with, which only `rmdm align` and `rmdm run` change."""
    from rmdm.meanflow.align import flow_changes

    flow = out / "flow"
    if not ((flow / "config.yaml").is_file() and (flow / "flow.json").is_file()):
        return config
    changes = flow_changes(flow, config)
    if changes and is_main():
        kept = ", ".join(f"meanflow.{name}={had} (not {asked})" for name, (had, asked) in changes.items())
        show(f"train: the flow of {out} keeps what it was made with, {kept}; 'rmdm align {quote(str(out))}' changes it")
    return dataclasses.replace(config, meanflow=load_config(flow).meanflow)


def prepare_stage(config: Config, show: Show, out: Path | None = None) -> Outcome:
    """Tokenise the corpus; ranks of `torchrun` share the work. A run directory, if named, gets the resolved config."""
    from rmdm.data.prepare import prepare

    if out is not None and (out / "checkpoints").exists():
        raise ConfigError(f"{out} already holds a trained run; prepare needs no --out, or one that is new")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        done = prepare(config.data, log=show)
    else:
        from rmdm.training.distributed import world

        with world(config.train.device) as here:
            done = prepare(config.data, rank=here.rank, world=here.size, barrier=here.barrier, log=show)
    train, valid = (done.manifest.splits[name] for name in ("train", "valid"))
    if out is not None and is_main():
        save_config(with_shards(config, done.dir), out)
    return {"data_dir": str(done.dir), "skipped": done.skipped, "rows": train.rows, "valid_rows": valid.rows}


def train_stage(config: Config, out: Path, resume: str, show: Show, verb: str = "train") -> Outcome:
    """Train on prepared shards, alone or as one rank of `torchrun`."""
    with own(out, config.train.device), own_reading(config):
        return train_here(config, out, resume, show, verb)


def train_here(config: Config, out: Path, resume: str, show: Show, verb: str) -> Outcome:
    """The same in a run that is held."""
    from rmdm.data.prepare import prepare, shard_dir
    from rmdm.meanflow.rows import open_stage_one
    from rmdm.training.checkpoint import mend_exchange, step_of
    from rmdm.training.distributed import world
    from rmdm.training.language import Corpus, LanguageTask
    from rmdm.training.loop import train
    from rmdm.training.renew import renew
    from rmdm.training.resume import find_finished

    if needs_latents(config) and config.latent.flow is None:
        config = with_own_flow(config, out, show)
    data_dir = shard_dir(config.data)
    if not (data_dir / "manifest.json").is_file():
        raise DataError(f"{data_dir} holds no token shards; make them with 'rmdm prepare', or use 'rmdm run'")
    prepare(config.data, progress=False)  # nothing left to do but check that these are the shards the config means
    config = with_shards(config, data_dir)
    corpus = Corpus.open(data_dir)
    latents = None
    if needs_latents(config):
        device = torch_device(config.train.device)
        latents = open_stage_one(config, stage_one_run(config, out), data_dir, corpus.tokenizer, device)
    task = LanguageTask(config, corpus, verb, latents)
    with world("cpu") as here:
        if here.is_main:
            mend_exchange(out)
        here.barrier()
    finished = find_finished(task, out, resume)
    if finished is not None:
        with world("cpu") as here:
            here.barrier()  # every rank has looked at it
            changed = renew(task, finished, out) if here.is_main else []
        if is_main():
            news = f"train: already done, {finished}; its model now has {', '.join(changed)}"
            show(news if changed else f"train: already done, {finished}")
        done = {"skipped": True, "step": step_of(finished), "run": str(out), "checkpoint": str(finished)}
        return done | ({"changed": changed} if changed else {})
    if latents is not None and config.latent.draw == "prior" and verb == "train" and is_main():
        warn_of_latents(stage_one_run(config, out), show)
    with world(config.train.device) as here:
        result = train(task, out, here, resume=resume, show=show)
    if not result.finished:
        if here.is_main:
            show(f"stopped at step {result.step}, saved {result.checkpoint}; go on with: {task.again(out)}")
        return {"finished": False, "step": result.step, "run": str(out), "exit": 128 + result.signal}
    if here.is_main:
        show(
            f"train: step {result.step} in {in_seconds(result.seconds)} ({result.units_per_second:,.0f} tokens/s, "
            f"start-up and pauses counted); model in {result.checkpoint / 'model'}; next: rmdm sample {quote(str(out))}"
        )
    valid = result.validation.figures if result.validation else {}
    return {
        "finished": True,
        "step": result.step,
        "loss": result.loss,
        **{name: valid[name] for name in ("valid_nats", "valid_ppl") if name in valid},
        "tokens_per_s": result.units_per_second,
        "seconds": result.seconds,
        "run": str(out),
        "checkpoint": str(result.checkpoint),
    }


def in_seconds(seconds: float) -> str:
    """A duration, with a decimal where it is below ten seconds."""
    return f"{seconds:.1f} s" if round(seconds, 1) < 10 else f"{seconds:.0f} s"


def torch_device(name: str) -> Any:
    """Where a rank that has not joined the others yet will compute."""
    import torch

    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def warn_of_latents(run: Path, show: Show) -> None:
    """Say what the last report found wrong with the run's latents; training goes on all the same."""
    from rmdm.meanflow.latents import gate_warnings

    for line in gate_warnings(run):
        show(f"warning: the latents of {run}: {line}")


def encode_stage(config: Config, show: Show) -> Outcome:
    """Embeddings of every row, whitened, beside the shards; ranks of `torchrun` share the work."""
    from rmdm.encoders.encode import encode, made_in
    from rmdm.encoders.find import open_encoder
    from rmdm.training.distributed import world

    shards, tokenizer = open_shards(config)
    with world(config.train.device) as here:
        length, earlier = config.data.length, made_in(stored(config), shards)
        encoder = open_encoder(config.encoder, tokenizer, length, here.device, earlier)
        done = encode(stored(config), shards, encoder, rank=here.rank, world=here.size, barrier=here.barrier, log=show)
    return {
        "cache": str(done.dir),
        "skipped": done.skipped,
        "rows": done.manifest.spec.rows,
        "bytes": sum(map(done.manifest.spec.nbytes, done.manifest.spec.rows)),
        **done.manifest.figures,
    }


def align_stage(config: Config, out: Path, resume: str, show: Show, verb: str = "align") -> Outcome:
    """Train the flow on the embeddings and store z_0, alone or as one rank of `torchrun`."""
    from rmdm.data.shards import Manifest, Split
    from rmdm.encoders.cache import find_cache
    from rmdm.encoders.encode import cache_facts, config_facts
    from rmdm.encoders.find import open_encoder
    from rmdm.encoders.online import OnlineLatents
    from rmdm.encoders.whitening import Whitening
    from rmdm.meanflow.align import align
    from rmdm.training.distributed import world
    from rmdm.training.guards import alone

    shards, tokenizer = open_shards(config)
    config = with_shards(config, shards)
    manifest = Manifest.load(shards)
    with world(config.meanflow.train.device, "meanflow.") as here, alone(out, here):
        try:
            cache = find_cache(shards, config_facts(config, manifest))
        except DataError:  # none or several by the encoder's name: look at the encoder itself
            encoder = open_encoder(config.encoder, tokenizer, config.data.length, here.device)
            cache = find_cache(shards, cache_facts(config, manifest, encoder))
        if here.is_main and not (out / "config.yaml").exists():
            save_config(config, out)  # so that the run can be named to go on with it
        online = None
        if stored(config).latent.store == "z0":
            encoder = open_encoder(config.encoder, tokenizer, config.data.length, here.device)
            whitening = Whitening.load(cache / "whitening.safetensors")

            def online(split: Split) -> OnlineLatents:
                return OnlineLatents.open(config, shards, split, encoder, whitening)

        done = align(config, cache, out, here, resume=resume, show=show, verb=verb, online=online)
        if here.is_main and done.stopped is None:
            keep_aligned(config, out)
    if done.stopped is not None:
        if here.is_main:
            again = f"rmdm {verb} {quote(str(out))} --resume auto"
            show(f"stopped at step {done.stopped.step}, saved {done.stopped.checkpoint}; go on with: {again}")
        return {"finished": False, "run": str(out), "exit": 128 + done.stopped.signal}
    if here.is_main:
        how = "made before" if done.skipped else f"z_0 in {cache}" if done.kind else "no z_0 stored"
        show(f"align: flow in {done.flow}, {how}; next: rmdm latents {quote(str(out))}")
    return {"finished": True, "run": str(out), "flow": str(done.flow), "cache": str(cache), "latent": done.kind}


def keep_aligned(config: Config, out: Path) -> None:
    """Write the config of an aligned run; once there is a stage II, the rest says how that was trained, and stays."""
    has = load_config(out) if (out / "checkpoints").exists() else None
    if has is None:
        save_config(config, out)
    elif has.meanflow != config.meanflow:
        save_config(dataclasses.replace(has, meanflow=config.meanflow), out)


def latents_stage(
    runs: list[Path], show: Show, *, rows: int | None = None, draws: bool = True, pictures: bool = True
) -> Outcome:
    """Report on the latents of a run, with other runs beside it."""
    import torch

    from rmdm.meanflow.latents import ROWS, measure_latents

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return measure_latents(runs, device, show, rows=rows or ROWS, draws=draws, pictures=pictures)


def stored(config: Config) -> Config:
    """The config as the embeddings' cache sees it: whoever encodes online stores only the rows the PCA needs."""
    if config.latent.source == "cache":
        return config
    return dataclasses.replace(config, latent=dataclasses.replace(config.latent, store="z0"))


def open_shards(config: Config) -> tuple[Path, Any]:
    """The folder of the shards the config means, which must be there, and their tokenizer."""
    from rmdm.data.prepare import prepare, shard_dir

    if config.encoder.name is None:
        raise ConfigError("encoder.name is not set; name one, for example --encoder.name all-MiniLM-L6-v2")
    folder = shard_dir(config.data)
    if not (folder / "manifest.json").is_file():
        raise DataError(f"{folder} holds no token shards; make them with 'rmdm prepare', or use 'rmdm run'")
    return folder, prepare(config.data, progress=False).tokenizer


def with_shards(config: Config, folder: Path) -> Config:
    """The config with its shard folder spelled out, so that a run finds its data when the source is gone."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(folder.resolve())))


def run_presets(runs: Sequence[tuple[Config, Path]], resume: str, show: Show) -> Outcome:
    """Every stage of one preset or of several, and one table of their stories at the end."""
    outcomes: list[Outcome] = []
    for config, out in runs:
        if len(runs) > 1 and is_main():
            show(f"== {config.name}")
        outcomes.append(run_stages(config, out, resume, show))
        if outcomes[-1].get("exit"):
            return outcomes[-1]
    whole = outcomes[0] if len(runs) == 1 else {"runs": outcomes}
    stories = [out for config, out in runs if config.data.world is not None]
    if stories and is_main():
        whole["stories"] = measure_stage(stories, show)
        whole["report"] = report_stage(stories, show)
    return whole


def run_stages(config: Config, out: Path, resume: str, show: Show) -> Outcome:
    """Prepare, for RMDM encode and align, and train; what is done already is skipped and said so."""
    with own(out, config.train.device):
        return run_stages_here(config, out, resume, show)


def run_stages_here(config: Config, out: Path, resume: str, show: Show) -> Outcome:
    """The stages, in a run that is held, as one rank of a group that is already there or as the only one."""
    prepared = prepare_stage(config, show)
    config = with_shards(config, Path(prepared["data_dir"]))
    outcome: Outcome = {"prepare": prepared, "run": str(out)}
    if needs_latents(config) and config.latent.flow is None:
        outcome["encode"] = encode_stage(config, show)
        outcome["align"] = align_stage(config, out, resume, show, verb="run")
        if outcome["align"].get("exit"):
            return {**outcome, "exit": outcome["align"]["exit"]}
        if is_main() and config.meanflow.direction != "draw":
            try:
                outcome["latents"] = latents_stage([out], show, draws=False, pictures=False)
            except DataError as error:  # few or no held-out rows: no reason not to train
                show(f"latents: no report, {error}")
    trained = train_stage(config, out, resume, show, verb="run")
    outcome["train"] = trained
    return outcome | ({"exit": trained["exit"]} if trained.get("exit") else {})


def measure_stage(
    runs: Sequence[Path],
    show: Show,
    *,
    steps: Sequence[int] = (),
    n: int | None = None,
    ceiling: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> list[Outcome]:
    """Figures of the stories that runs write, against the number of denoising steps, in one table."""
    import torch

    from rmdm.evaluation.consistency import STEPS, STORIES, measure_runs
    from rmdm.evaluation.stories import render_stories

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = {"steps": steps or STEPS, "n": n or STORIES, "ceiling": ceiling, "changes": changes or {}}
    rows = measure_runs(runs, device, show, **asked)
    show(render_stories(rows))
    return [row.to_json() for row in rows]


def report_stage(runs: Sequence[Path], show: Show) -> str:
    """Everything measured of some runs on one page; returns its path."""
    from rmdm.report.page import write_report
    from rmdm.report.read import default_folder

    page = write_report(runs, default_folder(runs)).html
    show(f"report: {page}")
    return str(page)


def sample_stage(ref: str | None, request: Request, device: str, show: Show | None, *, frames: bool = False) -> Outcome:
    """Write texts with a trained model, the package's own if none is named; `frames` draws how they come about."""
    import rmdm

    model = rmdm.load(ref, device)
    choice = model.choice(request)
    if choice.by == "resample":
        note = f"{choice.draws} draws, {choice.rounds} rounds; --given prior is quicker and fits less"
        print(f"rmdm: fitting the latent to what is given ({note})", file=sys.stderr, flush=True)
    if not frames:
        done = model.write(request)
    else:
        from rmdm.terminal import Frames

        pattern = model.pattern(request)
        gaps = int((pattern.x_L == model.tokenizer.mask_id).sum())
        steps = gaps if model.backbone.causal else model.settings(request).steps
        with Frames(model.tokenizer, pattern.x_L, steps, shown=pattern.shown) as drawn:
            done = model.write(request, callback=drawn)
    if show is not None:
        show("\n\n".join(done.texts))
    return {
        "texts": done.texts,
        "tokens": done.tokens.tolist(),
        "settings": done.settings,
        "seconds": done.seconds,
        "model_step": model.step,
    }
