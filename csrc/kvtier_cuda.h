// kvtier_cuda: copies blocks between GPU memory and host memory on CUDA streams. Plain C ABI: pointers, sizes, stream
// handles, status codes. It is loaded at run time, so a machine without it only lacks CUDA.
//
// Rules for the caller
// - Any stream handle of the device's primary context will do: torch, CuPy and JAX all give one. 0 is the default.
// - `mark` after the work that copies must wait for has been enqueued, and name the mark in the batch: a store waits
//   for the step that writes its sources, a load for the last step that reads its destinations.
// - Until a ticket is in `poll`'s reports its sources must not be written and its destinations not touched, except by
//   work on a stream that `wait_layer` has made wait for it.
// - `mark`, `submit`, `wait_layer`, `poll` and `counts` do not wait for the device, with one exception: CUDA makes
//   `submit` wait when a copy's host memory is not registered, so give such copies to a thread that may wait.
// - `close` waits for open copies, for a bounded time. `open`, `close`, `register_host` and `unregister_host` allocate
//   or free, for which CUDA may wait until the device is idle.
// - All calls on one copier may come from any thread. A thread whose current device is another one gets that back when
//   the call ends, which makes CUDA create a context there. After a fork the child must not call anything.
#ifndef KVTIER_CUDA_H
#define KVTIER_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised with every change of a function or struct below.
#define KVTIER_CUDA_ABI_VERSION 1u
#define KVTIER_CUDA_EXPORT __attribute__((visibility("default")))

// What a call returns. The error's text has CUDA's own words where CUDA refused.
enum kvtier_status {
    KVTIER_OK = 0,
    KVTIER_BAD_ARGUMENT = 1,    // nothing was done
    KVTIER_NO_DEVICE = 2,       // no driver, an old one, or no such device; nothing was done
    KVTIER_CUDA_ERROR = 3,      // CUDA refused; nothing was enqueued
    KVTIER_NO_MEMORY = 4,       // host or device memory is short; nothing was enqueued
    KVTIER_DEVICE_LOST = 5,     // the context is dead: every open ticket fails, no new one is taken
    KVTIER_BUSY = 6,            // too many marks are open, or copies did not end in time
    KVTIER_UNKNOWN_TICKET = 7,  // never submitted, or already reported
    KVTIER_COPY_FAILED = 8      // as the status of a ticket: some of its copies were not made
};

enum kvtier_direction { KVTIER_LOAD = 0 /* host to GPU */, KVTIER_STORE = 1 /* GPU to host */ };

// How a group of pieces is copied. A path that the device, the direction or the memory does not allow is replaced by
// KVTIER_MERGED, and counted in `num_replaced_groups`.
enum kvtier_path {
    KVTIER_MERGED = 0,  // one cudaMemcpyAsync or cudaMemcpy2DAsync per piece
    KVTIER_BATCH = 1,   // cuMemcpyBatchAsync over all rows of the group
    KVTIER_KERNEL = 2,  // loads: a kernel that reads registered host memory
    KVTIER_GATHER = 3   // stores: a kernel that gathers into device memory, then one copy per group
};

#define KVTIER_ERROR_TEXT_BYTES 248

typedef struct kvtier_error {
    int32_t status;
    int32_t cuda_code;  // 0 where CUDA was not at fault
    char text[KVTIER_ERROR_TEXT_BYTES];
} kvtier_error;

typedef struct kvtier_device {
    int32_t driver_version;   // as cudaDriverGetVersion: 13000 is 13.0
    int32_t runtime_version;
    int32_t num_devices;
    int32_t numa_node;        // of the host memory nearest to the device, -1 where not known
    int32_t has_batch_copy;   // the driver has cuMemcpyBatchAsync
    int32_t reads_host;       // kernels reach registered host memory at its host address
    char name[256];
} kvtier_device;

// Equal rows at constant distances: one fragment of one run of blocks.
typedef struct kvtier_piece {
    uint64_t source;
    uint64_t destination;
    uint64_t source_stride;
    uint64_t destination_stride;
    uint64_t row_bytes;
    uint64_t num_rows;
} kvtier_piece;

typedef struct kvtier_group {
    uint32_t path;
    uint32_t wave;         // not less than that of the group before
    uint32_t first_piece;
    uint32_t num_pieces;
    kvtier_piece span;     // KVTIER_GATHER: the host rows that the pieces fill without a gap; `source` is unused
} kvtier_group;

typedef struct kvtier_batch {
    uint64_t ticket;
    uint64_t after_mark;
    const kvtier_piece* pieces;
    const kvtier_group* groups;
    uint32_t num_pieces;
    uint32_t num_groups;
    uint32_t num_waves;    // 1 .. KVTIER_MAX_WAVES; `wait_layer` can wait for each
    uint32_t direction;
} kvtier_batch;

#define KVTIER_MAX_WAVES 1024u

typedef struct kvtier_report {
    uint64_t ticket;
    kvtier_error error;    // status KVTIER_OK: every byte is where it belongs
} kvtier_report;

typedef struct kvtier_options {
    int32_t device;
    int32_t host_registered;  // the host memory was registered: kernels may read it
    uint64_t staging_bytes;   // device memory for KVTIER_GATHER; 0: none
} kvtier_options;

typedef struct kvtier_counts {
    uint64_t num_copies;           // cudaMemcpyAsync and cudaMemcpy2DAsync
    uint64_t num_batch_copies;     // calls of cuMemcpyBatchAsync
    uint64_t num_batched_rows;
    uint64_t num_kernels;
    uint64_t num_replaced_groups;
    uint64_t num_failed_tickets;
    uint64_t num_open_tickets;
    uint64_t staging_bytes;        // 0 also where the device had no room for it
} kvtier_counts;

typedef struct kvtier_copier kvtier_copier;

KVTIER_CUDA_EXPORT uint32_t kvtier_cuda_abi_version(void);

// Says what there is. KVTIER_NO_DEVICE says why there is not.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_probe(int32_t device, kvtier_device* out, kvtier_error* error);

// Registers host memory for all contexts, in chunks. On an error what was registered is given back. A copy must not
// cross the border of two chunks.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_register_host(int32_t device, uint64_t address, uint64_t bytes,
                                                     uint64_t chunk_bytes, kvtier_error* error);
// The inverse, with the same arguments; goes on after an error and returns the first one.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_unregister_host(int32_t device, uint64_t address, uint64_t bytes,
                                                       uint64_t chunk_bytes, kvtier_error* error);

KVTIER_CUDA_EXPORT int32_t kvtier_cuda_open(const kvtier_options* options, kvtier_copier** out, kvtier_error* error);

// Waits at most `timeout_ms` for open copies; what was not polled is not reported any more. KVTIER_BUSY: they still
// run, and the copier stays as it was.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_close(kvtier_copier* copier, uint32_t timeout_ms, kvtier_error* error);

// Marks what has been enqueued on `stream` so far. At most 64 marks may be unfinished. Marks are numbers from 1 on.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_mark(kvtier_copier* copier, uint64_t stream, uint64_t* mark,
                                            kvtier_error* error);

// Enqueues the copies of a ticket. KVTIER_OK: it will be reported once, also if copies fail on the way.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_submit(kvtier_copier* copier, const kvtier_batch* batch, kvtier_error* error);

// Makes work enqueued on `stream` from now on wait for waves 0 .. `wave` of an open ticket. KVTIER_COPY_FAILED: they
// were not all enqueued, and `stream` waits for what was.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_wait_layer(kvtier_copier* copier, uint64_t ticket, uint32_t wave,
                                                  uint64_t stream, kvtier_error* error);

// The tickets whose copies have all run, loads first, each direction in the order of submission.
KVTIER_CUDA_EXPORT int32_t kvtier_cuda_poll(kvtier_copier* copier, kvtier_report* out, size_t capacity, size_t* num_out,
                                            kvtier_error* error);

KVTIER_CUDA_EXPORT int32_t kvtier_cuda_counts(kvtier_copier* copier, kvtier_counts* out, kvtier_error* error);

#ifdef __cplusplus
}
#endif
#endif
