"""`ckptctl export` and `ckptctl import`: write models from snapshots, and read models for new runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptd.config.settings import parse_bytes
from ckptd.core.export_plan import ExportError, named_ranks
from ckptd.ctl.command import (
    CommandError,
    CommandOutcome,
    Commands,
    ProgressBar,
    add_run,
    add_store_options,
    ask,
    connected,
    settings_of,
    which_run,
)
from ckptd.ctl.peers_command import ask_whereabouts
from ckptd.ctl.stores.store_access import STORE_TIMEOUT_S, configured_place, opened
from ckptd.errors import DaemonUnavailable, RemoteProtocolError
from ckptd.export.dcp import export_dcp
from ckptd.export.exports import DEFAULT_SHARD_BYTES, ExportReport, Moved, Watch, export_file, export_hf
from ckptd.export.importing import (
    IMPORT_FORMATS,
    ImportReport,
    import_to_folder,
    import_to_store,
    open_import,
)
from ckptd.export.memory_source import nobody_knows, open_slot
from ckptd.export.source import TensorSource
from ckptd.export.store_source import open_stored
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError
from ckptd.units import format_bytes

_FORMATS = ("safetensors", "hf", "dcp")


def add_export_commands(commands: Commands) -> None:
    """Add `export` and `import`."""
    text = "write the model of one iteration as safetensors, Hugging Face or torch.distributed.checkpoint"
    _add_export_arguments(
        commands.add(
            "export", _export, text, which_run(rank="rank of the snapshot"), timeout_s=STORE_TIMEOUT_S
        )
    )
    text = "convert a model from another tool into a checkpoint that a run can start from"
    _add_import_arguments(commands.add("import", _import, text, timeout_s=STORE_TIMEOUT_S))


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iteration", type=int, help="iteration of the snapshot (default: the newest)")
    parser.add_argument("--to", required=True, metavar="PATH", help="file or folder to write")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default=_FORMATS[0],
        help="safetensors: one file (default); hf: a folder for from_pretrained; dcp: a folder for "
        "torch.distributed.checkpoint, with the optimizer's state if the snapshot is dense",
    )
    parser.add_argument(
        "--durable",
        action="store_true",
        help="read from the configured store instead of this node's memory",
    )
    add_store_options(parser, "read from the store at this URL or folder")
    parser.add_argument(
        "--config", metavar="PATH", help="config.json, or a folder with it and the tokenizer (hf)"
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=DEFAULT_SHARD_BYTES,
        metavar="BYTES",
        help="largest size of one file, such as 2GB (hf; default 5GB)",
    )
    parser.add_argument(
        "--keep-prefix",
        action="store_true",
        help="keep the trainer's parameter names (with 'module.' under DistributedDataParallel)",
    )
    parser.add_argument(
        "--older-experts",
        action="store_true",
        help="take the experts that a partial snapshot lacks from older ones; the metadata says which "
        "(safetensors, hf)",
    )
    parser.add_argument("--force", action="store_true", help="replace existing files")
    parser.add_argument("--segment-dir", help="read segments from this folder; needs no daemon")


def _add_import_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, nargs="?", job_help="job that may start from it")
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="PATH",
        help="a folder or file of Hugging Face safetensors, or a checkpoint of torch.distributed.checkpoint",
    )
    parser.add_argument(
        "--format",
        choices=IMPORT_FORMATS,
        default=IMPORT_FORMATS[0],
        help="format of PATH (default: safetensors); it is not detected. A dcp contains pickles: ckptd "
        "reads them without running code, and refuses classes other than torch's own",
    )
    parser.add_argument("--to", metavar="FOLDER", help="write to a folder instead of a store")
    add_store_options(parser, "URL or folder of the store (default: as configured)")
    parser.add_argument("--model-key", default="model", help='key of the model in a DCP ("": its root)')
    parser.add_argument(
        "--optimizer-key", default="optim", help='key of the optimizer ("": do not import it)'
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError("a file cannot be smaller than a byte")
    return size


# -- export ---------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> CommandOutcome:
    if args.config and args.format != "hf":
        raise ExportError("--config needs --format hf: no other format contains a configuration")
    if args.older_experts and args.format == "dcp":
        raise ExportError(
            "--older-experts needs --format safetensors or hf: the metadata of a dcp cannot say which "
            "tensors are older"
        )
    with _source(args) as source:
        report = _write(args, source)
    return CommandOutcome(report, _export_text(report))


@contextmanager
def _source(args: argparse.Namespace) -> Iterator[TensorSource]:
    """The snapshot in this node's memory, or in a store."""
    if not (args.durable or args.store):
        which = {"job": args.job, "run": args.run, "rank": args.rank}
        folder = args.segment_dir or _segment_dir(args)

        def whereabouts(job: str, run: str, iteration: int) -> Mapping[int, Sequence[str]]:
            return _whereabouts(args, job, run, iteration)

        known = nobody_knows if args.segment_dir else whereabouts
        slot = open_slot(
            Path(folder), args.iteration, **which, whereabouts=known, older_experts=args.older_experts
        )
        with slot as source:
            yield source
        return
    if args.job is None or args.run is None:
        raise CommandError("pass --job and --run: a store may hold many of them")
    place, _ = configured_place(args, changes=False)
    which = {"rank": args.rank, "older_experts": args.older_experts}
    with (
        opened(place, args.timeout) as store,
        open_stored(store.store, place.shown, args.job, args.run, args.iteration, **which) as stored,
    ):
        yield stored


def _segment_dir(args: argparse.Namespace) -> str:
    """The daemon's segment folder; the configured one if the daemon does not answer."""
    try:
        return ask(args, m.GetStatus(), m.Status, timeout_s=1.0).segment_dir
    except (DaemonUnavailable, RequestTimeout):
        return settings_of(args).config.segment_dir


def _whereabouts(args: argparse.Namespace, job: str, run: str, iteration: int) -> Mapping[int, Sequence[str]]:
    """The nodes that hold other ranks' snapshots, by rank; empty if no daemon can answer."""
    try:
        with connected(args) as client:
            return ask_whereabouts(client, job, run, iteration)
    except (RequestTimeout, DaemonUnavailable, RefusedError, WireError, RemoteProtocolError):
        return {}


def _write(args: argparse.Namespace, source: TensorSource) -> ExportReport:
    target, watch = Path(args.to), _watch(args)
    force, keep_prefix = args.force, args.keep_prefix
    if args.format == "dcp":
        return export_dcp(source, target, keep_prefix=keep_prefix, force=force, watch=watch)
    if args.format == "hf":
        return export_hf(
            source,
            target,
            config=Path(args.config) if args.config else None,
            max_shard_bytes=args.max_shard_size,
            keep_prefix=keep_prefix,
            force=force,
            watch=watch,
        )
    return export_file(source, target, keep_prefix=keep_prefix, force=force, watch=watch)


def _watch(args: argparse.Namespace) -> Watch:
    """A watch that shows a progress bar."""

    @contextmanager
    def watched(what: str, total_bytes: int) -> Iterator[Moved]:
        done = 0
        with ProgressBar(what, total_bytes, quiet=args.json) as bar:

            def moved(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                bar.update(done)

            yield moved

    return watched


def _export_text(report: ExportReport) -> str:
    parts = [f"{report.tensors} tensors", format_bytes(report.size_bytes)]
    if report.optimizer_tensors:
        parts.insert(1, f"{report.optimizer_tensors} of the optimizer's state")
    converted = f" ({report.converted} converted to compute precision)" if report.converted else ""
    joined = f", with what {named_ranks(report.joined_ranks)} captured for it" if report.joined_ranks else ""
    line = (
        f"{report.path}: {', '.join(parts)}, iteration {report.iteration} of {report.job}/{report.run} "
        f"rank {report.rank}{joined}{converted}"
    )
    return "\n".join([line, *report.notes])


# -- import ---------------------------------------------------------------------------------------


def _import(args: argparse.Namespace) -> CommandOutcome:
    watch = _watch(args)
    keys = {"model_key": args.model_key, "optimizer_key": args.optimizer_key}
    with open_import(Path(args.source), kind=args.format, **keys) as source:
        if args.to is not None:
            report = import_to_folder(source, Path(args.to), force=args.force, watch=watch)
        elif args.job is None or args.run is None:
            raise ExportError("name the JOB and the RUN that start from the model, or a folder with --to")
        else:
            place, _ = configured_place(args, changes=True)
            with opened(place, args.timeout) as store:
                name = (args.job, args.run)
                report = import_to_store(
                    source, store.store, place.shown, *name, force=args.force, watch=watch
                )
    return CommandOutcome(report, _import_text(report))


def _import_text(report: ImportReport) -> str:
    state = f", {report.optimizer_tensors} of the optimizer's state" if report.optimizer_tensors else ""
    line = (
        f"{report.tensors} tensors{state}, {format_bytes(report.size_bytes)}: "
        f"Checkpointer(…, recovery=RecoveryOptions(start_from={report.start_from!r}))"
    )
    return "\n".join([line, *report.notes])
