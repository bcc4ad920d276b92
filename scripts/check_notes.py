"""Checks that every atomic operation has an ordering note and every unsafe block a safety note.

An ordering note is a comment on the statement's lines, or above it in the same paragraph, with the ordering as its
first word. Usage: python scripts/check_notes.py [FILE ...]; without files, all of src/.
"""

import re
import sys
from pathlib import Path

ORDERING = re.compile(r"\b(Relaxed|Acquire|Release|AcqRel|SeqCst)\b")
NOTE = re.compile(r"//.*?\b(Relaxed|Acquire|Release|AcqRel|SeqCst)\b")
OPERATION = re.compile(r"(\.(load|store|swap|fetch_\w+|compare_exchange\w*)|\bfence)\(")
UNSAFE = re.compile(r"\bunsafe (impl\b|\{)")
NOTE_LINES = 14


def code_of(line: str) -> str:
    """The line without its comment."""
    return line.split("//", 1)[0]


def has_note(lines: list[str], at: int, note: re.Pattern[str]) -> bool:
    """Whether a line or the paragraph above it, to the function's start, has the note."""
    for above in range(at, max(at - NOTE_LINES, -1), -1):
        if note.search(lines[above]):
            return True
        if re.match(r"\s*(pub(\(crate\))? )?(unsafe )?fn ", lines[above]):
            return False
    return False


def faults(path: Path) -> list[str]:
    """What lacks a note, one line each."""
    lines = path.read_text().splitlines()
    found = []
    for at, line in enumerate(lines):
        code = code_of(line)
        if code.lstrip().startswith(("use ", "pub(crate) use ")):
            continue
        if OPERATION.search(code) and ORDERING.search(code) and not has_note(lines, at, NOTE):
            found.append(f"{path}:{at + 1}: an atomic operation without an ordering note: {code.strip()}")
        if UNSAFE.search(code) and not has_note(lines, at, re.compile("// SAFETY:")):
            found.append(f"{path}:{at + 1}: unsafe without a SAFETY note: {code.strip()}")
    return found


def main() -> int:
    """Prints the faults; one if there are any."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(Path("src").rglob("*.rs"))
    found = [fault for path in paths for fault in faults(path)]
    print("\n".join(found) or f"{len(paths)} files: every atomic operation and unsafe block has its note")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
