"""Prepare the corpora of configs/studies/ladder.yaml from two Debian packages, whose checksums are fixed.

    python -m experiments.corpora data

    data/kernel/c/     a fifth of the C files of Linux 6.1, 123 MB
    data/kernel/docs/  its documentation, 30 MB: English, about a fifth of the text
    data/gcide.txt     a dictionary of English, 40 MB, on which nothing is trained

Training reads data/kernel. If a package has left the mirror, give the folder of its file in --packages:
snapshot.debian.org keeps every version.
"""

from __future__ import annotations

import gzip
import http.client
import io
import lzma
import shutil
import sys
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, explaining
from moe_ffn.config.files import replacing, replacing_folder, sha256_of, write_atomically

MIRROR = "http://deb.debian.org/debian/pool/main"

ONE_IN = 5
"""Number of C files of which one is kept; then a fifth of all text is English."""


@dataclass(frozen=True)
class Package:
    """A file of Debian's archive."""

    path: str
    """Path below `MIRROR`."""
    sha256: str
    member: str
    """The only file of the package that is used."""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


KERNEL = Package(
    "l/linux/linux-source-6.1_6.1.176-1_all.deb",
    "9305d1a151b8e83dcb88aa11361e7b9513f0c252bdf7f5647e4542762d99c094",
    "./usr/src/linux-source-6.1.tar.xz",
)
DICTIONARY = Package(
    "d/dict-gcide/dict-gcide_0.48.5+nmu2_all.deb",
    "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
    "./usr/share/dictd/gcide.dict.dz",
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m experiments.corpora", description=__doc__)
    parser.add("folder FOLDER", "folder for the corpora")
    meaning = "folder that has the packages, or gets them (default: FOLDER/packages)"
    parser.add("--packages FOLDER", meaning)
    flags = parser.parse_args(argv)
    kernel, packages = flags.folder / "kernel", flags.packages or flags.folder / "packages"
    if kernel.exists():
        raise ConfigError(f"'{kernel}' exists; delete it, or give another folder")
    with explaining(f"'{flags.folder}' cannot be written"):
        for folder in (flags.folder, packages):
            folder.mkdir(parents=True, exist_ok=True)
        dictionary, source = (fetched(package, packages) for package in (DICTIONARY, KERNEL))
        with member(dictionary, DICTIONARY.member) as file:
            write_atomically(flags.folder / "gcide.txt", gzip.decompress(file.read()))
        with member(source, KERNEL.member) as file, replacing_folder(kernel) as folder:
            num_files, num_bytes = write_kernel(file, folder)
    print(f"{kernel}: {num_files:,} files, {num_bytes / 1e6:.1f} MB")
    return 0


def fetched(package: Package, folder: Path) -> Path:
    """Return the file of a package, downloaded unless `folder` has it; ConfigError if it is another."""
    path, url = folder / package.name, f"{MIRROR}/{package.path}"
    if not path.exists():
        print(f"downloading {url}", file=sys.stderr)
        try:
            with urllib.request.urlopen(url, timeout=60) as response, replacing(path) as file:
                shutil.copyfileobj(response, file)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{url} cannot be downloaded ({error}); get {package.name} from snapshot.debian.org and give "
                "its folder in --packages"
            ) from error
    if (digest := sha256_of(path)) != package.sha256:
        raise ConfigError(
            f"'{path}' has the SHA-256 {digest}, not {package.sha256}; delete it, so that it is downloaded "
            "again"
        )
    return path


def member(package: Path, name: str) -> IO[bytes]:
    """Open a file of a Debian package: an ar archive with a compressed tar archive of files."""
    with package.open("rb") as file:
        file.seek(len("!<arch>\n"))
        # A header has the name, four numbers, and from its 48th byte on the size.
        while header := file.read(60):
            size = int(header[48:58])
            if header.startswith(b"data.tar"):
                with tarfile.open(fileobj=io.BytesIO(file.read(size))) as archive:
                    found = archive.extractfile(name)
                    assert found is not None
                    return io.BytesIO(found.read())
            file.seek(size + size % 2, io.SEEK_CUR)
    raise ConfigError(f"'{package}' is not a Debian package")


def write_kernel(archive: IO[bytes], folder: Path) -> tuple[int, int]:
    """Write the C files and the documentation; return how many files, and their bytes."""
    num_files = num_bytes = 0
    for path, text in kernel_files(archive):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
        num_files, num_bytes = num_files + 1, num_bytes + len(text)
    return num_files, num_bytes


def kernel_files(archive: IO[bytes]) -> Iterator[tuple[Path, bytes]]:
    """Yield the files of the corpus, by their paths in it: `c/mm/slab.c`, `docs/mm/slub.rst`."""
    with tarfile.open(fileobj=lzma.open(archive)) as files:
        for entry in files:
            path = Path(*PurePosixPath(entry.name).parts[1:])  # without linux-source-6.1/
            is_text = entry.isfile() and path.suffix in (".rst", ".txt")
            if is_text and path.parts[0] == "Documentation":
                kept = Path("docs", *path.parts[1:])
            elif entry.isfile() and path.suffix == ".c" and is_kept(path):
                kept = Path("c", path)
            else:
                continue
            found = files.extractfile(entry)
            assert found is not None
            yield kept, found.read()


def is_kept(path: Path) -> bool:
    """Return True for one in `ONE_IN` paths, the same ones everywhere."""
    return zlib.crc32(path.as_posix().encode()) % ONE_IN == 0


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
