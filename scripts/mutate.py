"""Puts deliberate faults into a copy of the table, one at a time, and shows that the Rust tests fail for each.

A fault is an exact text and what replaces it. It is an error if a text is not found exactly once, if the tests fail
without a fault, if a fault does not compile, or if the tests pass with one. With `--check`, only the first is looked
for, which takes no time: `make lint` does that, so that a change of the table takes its faults along.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The randomness is fixed, so that a fault is noticed always or never.
TESTS = [
    "cargo",
    "test",
    "--locked",
    "--quiet",
    "--lib",
    "--test",
    "model",
    "--test",
    "admission",
    "--test",
    "eviction_order",
]
SECONDS_PER_RUN = 60

# (name, file under src, text, replacement)
# ruff: noqa: E501
FAULTS = [
    ("skip a release at the end of a request", "session/ending.rs", "        gpu.unhold(block);\n", ""),
    (
        "forget the ticket's hold on a store's source",
        "session/step.rs",
        "            holds.hold_cached(source);\n",
        "",
    ),
    (
        "keep the request's hold on a cancelled source",
        "session/ending.rs",
        "                cpu.unhold(request.load_sources[position - request.gpu_hit_blocks]);\n",
        "",
    ),
    (
        "keep the ticket's hold on a load's source",
        "table/complete.rs",
        "                cpu.unhold(load.source);\n",
        "",
    ),
    ("keep the ticket's hold on a store's source", "table/complete.rs", "            gpu.unhold(source);\n", ""),
    (
        "unhold a stored block's source twice",
        "table/complete.rs",
        "            gpu.unhold(source);\n",
        "            gpu.unhold(source);\n            gpu.unhold(source);\n",
    ),
    (
        "publish a store when it is planned",
        "session/step.rs",
        "            holds.hold_cached(source);\n",
        "            holds.hold_cached(source);\n            shared.cpu().releases(1).publish_copied(destination);\n",
    ),
    (
        "ignore failed pairs of stores",
        "table/complete.rs",
        "            if copies.has_failed(pair) {\n                num_failed += 1;\n                self.cpu().retract",
        "            if false {\n                num_failed += 1;\n                self.cpu().retract",
    ),
    (
        "ignore failed pairs of loads",
        "table/complete.rs",
        ".take_while(|&pair| !copies.has_failed(pair))",
        ".take_while(|_| true)",
    ),
    (
        "leave the copy of a failed load in the tier",
        "table/complete.rs",
        "                    self.withdraw(load.source);\n",
        "",
    ),
    ("complete at the first rank", "ticket.rs", "done.count_ones() == self.ranks", "done.count_ones() >= 1"),
    ("let a rank acknowledge twice", "ticket.rs", "if begun & 1 << rank != 0 {", "if false {"),
    (
        "let a ticket pass that was never issued",
        "ticket.rs",
        "number > 0 && number < self.next.load(Relaxed)",
        "number < u64::MAX",
    ),
    ("take failed indices that are out of range", "ticket.rs", "index >= copies.len())", "index > copies.len())"),
    ("keep a rank that was refused", "ticket.rs", "            cell.begun.fetch_and(!(1 << rank), Release);\n", ""),
    (
        "leave a finished ticket counted as open",
        "ticket.rs",
        "        self.tickets.num_open.fetch_sub(1, Relaxed);\n",
        "",
    ),
    (
        "evict from the young end",
        "eviction.rs",
        "slot_at(self.oldest().load(Relaxed)) else {",
        "slot_at(self.youngest().load(Relaxed)) else {",
    ),
    ("order by age the wrong way round", "eviction.rs", "its_stamp > stamp", "its_stamp < stamp"),
    (
        "forget to count idle slots",
        "eviction.rs",
        "        let Ok((old, new)) = result else { return place.word() };\n        if new.is_idle() {\n            self.num_idle += 1;\n",
        "        let Ok((old, new)) = result else { return place.word() };\n        if new.is_idle() {\n",
    ),
    (
        "forget to count stored blocks as idle",
        "eviction.rs",
        "            if new.is_idle() {\n                self.num_idle += 1;\n",
        "            if new.is_idle() {\n",
    ),
    (
        "forget that evicted slots are not idle",
        "eviction.rs",
        "                self.order.header.gauges.idle.fetch_sub(1, Relaxed);\n",
        "",
    ),
    ("refresh no slot that is idle", "tier.rs", "if self.tier.holds().hold_if(id, Word::is_idle) {", "if false {"),
    (
        "leave an evicted slot in the index",
        "tier.rs",
        "            self.index().remove(&hash, slot as usize);\n",
        "",
    ),
    (
        "leave a withdrawn slot in the index",
        "tier.rs",
        "        self.index().remove(&self.hash(id), id.index());\n        Self::count",
        "        Self::count",
    ),
    ("leave a reset slot in the index", "tier.rs", "            self.index().remove(&hash, at);\n", ""),
    (
        "forget a slot that a copy leaves",
        "tier.rs",
        "            self.free_bitmap().put([id.index()]);\n        }\n    }\n\n    /// Takes back",
        "        }\n    }\n\n    /// Takes back",
    ),
    (
        "enter a hash twice",
        "index.rs",
        "        if self.find_at(place, other).is_some() {\n            return Inserted::Exists;\n        }\n",
        "",
    ),
    ("look at one bucket only", "index.rs", "if a == b { &[][..] }", "if true { &[][..] }"),
    (
        "allocate the highest free slot first",
        "free_bitmap.rs",
        "    bits(word).take(n).fold",
        "    bits(word).skip(word.count_ones() as usize - n).fold",
    ),
    (
        "use one block more than there is",
        "free_bitmap.rs",
        "rest @ ..64 => (1 << rest) - 1",
        "rest @ ..63 => (1 << (rest + 1)) - 1",
    ),
    (
        "forget to count what is given back",
        "free_bitmap.rs",
        "            self.header.gauges.taken.fetch_sub(num_put, Release);\n",
        "",
    ),
    ("hash without the parent", "hash.rs", "        hasher.update(self.parent.0);\n", ""),
    (
        "ignore the salt",
        "hash.rs",
        "                update_field(&mut hasher, b's', salt);\n",
        "                let _ = salt;\n",
    ),
    (
        "ignore where media starts",
        "hash.rs",
        "            hasher.update(((item.offset - start) as u32).to_le_bytes());\n",
        "            let _ = start;\n",
    ),
    ("let the last token hit", "table/mod.rs", "num_tokens.saturating_sub(1) / self", "num_tokens / self"),
    (
        "reset under live requests",
        "table/mod.rs",
        "self.activity.compare_exchange(0, RESETTING, AcqRel, Relaxed).is_ok()",
        "self.activity.fetch_or(RESETTING, AcqRel) < u64::MAX",
    ),
    (
        "announce no block that is published",
        "session/mod.rs",
        "        self.push_event(EventKind::Stored, TierName::Gpu, *hash, id.index());\n",
        "",
    ),
    (
        "keep commits of loads that failed",
        "session/mod.rs",
        "            if let (Some(num_tokens), true) = (commit, loads.num_good == loads.loads.len()) {",
        "            if let (Some(num_tokens), true) = (commit, true) {",
    ),
    (
        "commit before the loads are there",
        "session/mod.rs",
        "        if request.loads == Loads::Finished {\n            self.table",
        "        if true {\n            self.table",
    ),
    (
        "leave evicted blocks in the store queue",
        "session/admission.rs",
        "usize::from(store_queue.remove(id.index()))",
        "usize::from(store_queue.contains(id.index()))",
    ),
    (
        "count a block twice that is named twice",
        "session/admission.rs",
        "            available = counted.saturating_sub(num_different);",
        "            available = counted + 0 * num_different;",
    ),
    ("store more than the budget", "session/step.rs", ".min(budget).min(available)", ".min(available)"),
]


def changed(tree: Path, name: str, file: str, text: str, replacement: str) -> tuple[Path, str, str]:
    """A file of the tree, what is in it, and what a fault makes of that."""
    path = tree / "src" / file
    source = path.read_text()
    if source.count(text) != 1:
        sys.exit(f"{name}: the text is {source.count(text)} times in src/{file}")
    return path, source, source.replace(text, replacement)


def apply(tree: Path, name: str, file: str, text: str, replacement: str) -> tuple[Path, str]:
    """Puts a fault into the tree; gives the file and what was in it."""
    path, source, faulty = changed(tree, name, file, text, replacement)
    path.write_text(faulty)
    return path, source


def tests_pass(tree: Path) -> bool:
    """Whether the tests of the tree pass; one that never ends does not."""
    seed = {"PROPTEST_RNG_SEED": "1", "PROPTEST_MAX_SHRINK_ITERS": "0"}
    options = {"cwd": tree, "env": os.environ | seed, "capture_output": True, "text": True}
    built = subprocess.run([*TESTS, "--no-run"], **options, check=False)
    if built.returncode != 0:
        sys.exit(f"it does not compile:\n{built.stderr}")
    try:
        return subprocess.run(TESTS, **options, check=False, timeout=SECONDS_PER_RUN).returncode == 0
    except subprocess.TimeoutExpired:
        # A call that does not return is noticed, too.
        return False


def main() -> None:
    """Tries every fault."""
    for fault in FAULTS:
        changed(ROOT, *fault)
    if sys.argv[1:] == ["--check"]:
        print(f"{len(FAULTS)} faults: each fits the source")
        return
    start = time.monotonic()
    survivors = []
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ("src", "tests", "benches"):
            shutil.copytree(ROOT / name, tree / name)
        for name in ("Cargo.toml", "Cargo.lock", "README.md"):
            shutil.copy(ROOT / name, tree / name)
        os.environ["CARGO_TARGET_DIR"] = os.environ.get("MUTANTS_TARGET_DIR", str(ROOT / "target" / "mutants"))
        if not tests_pass(tree):
            sys.exit("the tests fail without a fault")
        for fault in FAULTS:
            path, source = apply(tree, *fault)
            noticed = not tests_pass(tree)
            path.write_text(source)
            print(f"{'noticed ' if noticed else 'SURVIVED'} {fault[1]:22} {fault[0]}", flush=True)
            survivors += [] if noticed else [fault[0]]
    print(f"{len(FAULTS) - len(survivors)} of {len(FAULTS)} faults noticed, {time.monotonic() - start:.0f} s")
    if survivors:
        sys.exit("survived: " + "; ".join(survivors))


if __name__ == "__main__":
    main()
