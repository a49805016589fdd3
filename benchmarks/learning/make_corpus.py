#!/usr/bin/env python3
"""Makes the corpus of the learning runs: English prose and C, about 99 MB in 4,500 documents, from Debian packages.

usage: make_corpus.py [--out .data/learning] [--archive FILE.tar.xz] [--packages FOLDER]

Packages are fetched with apt-get download (or taken from FOLDER if they are there) and unpacked with dpkg-deb. A
document is a file of its own, NNNNN-source.txt; numbers are drawn at random with a fixed seed, so that every range of
them, the held-out ones included, holds all sources. Every document is UTF-8. The kernel source's version moves with
Debian's security updates: results name the corpus by the hash that this program prints.
"""
import argparse
import gzip
import hashlib
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

PACKAGES = ("dict-gcide", "anarchism", "wordnet-base", "linux-source-6.1")
KERNEL_FOLDERS = ("kernel", "mm", "block", "ipc", "io_uring", "init")  # of C
PART = 65536  # bytes: dictionaries are cut into documents of about so many, between entries
LARGEST_SOURCE = 300_000  # bytes; larger C files are mostly tables


def fail(message):
    sys.exit(f"make_corpus.py: {message}")


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options)
    if done.returncode != 0:
        fail(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


def unpack(package, packages, folder):
    """The package's files under folder/package."""
    found = sorted(packages.glob(f"{package}_*.deb"))
    if not found:
        run("apt-get", "-qq", "download", package, cwd=packages)
        found = sorted(packages.glob(f"{package}_*.deb"))
    target = folder / package
    run("dpkg-deb", "-x", str(found[-1]), str(target))
    print(f"{found[-1].name}", flush=True)
    return target


def parts(entries):
    """Entries joined to documents of about PART bytes."""
    document, size = [], 0
    for entry in entries:
        document.append(entry)
        size += len(entry)
        if size >= PART:
            yield "".join(document)
            document, size = [], 0
    if document:
        yield "".join(document)


def gcide(root):
    """The Collaborative International Dictionary of English. A dictd file is gzip."""
    text = gzip.decompress((root / "usr/share/dictd/gcide.dict.dz").read_bytes()).decode("utf-8", "replace")
    # The source of each paragraph, 3 MB of which are one line.
    text = re.sub(r"\n *\[1913 Webster\]", "", text)
    # An entry begins at the margin, its body is indented.
    yield from parts(re.split(r"(?<=\n)(?=\n\S)", text))


def wordnet(root):
    """WordNet's glosses: "word, synonym: definition; "an example".\""""
    def entries():
        for kind in ("noun", "verb", "adj", "adv"):
            for line in (root / f"usr/share/wordnet/data.{kind}").read_text("latin-1").splitlines():
                if line.startswith(" "):  # the licence at the top
                    continue
                data, _, gloss = line.partition(" | ")
                fields = data.split(" ")
                words = fields[4:4 + 2 * int(fields[3], 16):2]
                names = ", ".join(re.sub(r"\(.*\)$", "", word).replace("_", " ") for word in words)
                yield f"{names}: {gloss.strip()}.\n"
    yield from parts(entries())


def anarchism(root):
    """An Anarchist FAQ, Markdown by section."""
    for path in sorted((root / "usr/share/doc/anarchism/markdown").glob("*.md.gz")):
        yield gzip.decompress(path.read_bytes()).decode("utf-8", "replace")


def kernel(root, folder):
    """Linux: the English documentation, then C."""
    archive = next((root / "usr/src").glob("linux-source-*.tar.xz"))
    tree = folder / "tree"
    tree.mkdir()
    run("tar", "-C", str(tree), "--strip-components=1", "--wildcards", "-xf", str(archive),
        "*/Documentation/*.rst", *(f"*/{name}/*.[ch]" for name in KERNEL_FOLDERS))
    documentation, source = [], []
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree)
        if not path.is_file() or "translations" in name.parts:
            continue
        if name.parts[0] == "Documentation":
            documentation.append(path.read_text("utf-8", "replace"))
        elif name.parts[0] in KERNEL_FOLDERS and path.stat().st_size <= LARGEST_SOURCE:
            source.append(path.read_text("utf-8", "replace"))
    return documentation, source


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--out", default=".data/learning", type=pathlib.Path)
    parser.add_argument("--archive", type=pathlib.Path)
    parser.add_argument("--packages", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.out.exists():
        fail(f"{arguments.out} exists: remove it, or choose another --out")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)  # apt-get download writes as the user _apt
        packages = arguments.packages or folder
        roots = {package: unpack(package, packages, folder) for package in PACKAGES}
        documentation, source = kernel(roots["linux-source-6.1"], folder)
        sources = {
            "gcide": list(gcide(roots["dict-gcide"])),
            "wordnet": list(wordnet(roots["wordnet-base"])),
            "anarchism": list(anarchism(roots["anarchism"])),
            "linux-documentation": documentation,
            "linux-source": source,
        }
    documents = []
    for source, texts in sources.items():
        encoded = [text.encode("utf-8") for text in texts]
        documents += [(source, text) for text in encoded if text.strip()]
        print(f"{source:20} {len(encoded):6} documents {sum(map(len, encoded)) / 1e6:7.1f} MB")
    random.Random(1).shuffle(documents)
    unpacking = arguments.out.with_name(arguments.out.name + ".unpacking")
    shutil.rmtree(unpacking, ignore_errors=True)
    unpacking.mkdir(parents=True)
    digest = hashlib.sha256()
    for number, (source, text) in enumerate(documents):
        (unpacking / f"{number:05}-{source}.txt").write_bytes(text)
        digest.update(f"{number} {source} {len(text)}\n".encode() + text)
    unpacking.rename(arguments.out)
    size = sum(len(text) for _, text in documents)
    print(f"{'all':20} {len(documents):6} documents {size / 1e6:7.1f} MB, sha256 {digest.hexdigest()[:16]}, {arguments.out}")
    if arguments.archive:
        arguments.archive.parent.mkdir(parents=True, exist_ok=True)
        # xz's default level takes five times as long for a tenth.
        run("tar", "-C", str(arguments.out), "--sort=name", "--owner=0", "--group=0", "--mtime=@0", "-cJf",
            str(arguments.archive), ".", env={**os.environ, "XZ_OPT": "-2"})
        print(f"{arguments.archive}: {arguments.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
