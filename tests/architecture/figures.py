#!/usr/bin/env python3
"""Prints the figures of the source tree: words of Markdown, lines, files, folders, comments, names. It fails nothing.

usage: tests/architecture/figures.py [--all]     --all: every folder and every small file, not only the counts
"""
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENDINGS = (".h", ".cc", ".cu", ".cuh", ".cu.in")
MOST_IN_FOLDER, SMALL = 25, 60  # sources; lines
FIRST_WORDS = ("Of", "That", "What", "Whose", "Which", "Who")
BARE_NAMES = ("Take", "Of", "At", "Share", "Gather", "Settle", "Gone", "Ask")

# The first line of a comment: one that follows code, or one whose line before is no comment.
COMMENT = re.compile(r"//\s*(\w+)")
# A declaration: a type, then the name without a class before it. Definitions outside of a class are left out.
DECLARATION = re.compile(r"^(?!.*\b(?:return|co_return|else|case|new)\b)[\w:<>,*&\s\[\]]*[\w>*&\]][\s*&]+(%s)\(" % "|".join(BARE_NAMES))


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def lines_of(path):
    return (ROOT / path).read_text(encoding="utf-8", errors="replace").splitlines()


def print_words(paths):
    """Words as `wc -w` counts them."""
    words = {path: sum(len(line.split()) for line in lines_of(path)) for path in paths if path.endswith(".md")}
    counted = {path: count for path, count in words.items() if not path.startswith("tests/bench/results/")}
    print(f"Markdown: {sum(counted.values())} words in {len(counted)} files outside tests/bench/results/, "
          f"{sum(words.values())} in all {len(words)}")
    for path, count in sorted(counted.items(), key=lambda item: -item[1]):
        print(f"  {count:6}  {path}")


def parts(sources):
    return (("outside tests", [path for path in sources if not path.startswith("tests/")]),
            ("tests", [path for path in sources if path.startswith("tests/")]))


def print_sources(sources):
    for name, chosen in parts(sources):
        print(f"C++ and CUDA, {name}: {sum(len(sources[path]) for path in chosen)} lines in {len(chosen)} files")


def print_folders(sources, everything):
    files, lines = collections.Counter(), collections.Counter()
    for path, text in sources.items():
        folder = str(pathlib.PurePosixPath(path).parent)
        files[folder] += 1
        lines[folder] += len(text)
    large = sum(count > MOST_IN_FOLDER for count in files.values())
    print(f"Folders: {len(files)}, of which {large} have more than {MOST_IN_FOLDER} sources (*)")
    for folder, count in sorted(files.items()):
        if everything or count > MOST_IN_FOLDER:
            print(f"  {'*' if count > MOST_IN_FOLDER else ' '} {count:4} sources {lines[folder]:6} lines  {folder}")


def print_small(sources, everything):
    for name, chosen in parts(sources):
        small = [path for path in chosen if len(sources[path]) < SMALL]
        print(f"Files under {SMALL} lines, {name}: {len(small)} of {len(chosen)} ({100 * len(small) / max(1, len(chosen)):.0f} %)")
        for path in small if everything else []:
            print(f"  {len(sources[path]):4}  {path}")


def print_comments(sources):
    found, rooms, before = collections.Counter(), collections.Counter(), ""
    for path, text in sources.items():
        for line in text:
            match = COMMENT.search(line)
            goes_on = line.lstrip().startswith("//") and before.lstrip().startswith("//")
            if match and not goes_on and match[1] in FIRST_WORDS:
                found[match[1]] += 1
                rooms[str(pathlib.PurePosixPath(path).parent)] += 1
            before = line
    print(f"Comments that begin so: {sum(found.values())} ({', '.join(f'{word} {found[word]}' for word in FIRST_WORDS)})")
    for room, count in rooms.most_common():
        print(f"  {count:4}  {room}")


def print_glossary():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!word\b)[^|]+ \|", section, re.MULTILINE)
    print(f"Glossary of CONTRIBUTING.md: {len(rows)} words")


def print_names(sources):
    rooms = collections.defaultdict(collections.Counter)
    for path, text in sources.items():
        for line in text:
            if match := DECLARATION.match(line):
                rooms[match[1]][str(pathlib.PurePosixPath(path).parent)] += 1
    print(f"Functions with a bare name: {sum(sum(counts.values()) for counts in rooms.values())}")
    for name, counts in sorted(rooms.items()):
        print(f"  {name} {sum(counts.values())}: {', '.join(f'{room} {count}' for room, count in sorted(counts.items()))}")


def main():
    everything, paths = "--all" in sys.argv[1:], tracked()
    sources = {path: lines_of(path) for path in paths if path.endswith(ENDINGS)}
    print("Top level: " + ", ".join(sorted({path.split("/")[0] for path in paths if "/" in path and not path.startswith(".")})))
    print_words(paths)
    print_sources(sources)
    print_folders(sources, everything)
    print_small(sources, everything)
    print_comments(sources)
    print_glossary()
    print_names(sources)


main()
