"""Check, list and publish what the manifests under runs/ answer for.

    python scripts/manifest.py verify runs/smollm2-135m-dflash     every manifest at or below a folder
    python scripts/manifest.py verify --all                        every manifest under runs/
    python scripts/manifest.py list
    python scripts/manifest.py release runs/smollm2-135m-dflash --out published/smollm2-135m-dflash

Exit code 1: a file is changed, missing or unexpected. 2: there is no such folder.
"""

import pathlib

import edge
from kernels.errors import UserError

RUNS = edge.ROOT / "runs"


def parse(argv):
    """The command's options."""
    parser = edge.Parser(prog="manifest.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=edge.Parser)
    verify = commands.add_parser("verify", help="check every digest")
    verify.add_argument("path", nargs="?", type=pathlib.Path, help="a folder with manifests at or below it")
    verify.add_argument("--all", action="store_true", help="everything under runs/")
    listing = commands.add_parser("list", help="a table of the folders with a manifest")
    listing.add_argument("path", nargs="?", type=pathlib.Path, default=RUNS, help="where to look (runs/)")
    release = commands.add_parser("release", help="copy the files to publish, with a model card and checksums")
    release.add_argument("path", type=pathlib.Path, help="a checkpoint, a run (its best step) or a synthesis folder")
    release.add_argument("--bits", type=int, choices=(4, 5, 6, 8, 16), help="of a drafter's matrices (as they are)")
    release.add_argument("--out", type=pathlib.Path, required=True, help="a new folder")
    options = parser.parse_args(argv)
    if options.command == "verify" and (options.path is None) == (not options.all):
        raise UserError("manifest.py verify: expected either a PATH or --all")
    return options


def main(argv):
    """Run one command; returns the closing figures."""
    options = parse(argv)
    if options.command == "release":
        return release(options, argv)
    folders = find_folders(RUNS if options.command == "verify" and options.all else options.path)
    return (verify if options.command == "verify" else show_list)(folders)


def find_folders(path):
    """The folders with a manifest at or below `path`."""
    from drafter.manifest import NAME

    if not path.is_dir():
        raise UserError(f"{path}: {'found a file' if path.exists() else 'not found'}; expected a folder with a {NAME}")
    found = sorted(file.parent for file in path.rglob(NAME) if file.is_file())
    if not found:
        raise UserError(f"{path}: no {NAME} at or below it; train or synthesize first, or name another folder")
    return found


def fault(folder):
    """What is wrong with a folder's files, or None."""
    from drafter import manifest

    try:
        manifest.verify(folder)
    except UserError as error:
        return str(error)
    return None


def verify(folders):
    """Check folders, one line each."""
    failed = []
    for folder in folders:
        found = fault(folder)
        print(f"{'FAILED' if found else 'ok':8}{found or shown(folder)}", flush=True)
        failed += [shown(folder)] * bool(found)
    print(f"{len(folders)} manifests, {len(failed)} failed")
    return {"status": "failed" if failed else "done", "out": None, "manifests": len(folders), "failed": failed}


def show_list(folders):
    """Print a table of folders."""
    from drafter import manifest

    print(f"{'path':44} {'kind':11} {'size':>10}  {'ok':3} target")
    failed = 0
    for folder in folders:
        found = fault(folder)
        failed += bool(found)
        try:
            record = manifest.read(folder)
            cells = record.kind, f"{record.bytes / 1e6:.2f} MB", record.target.get("source")
        except UserError:
            cells = "unreadable", "", ""
        print(f"{shown(folder):44} {cells[0]:11} {cells[1]:>10}  {'no' if found else 'yes':3} {cells[2]}")
    return {"status": "failed" if failed else "done", "out": None, "manifests": len(folders), "failed": failed}


def shown(folder):
    """A folder's path as printed: relative to the checkout where it lies inside."""
    path = folder.resolve()
    return str(path.relative_to(edge.ROOT) if path.is_relative_to(edge.ROOT) else folder)


def release(options, argv):
    """Publish a checkpoint or a synthesis folder."""
    from kernels import backend

    backend.load()
    from drafter import checkpoint, manifest
    from drafter import release as releases

    folder = options.path
    if not (folder / manifest.NAME).is_file() or manifest.read(folder).kind == "run":
        folder = checkpoint.resolve(folder)
    found = fault(folder)
    if found:
        print(f"FAILED  {found}")
        return {"status": "failed", "out": None, "error": found}
    names = releases.release(folder, options.out, argv=argv, bits=options.bits)
    for name in names:
        print(f"{(options.out / name).stat().st_size:>12}  {name}")
    return {"status": "done", "out": str(options.out), "files": names}


if __name__ == "__main__":
    edge.run(main)
