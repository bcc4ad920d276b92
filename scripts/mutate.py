"""Puts deliberate faults into a copy of the table, one at a time, and shows that the Rust tests fail for each.

A fault that the tests miss is put to the loom models; those of `RACES` go to the models at once.

A fault is an exact text and what replaces it. It is an error if a text is not found exactly once, if the tests fail
without a fault, if a fault does not compile, or if the tests pass with one. With `--check`, only the first is looked
for, which takes no time: `make lint` does that, so that a change of the table takes its faults along.
"""

from __future__ import annotations

import os
import shutil
import signal
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
    "--test",
    "store_limits",
]
SECONDS_PER_RUN = 60
# For what the tests miss. A model that is lost in a faulty interleaving counts as one that fails.
MODELS = ["cargo", "test", "--locked", "--quiet", "--release", "--lib", "models"]
SECONDS_PER_MODELS = 180

# (name, file under src, text, replacement)
# ruff: noqa: E501
FAULTS = [
    ("skip a release at the end of a request", "session/ending.rs", "        gpu.unhold_own(block);\n", ""),
    (
        "forget the ticket's hold on a store's source",
        "session/step.rs",
        "                holds.hold_cached(store.source);\n",
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
        "                holds.hold_cached(store.source);\n",
        "                holds.hold_cached(store.source);\n                shared.cpu().releases(1).publish_copied(store.destination);\n",
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
        "                    self.withdraw(load.source, &mut events);\n",
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
        "let mut oldest = self.oldest().load(Relaxed);",
        "let mut oldest = self.youngest().load(Relaxed);",
    ),
    ("order by age the wrong way round", "eviction.rs", "its_stamp > stamp", "its_stamp < stamp"),
    (
        "forget to count idle slots",
        "eviction.rs",
        "            header.gauges.idle.fetch_add(self.num_idle, Release);\n",
        "            let _ = header;\n",
    ),
    (
        "insert behind a slot on its way to a new place",
        "eviction.rs",
        "!word.is_idle() || word.is_in_inbox()",
        "!word.is_idle()",
    ),
    ("evict what is held", "eviction.rs", "(word.is_idle() && !word.is_in_inbox()).then", "(!word.is_in_inbox()).then"),
    (
        "evict a slot that was released again",
        "eviction.rs",
        "(word.is_idle() && !word.is_in_inbox()).then",
        "word.is_idle().then",
    ),
    (
        "keep the generation of an evicted slot",
        "eviction.rs",
        "with_state(State::Claimed).with_holds(1).renewed()",
        "with_state(State::Claimed).with_holds(1)",
    ),
    ("never change the generation", "slot.rs", "self.0.wrapping_add(1 << 32)", "self.0"),
    (
        "forget that evicted slots are not idle",
        "eviction.rs",
        "        self.order.header.gauges.idle.fetch_sub(num_evicted as i64, Relaxed);\n",
        "        let _ = num_evicted;\n",
    ),
    ("count no event that is dropped", "event.rs", "usize::from(!is_in);", "usize::from(!is_in && false);"),
    ("refresh no slot that is idle", "holds.rs", "if self.holds.hold_if(id, Word::is_idle) {", "if false {"),
    ("leave the twin of a duplicate as old as it is", "session/ending.rs", "gpu.refresh(twin.id);", "let _ = twin.id;"),
    (
        "keep counting hits as evictable when they are held",
        "holds.rs",
        "gauges().idle, -self.num_idle)",
        "gauges().idle, 0 * self.num_idle)",
    ),
    (
        "keep counting slots as in flight when they are published",
        "holds.rs",
        "gauges.in_flight, -self.num_published)",
        "gauges.in_flight, 0 * self.num_published)",
    ),
    (
        "hold without comparing the generation",
        "holds.rs",
        "self.hold_if(hit.id, |word| word.generation() == hit.generation)",
        "self.hold_if(hit.id, |_| true)",
    ),
    (
        "hit without comparing the hash",
        "tier.rs",
        "before.state() != State::Cached || !slot.has_hash(hash)",
        "before.state() != State::Cached || hash.0.is_empty()",
    ),
    (
        "hit a slot that is not published",
        "tier.rs",
        """        if before.state() != State::Cached || !slot.has_hash(hash) {
            return None;
        }
        // A slot that was published before and after, in one generation, had this hash throughout.
        let after = slot.word();
        (after.state() == State::Cached && after""",
        """        if !slot.has_hash(hash) {
            return None;
        }
        let after = slot.word();
        (after""",
    ),
    (
        "leave an evicted slot in the index",
        "tier.rs",
        "            self.index().remove(now, slot as usize);\n",
        "            let _ = now;\n",
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
        "if (a.fits | b.fits) && self.has_other(place, slot, &is_same) {",
        "if false && self.has_other(place, slot, &is_same) {",
    ),
    ("look at one bucket only", "index.rs", "place.buckets.iter().find_map(", "place.buckets.iter().take(1).find_map("),
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
    (
        "hash without the parent",
        "hash.rs",
        "            *place = word.to_le_bytes();\n",
        "            let _ = (place, word);\n",
    ),
    (
        "ignore the salt",
        "hash.rs",
        "            add_field(&mut text, b's', salt);\n",
        "            let _ = salt;\n",
    ),
    (
        "ignore where media starts",
        "hash.rs",
        "            self.text.extend_from_slice(&((item.offset - start) as u32).to_le_bytes());\n",
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
        "                    events.push(EventKind::Stored, TierName::Gpu, *hash, block.index());\n",
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
    (
        "count hits that nobody holds as available",
        "session/admission.rs",
        "let mut available = counted.saturating_sub(num_idle);",
        "let mut available = counted + 0 * num_idle;",
    ),
    (
        "name the wrong reason for what is not stored",
        "session/step.rs",
        "if budget <= available {",
        "if budget > available {",
    ),
    ("store more than the budget", "session/step.rs", ".min(budget).min(available)", ".min(available)"),
]

# Faults that only other interleavings show: the first stage is not asked, the models are.
RACES = [
    (
        "count idle slots before they can be found",
        "eviction.rs",
        "        let header = self.order.header;\n        if let",
        "        let header = self.order.header;\n        header.gauges.idle.fetch_add(std::mem::take(&mut self.num_idle), Release);\n        if let",
    ),
    (
        "take free slots without an exchange",
        "free_bitmap.rs",
        "match self.words[at].compare_exchange_weak(word, word | wanted, AcqRel, Relaxed) {",
        "self.words[at].store(word | wanted, Release);\n                match Ok::<u64, u64>(word) {",
    ),
    (
        "enter a hash without a fence",
        "index.rs",
        "        fence(SeqCst);\n",
        "        let _ = (fence as fn(_), SeqCst);\n",
    ),
    (
        "enter a hash without a second look",
        "index.rs",
        "if (has_rival(place.buckets[0]) | has_rival(place.buckets[1])) && self",
        "if (has_rival(place.buckets[0]) & false) && self",
    ),
    (
        "change idle slots by plain stores where others take holds",
        "block.rs",
        "const HAS_ONE_TAKER: bool = false;",
        "const HAS_ONE_TAKER: bool = true;",
    ),
    (
        "drop a hold by a plain store beside another's",
        "eviction.rs",
        "word.num_holds() == 1 && matches!",
        "word.num_holds() > 0 && matches!",
    ),
    (
        "publish by a plain store what a request waits for",
        "eviction.rs",
        "if word.num_holds() == 0 && !word.is_in_inbox() {",
        "if !word.is_in_inbox() {",
    ),
    (
        "begin during a reset",
        "table/mod.rs",
        "self.activity.fetch_add(n as u64, AcqRel) & RESETTING == 0",
        "self.activity.fetch_add(n as u64, AcqRel) < u64::MAX",
    ),
    (
        "end activity without a release",
        "table/mod.rs",
        "self.activity.fetch_sub(n as u64, Release)",
        "self.activity.fetch_sub(n as u64, Relaxed)",
    ),
    (
        "be done without an order",
        "ticket.rs",
        "cell.done.fetch_or(1 << rank, AcqRel)",
        "cell.done.fetch_or(1 << rank, Relaxed)",
    ),
    (
        "begin on another ticket of the cell",
        "ticket.rs",
        "begun >> 32 != number & 0xffff_ffff || !is_open",
        "false && is_open",
    ),
    (
        "abandon a copy that has ended",
        "tier.rs",
        "(word.state() == State::InFlight).then(|| word.with_holds(0))",
        "Some(word.with_holds(0))",
    ),
    (
        "count what is available after the hits",
        "session/admission.rs",
        "        let mut available = counted",
        "        let counted = shared.gpu.num_available();\n        let mut available = counted",
    ),
    (
        "end a reset's activity before the outcome is in the tiers",
        "table/complete.rs",
        "        outcome.copies(|copies| {",
        "        shared.host.end_activity(1);\n        shared.host.begin_activity(1);\n        outcome.copies(|copies| {",
    ),
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


def passes(tree: Path, command: list[str], seconds: int, environment: dict[str, str]) -> bool:
    """Whether the tests of the tree pass; those that never end do not."""
    options = {"cwd": tree, "env": os.environ | environment, "capture_output": True, "text": True}
    build = command[: command.index("--")] if "--" in command else command
    built = subprocess.run([*build, "--no-run"], **options, check=False)
    if built.returncode != 0:
        sys.exit(f"it does not compile:\n{built.stderr}")
    # A call that does not return is noticed, too. A group of its own: the test program ends with cargo.
    with subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        try:
            return run.wait(timeout=seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return False


def tests_pass(tree: Path) -> bool:
    """Whether the first stage passes."""
    return passes(tree, TESTS, SECONDS_PER_RUN, {"PROPTEST_RNG_SEED": "1", "PROPTEST_MAX_SHRINK_ITERS": "0"})


def models_pass(tree: Path) -> bool:
    """Whether the second stage passes: the models of the protocols."""
    settings = {
        "RUSTFLAGS": "--cfg kvtier_loom",
        "CARGO_TARGET_DIR": os.environ["CARGO_TARGET_DIR"] + "/loom",
        "CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS": "true",
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
    }
    return passes(tree, MODELS, SECONDS_PER_MODELS, settings)


def main() -> None:
    """Tries every fault, or those whose names have one of the words given."""
    for fault in FAULTS + RACES:
        changed(ROOT, *fault)
    if sys.argv[1:] == ["--check"]:
        print(f"{len(FAULTS + RACES)} faults: each fits the source")
        return
    start = time.monotonic()
    os.nice(10)
    survivors = []
    faults = [fault for fault in FAULTS + RACES if not sys.argv[1:] or any(word in fault[0] for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ("src", "tests", "benches"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("python", "results"))
        for name in ("Cargo.toml", "Cargo.lock", "README.md"):
            shutil.copy(ROOT / name, tree / name)
        os.environ["CARGO_TARGET_DIR"] = os.environ.get("MUTANTS_TARGET_DIR", str(ROOT / "target" / "mutants"))
        if not tests_pass(tree) or not models_pass(tree):
            sys.exit("the tests fail without a fault")
        for fault in faults:
            path, source = apply(tree, *fault)
            stage = None
            if fault in FAULTS and not tests_pass(tree):
                stage = "tests"
            elif not models_pass(tree):
                stage = "models"
            path.write_text(source)
            print(f"{stage or 'SURVIVED':8} {fault[1]:22} {fault[0]}", flush=True)
            survivors += [] if stage else [fault[0]]
    num_faults = len(faults)
    print(f"{num_faults - len(survivors)} of {num_faults} faults noticed, {time.monotonic() - start:.0f} s")
    if survivors:
        sys.exit("survived: " + "; ".join(survivors))


if __name__ == "__main__":
    main()
