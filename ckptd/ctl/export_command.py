"""`ckptctl export` and `ckptctl import`: write models from snapshots, and read models for new runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ckptd.config.config_values import parse_bytes
from ckptd.core.export_plan import ExportError, named_ranks
from ckptd.ctl.progress import ProgressBar
from ckptd.ctl.store.checkpoints import CommandOutcome
from ckptd.ctl.store.store_access import configured_place, opened
from ckptd.export.dcp import export_dcp
from ckptd.export.exports import (
    DEFAULT_SHARD_BYTES,
    ExportReport,
    Watch,
    export_file,
    export_hf,
)
from ckptd.export.importing import (
    IMPORT_FORMATS,
    ImportReport,
    import_to_folder,
    import_to_store,
    open_import,
)
from ckptd.export.memory_source import nobody_knows, open_slot
from ckptd.export.ranks_here import Whereabouts
from ckptd.export.safetensors_files import Moved
from ckptd.export.source import TensorSource
from ckptd.export.store_source import open_stored
from ckptd.storage.checkpoints.names import check_name
from ckptd.storage.stores.open_store import BACKENDS
from ckptd.units import format_bytes

__all__ = ["add_export_arguments", "add_import_arguments", "run_export", "run_import"]

FORMATS = ("safetensors", "hf", "dcp")


def run_export(
    args: argparse.Namespace, segment_dir: Callable[[], str], whereabouts: Whereabouts
) -> CommandOutcome:
    """`ckptctl export`.

    Args:
        segment_dir: returns the folder of this node's segments.
        whereabouts: returns the nodes that hold the snapshots that this one lacks; not called if
            ``--segment-dir`` is given.
    Raises:
        ExportError, DamagedSnapshot: the snapshot cannot be exported; no file is left behind.
        StoreProblem, ConfigError: the store cannot be used.
    """
    if args.config and args.format != "hf":
        raise ExportError("--config needs --format hf: no other format contains a configuration")
    with _source(args, segment_dir, whereabouts) as source:
        report = _write(args, source)
    return CommandOutcome(report, _export_text(report))


def run_import(args: argparse.Namespace) -> CommandOutcome:
    """`ckptctl import`.

    Raises:
        ExportError, DamagedSnapshot: the model cannot be imported.
        StoreProblem, ConfigError: the store cannot be used.
    """
    keys = {"model_key": args.model_key, "optimizer_key": args.optimizer_key}
    with open_import(Path(args.source), kind=args.format, **keys) as source:
        if args.to is not None:
            report = import_to_folder(source, Path(args.to), force=args.force, watch=_watch(args))
        else:
            if args.job is None or args.run is None:
                raise ExportError("name the JOB and the RUN that start from the model, or a folder with --to")
            place, _ = configured_place(args.store, args.store_options, args.store_backend)
            with opened(place, args.timeout) as store:
                report = import_to_store(
                    source,
                    store.store,
                    place.shown,
                    args.job,
                    args.run,
                    force=args.force,
                    watch=_watch(args),
                )
    return CommandOutcome(report, _import_text(report))


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckptctl export`, except --job, --run and --rank."""
    parser.add_argument("--iteration", type=int, help="iteration of the snapshot (default: the newest)")
    parser.add_argument("--to", required=True, metavar="PATH", help="file or folder to write")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="safetensors: one file (default); hf: a folder for from_pretrained; dcp: a folder for "
        "torch.distributed.checkpoint, with the optimizer's state if the snapshot is dense",
    )
    parser.add_argument(
        "--durable",
        action="store_true",
        help="read from the configured store instead of this node's memory",
    )
    _add_store(parser, "read from the store at this URL or folder")
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
    parser.add_argument("--force", action="store_true", help="replace existing files")
    parser.add_argument("--segment-dir", help="read segments from this folder; needs no daemon")


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckptctl import`."""
    parser.set_defaults(timeout=600.0)
    parser.add_argument(
        "job",
        metavar="JOB",
        type=partial(_name, "job"),
        nargs="?",
        help="job that may start from it",
    )
    parser.add_argument("run", metavar="RUN", type=partial(_name, "run"), nargs="?")
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
    _add_store(parser, "URL or folder of the store (default: as configured)")
    parser.add_argument("--model-key", default="model", help='key of the model in a DCP ("": its root)')
    parser.add_argument(
        "--optimizer-key", default="optim", help='key of the optimizer ("": do not import it)'
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")


@contextmanager
def _source(
    args: argparse.Namespace, segment_dir: Callable[[], str], whereabouts: Whereabouts
) -> Iterator[TensorSource]:
    if not (args.durable or args.store):
        folder = Path(args.segment_dir or segment_dir())
        known = nobody_knows if args.segment_dir else whereabouts
        which = {"job": args.job, "run": args.run, "rank": args.rank}
        with open_slot(folder, args.iteration, **which, whereabouts=known) as slot:
            yield slot
        return
    if args.job is None or args.run is None:
        raise ExportError("pass --job and --run: a store may hold many of them")
    place, _ = configured_place(args.store, args.store_options, args.store_backend)
    with (
        opened(place, args.timeout) as store,
        open_stored(store.store, place.shown, args.job, args.run, args.iteration, rank=args.rank) as stored,
    ):
        yield stored


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
    joined = f", with what {named_ranks(report.joined_ranks)} captured for it" * bool(report.joined_ranks)
    line = (
        f"{report.path}: {', '.join(parts)}, iteration {report.iteration} of {report.job}/{report.run} "
        f"rank {report.rank}{joined}{converted}"
    )
    return "\n".join([line, *report.notes])


def _import_text(report: ImportReport) -> str:
    state = f", {report.optimizer_tensors} of the optimizer's state" * bool(report.optimizer_tensors)
    line = (
        f"{report.tensors} tensors{state}, {format_bytes(report.size_bytes)}: "
        f"Checkpointer(…, recovery=RecoveryOptions(start_from={report.start_from!r}))"
    )
    return "\n".join([line, *report.notes])


def _add_store(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--store", metavar="URL", help=text)
    parser.add_argument("--store-options", metavar="JSON", help='such as \'{"region": "eu-1"}\'')
    parser.add_argument("--store-backend", choices=BACKENDS, help="what speaks to the store")


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError("a file cannot be smaller than a byte")
    return size


def _name(what: str, text: str) -> str:
    try:
        return check_name(text, what)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
