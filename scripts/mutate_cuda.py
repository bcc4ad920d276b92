"""Puts deliberate faults into a copy of csrc, one at a time, and shows that a test against the double fails for each.

Usage: python3 scripts/mutate_cuda.py [--check] [WORD ...]; with words, only the faults whose description has one.
`--check` only looks whether every fault still fits the text of its file.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "target/mutate_cuda"
TIMEOUT_S = 120
FLAGS = "FLAGS_address=-O0 -fsanitize=address,undefined -fno-sanitize-recover=all -w"

# (file, text, text with the fault, what is wrong, the test that has to fail)
FAULTS = [
    (
        "tickets.cc",
        "status = wait_for_mark(*copier, *batch, error);",
        "status = KVTIER_OK;",
        "wait for no mark",
        "a_store_waits",
    ),
    (
        "tickets.cc",
        "status = wait_for_mark(*copier, *batch, error);",
        "status = batch->direction == KVTIER_LOAD ? KVTIER_OK : wait_for_mark(*copier, *batch, error);",
        "load without waiting for the last reader",
        "a_load_waits_for",
    ),
    (
        "tickets.cc",
        "copier.marks[batch.after_mark % kNumMarks]",
        "copier.marks[copier.last_mark % kNumMarks]",
        "wait for a mark only if it is the last",
        "a_store_waits",
    ),
    (
        "tickets.cc",
        "copier.marks[batch.after_mark % kNumMarks];\n    if (mark.id != batch.after_mark) return KVTIER_OK;",
        "copier.marks[copier.last_mark % kNumMarks];",
        "wait for the last mark",
        "a_load_does_not_wait",
    ),
    (
        "tickets.cc",
        "if (mark.id != batch.after_mark) return KVTIER_OK;",
        "",
        "wait for a mark that is long over",
        "marks_are",
    ),
    (
        "tickets.cc",
        "code = cudaEventRecord(ticket.waves[wave], stream);",
        "code = wave + 1 < batch.num_waves ? cudaSuccess : cudaEventRecord(ticket.waves[wave], stream);",
        "record the last wave only",
        "a_layer_is_there",
    ),
    (
        "tickets.cc",
        "wave < it.num_recorded ? wave : it.num_recorded - 1;",
        "0;",
        "wait for the first wave",
        "a_layer_is_there",
    ),
    (
        "tickets.cc",
        "ticket.waves[ticket.num_recorded - 1])",
        "ticket.waves[0])",
        "end a ticket with its first wave",
        "a_layer_is_there",
    ),
    (
        "tickets.cc",
        "if (code == cudaSuccess) return true;",
        "if (code != cudaSuccess) return true;",
        "never end",
        "all_layouts",
    ),
    (
        "tickets.cc",
        "                        : cudaStreamQuery(copier.streams[direction]);",
        "                        : cudaSuccess;",
        "end a ticket whose end could not be recorded at once",
        "a_failed_copy",
    ),
    ("tickets.cc", "    ticket.error = copier.lost;\n", "", "report success on a lost device", "a_lost_device"),
    (
        "tickets.cc",
        "if (failed || code != cudaSuccess) {",
        "if (false) {",
        "go on after a failed copy",
        "a_failed_copy",
    ),
    (
        "tickets.cc",
        "failed && it.end_is_recorded ? it.num_recorded - 1",
        "false ? it.num_recorded - 1",
        "take the event of a failed wave for a whole one",
        "a_failed_copy",
    ),
    (
        "tickets.cc",
        "            release_events(*copier, ticket);\n            open.pop_back();",
        "            open.pop_back();",
        "leak the events of a refused ticket",
        "what_is_short",
    ),
    ("tickets.cc", "if (filled != it.span.row_bytes)", "if (false)", "gather a span that is not filled", "bad_batches"),
    (
        "tickets.cc",
        "if (it.ticket == batch->ticket) return bad",
        "if (false) return bad",
        "take a ticket twice",
        "bad_batches",
    ),
    (
        "tickets.cc",
        "release_events(*copier, it);\n                open",
        "open",
        "lose the events of reported tickets",
        "all_layouts",
    ),
    (
        "copier.h",
        "if (code != cudaErrorInvalidResourceHandle) return status;",
        "return status;",
        "not notice a reset of the device",
        "a_reset_device_fails",
    ),
    (
        "copier.h",
        "if (capture == cudaStreamCaptureStatusNone) return",
        "if (true) return",
        "mark a capturing stream",
        "marks_are",
    ),
    (
        "copier.cc",
        '            return fail(error, KVTIER_BUSY, 0, "%llu marks',
        '            if (false) return fail(error, KVTIER_BUSY, 0, "%llu marks',
        "use the event of an unfinished mark again",
        "marks_are",
    ),
    (
        "copier.cc",
        "                    idle = false;\n",
        "                    idle = true;\n",
        "close while copies run",
        "closing_waits",
    ),
    (
        "copier.cc",
        "                destroy(*copier);\n                return status;",
        "                return status;",
        "leak a stream when opening fails",
        "opening_survives",
    ),
    (
        "copier.cc",
        "copier->staging = nullptr;  // stores",
        'return cuda_fail(error, code, "cudaMalloc");  // stores',
        "refuse to open without staging memory",
        "opening_survives",
    ),
    (
        "copier.cc",
        "const bool has_kernel = load_copy_kernel() == cudaSuccess;",
        "const bool has_kernel = true;",
        "not load the kernel ahead",
        "no_call_waits",
    ),
    (
        "copier.cc",
        "options->staging_bytes > 0 && has_kernel",
        "options->staging_bytes > 0",
        "gather where the kernel cannot run",
        "a_device_that_cannot",
    ),
    ("copier.cc", "options->host_registered != 0 && ", "", "read unregistered memory by a kernel", "kernels_need"),
    ("copier.cc", " && device.reads_host != 0", "", "read memory that kernels cannot reach", "kernels_need"),
    (
        "host_memory.cc",
        "                unregister(address, at, chunk_bytes);\n",
        "",
        "keep what was registered before a failure",
        "a_registration",
    ),
    (
        "host_memory.cc",
        "end - at < chunk_bytes ? end - at : chunk_bytes;",
        "chunk_bytes;",
        "register beyond the end",
        "a_registration",
    ),
    (
        "host_memory.cc",
        "out->driver_version == 0 ?",
        "false ?",
        "call a missing driver an old one",
        "a_machine_without",
    ),
    (
        "host_memory.cc",
        "error->status = KVTIER_NO_DEVICE;",
        "error->status = KVTIER_OK;",
        "say nothing of a missing device",
        "a_machine_without",
    ),
    ("status.h", "if (changed_) cudaSetDevice(before_);", "", "leave the thread on another device", "the_threads_own"),
    (
        "driver.h",
        "kSourceInStreamOrder = 1",
        "kSourceInStreamOrder = 3",
        "let the driver read sources early",
        "a_store_waits",
    ),
    (
        "batch_copy.cc",
        "if (it.copier.batch_copy == nullptr) return replace_by_merged(it);",
        "",
        "call what the driver lacks",
        "an_old_driver",
    ),
    (
        "batch_copy.cc",
        "        it.copier.batch_copy = nullptr;  // not asked again\n",
        "",
        "ask for the batch copy for ever",
        "asked_once",
    ),
    (
        "batch_copy.cc",
        "rows.sources.push_back(piece.source + row * piece.source_stride);",
        "rows.sources.push_back(piece.source);",
        "copy the first row only",
        "all_layouts",
    ),
    (
        "batch_copy.cc",
        "piece.destination_stride == piece.row_bytes);",
        "true);",
        "take padding for data",
        "all_layouts",
    ),
    (
        "batch_copy.cc",
        "piece.destination = staging + (piece.destination - span.destination);",
        "piece.destination = staging;",
        "gather all fragments into one place",
        "all_layouts",
    ),
    ("batch_copy.cc", "rows.destination += row * pitch;", "", "write every window to the same slots", "all_layouts"),
    (
        "batch_copy.cc",
        "span.num_rows - row < window ? span.num_rows - row : window;",
        "window;",
        "gather beyond the end",
        "all_layouts",
    ),
    (
        "batch_copy.cc",
        "work.num_pieces = work.num_units = 0;",
        "work.num_pieces = 0;",
        "launch units of the kernel before",
        "many_pieces",
    ),
    (
        "batch_copy.cc",
        "work.num_pieces == kMaxKernelPieces ||",
        "",
        "write beyond the kernel's argument",
        "many_pieces",
    ),
    (
        "copy_kernels.cu",
        "needed < kMaxCtas ? needed : kMaxCtas",
        "needed",
        "take as many processors as there are",
        "a_kernel_takes_few",
    ),
    (
        "copy_kernels.h",
        "work.pieces[piece + 1].first_unit <= unit) ++piece;",
        "work.pieces[piece + 1].first_unit < unit) ++piece;",
        "take a unit for one of the piece before",
        "all_layouts",
    ),
    (
        "copy_kernels.h",
        "left < kUnitBytes ? left : kUnitBytes, lane);",
        "kUnitBytes, lane);",
        "copy beyond the row",
        "kernel_bodies",
    ),
    ("copy_kernels.h", "if (head > bytes) head = bytes;", "", "copy beyond a short row", "kernel_bodies"),
    (
        "copy_kernels.h",
        "for (; i < num_words; i += kWarpLanes) to[i] = from[i];",
        "",
        "lose the last words",
        "kernel_bodies",
    ),
    ("copy_kernels.h", "body, bytes - head - body, lane);", "body, 0, lane);", "lose the last bytes", "kernel_bodies"),
    (
        "copy_kernels.h",
        "if ((difference & 15) == 0) return",
        "if ((difference & 7) == 0) return",
        "use words of 16 bytes where addresses allow 8",
        "kernel_bodies",
    ),
]


def check() -> list[str]:
    """What no longer fits, one line each."""
    texts = {name: (ROOT / "csrc" / name).read_text() for name, *_ in FAULTS}
    counts = [(name, what, texts[name].count(old)) for name, old, _, what, _ in FAULTS]
    return [f"csrc/{name}: {what}: its text is there {count} times" for name, what, count in counts if count != 1]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Builds in the copy."""
    command = ["make", "--silent", "-C", "tests/cuda_double", f"SRC={TREE}/csrc", f"OUT={TREE}/out", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def try_fault(name: str, old: str, new: str, test: str) -> str:
    """What came of a fault: "" if the named test fails."""
    file = TREE / "csrc" / name
    original = file.read_text()
    file.write_text(original.replace(old, new))
    try:
        built = make(FLAGS, f"{TREE}/out/address/tests")
        if built.returncode != 0:
            return f"does not compile\n{built.stderr}"
        try:
            run = subprocess.run([f"{TREE}/out/address/tests", test], capture_output=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        return "" if run.returncode != 0 else f"survives {test or 'all tests'}"
    finally:
        file.write_text(original)


def main() -> int:
    """Tries the faults; one if any was not noticed."""
    wrong = check()
    if wrong or "--check" in sys.argv:
        print("\n".join(wrong) or f"all {len(FAULTS)} faults fit csrc")
        return int(bool(wrong))
    shutil.rmtree(TREE / "csrc", ignore_errors=True)
    shutil.copytree(ROOT / "csrc", TREE / "csrc", copy_function=shutil.copyfile)
    os.environ.pop("MAKEFLAGS", None)
    words = sys.argv[1:]
    for name, old, new, what, test in FAULTS:
        if words and not any(word in what for word in words):
            continue
        result = try_fault(name, old, new, test)
        print(f"{result or 'noticed'}: {what}", flush=True)
        if result:
            wrong.append(what)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
