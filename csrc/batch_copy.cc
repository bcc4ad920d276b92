// The four ways to enqueue the copies of a group.
#include <cstdint>

#include "copier.h"
#include "copy_kernels.h"

namespace kvtier {
namespace {

// What pitches of a two-dimensional copy may be at most, on every device.
constexpr uint64_t kMaxPitch = (1ull << 31) - 1;
constexpr size_t kMaxBatchRows = 4096;
// cuMemcpyBatchAsync may say so of a stream or memory that only the plain copies support.
constexpr int kDriverNotSupported = 801;

struct Group {
    kvtier_copier& copier;
    const kvtier_batch& batch;
    const kvtier_group& group;
    cudaStream_t stream;
    const char** call;

    const kvtier_piece* begin() const { return batch.pieces + group.first_piece; }
    const kvtier_piece* end() const { return begin() + group.num_pieces; }
};

bool is_flat(const kvtier_piece& piece) {
    return piece.num_rows == 1 ||
           (piece.source_stride == piece.row_bytes && piece.destination_stride == piece.row_bytes);
}

cudaError_t copy_piece(const Group& it, const kvtier_piece& piece) {
    const cudaMemcpyKind kind = it.batch.direction == KVTIER_LOAD ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    void* const to = reinterpret_cast<void*>(piece.destination);
    const void* const from = reinterpret_cast<const void*>(piece.source);
    if (is_flat(piece)) {
        *it.call = "cudaMemcpyAsync";
        ++it.copier.counts.num_copies;
        return cudaMemcpyAsync(to, from, piece.row_bytes * piece.num_rows, kind, it.stream);
    }
    if (piece.source_stride <= kMaxPitch && piece.destination_stride <= kMaxPitch) {
        *it.call = "cudaMemcpy2DAsync";
        ++it.copier.counts.num_copies;
        return cudaMemcpy2DAsync(to, piece.destination_stride, from, piece.source_stride, piece.row_bytes,
                                 piece.num_rows, kind, it.stream);
    }
    kvtier_piece row = piece;
    row.num_rows = 1;
    for (uint64_t i = 0; i < piece.num_rows; ++i) {
        if (cudaError_t code = copy_piece(it, row)) return code;
        row.source += piece.source_stride;
        row.destination += piece.destination_stride;
    }
    return cudaSuccess;
}

cudaError_t copy_merged(const Group& it) {
    for (const kvtier_piece& piece : it)
        if (cudaError_t code = copy_piece(it, piece)) return code;
    return cudaSuccess;
}

cudaError_t replace_by_merged(const Group& it) {
    ++it.copier.counts.num_replaced_groups;
    return copy_merged(it);
}

struct Rows {
    std::vector<unsigned long long> destinations, sources;
    std::vector<size_t> sizes;
};

int flush(const Group& it, Rows& rows) {
    if (rows.sizes.empty()) return 0;
    BatchCopyAttributes attributes = {};
    attributes.source_access_order = kSourceInStreamOrder;
    size_t first = 0, fail_index = 0;
    const int code = it.copier.batch_copy(rows.destinations.data(), rows.sources.data(), rows.sizes.data(),
                                          rows.sizes.size(), &attributes, &first, 1, &fail_index, it.stream);
    ++it.copier.counts.num_batch_copies;
    it.copier.counts.num_batched_rows += rows.sizes.size();
    rows = {};
    return code;
}

cudaError_t copy_batched(const Group& it) {
    if (it.copier.batch_copy == nullptr) return replace_by_merged(it);
    Rows rows;
    int code = 0;
    for (const kvtier_piece& piece : it) {
        const bool flat = is_flat(piece);
        for (uint64_t row = 0; row < (flat ? 1 : piece.num_rows) && code == 0; ++row) {
            rows.destinations.push_back(piece.destination + row * piece.destination_stride);
            rows.sources.push_back(piece.source + row * piece.source_stride);
            rows.sizes.push_back(flat ? piece.row_bytes * piece.num_rows : piece.row_bytes);
            if (rows.sizes.size() == kMaxBatchRows) code = flush(it, rows);
        }
    }
    if (code == 0) code = flush(it, rows);
    if (code == kDriverNotSupported) {
        it.copier.batch_copy = nullptr;  // not asked again
        return replace_by_merged(it);    // rows that were enqueued are copied twice, to the same bytes
    }
    *it.call = "cuMemcpyBatchAsync";
    return static_cast<cudaError_t>(code);  // the driver's numbers are those of the runtime
}

// Collects pieces for the kernel and launches it whenever its argument is full.
struct KernelQueue {
    const Group& it;
    KernelWork work = {};

    cudaError_t add(const kvtier_piece& piece) {
        const bool flat = is_flat(piece);
        const uint64_t row_bytes = flat ? piece.row_bytes * piece.num_rows : piece.row_bytes;
        const uint64_t num_rows = flat ? 1 : piece.num_rows;
        const uint64_t units_per_row = (row_bytes + kUnitBytes - 1) / kUnitBytes;
        if (units_per_row > UINT32_MAX / 2 || num_rows > UINT32_MAX / 2 / units_per_row) return cudaErrorInvalidValue;
        const uint64_t num_units = units_per_row * num_rows;
        if (work.num_pieces == kMaxKernelPieces || work.num_units + num_units > UINT32_MAX / 2)
            if (cudaError_t code = launch()) return code;
        work.pieces[work.num_pieces++] = {piece.source,
                                          piece.destination,
                                          piece.source_stride,
                                          piece.destination_stride,
                                          row_bytes,
                                          static_cast<uint32_t>(units_per_row),
                                          work.num_units};
        work.num_units += static_cast<uint32_t>(num_units);
        return cudaSuccess;
    }

    cudaError_t launch() {
        if (work.num_pieces == 0) return cudaSuccess;
        *it.call = "cudaLaunchKernel";
        ++it.copier.counts.num_kernels;
        const cudaError_t code = launch_copy(work, it.stream);
        work.num_pieces = work.num_units = 0;
        return code;
    }
};

cudaError_t copy_by_kernel(const Group& it) {
    if (it.batch.direction != KVTIER_LOAD || !it.copier.kernels_read_host) return replace_by_merged(it);
    KernelQueue queue = {it};
    for (const kvtier_piece& piece : it)
        if (cudaError_t code = queue.add(piece)) return code;
    return queue.launch();
}

// The staging memory mirrors the span, gaps included, a window of rows at a time. One stream runs it all in order, so
// a window may reuse the memory of the one before.
cudaError_t copy_gathered(const Group& it) {
    const kvtier_piece& span = it.group.span;
    const uint64_t pitch = span.destination_stride;
    const uint64_t staging_bytes = it.copier.counts.staging_bytes;
    const uint64_t window = pitch == 0 ? 0 : staging_bytes / pitch;
    if (it.batch.direction != KVTIER_STORE || window == 0 || pitch > kMaxPitch) return replace_by_merged(it);
    const uint64_t staging = reinterpret_cast<uint64_t>(it.copier.staging);
    for (uint64_t row = 0; row < span.num_rows; row += window) {
        const uint64_t num_rows = span.num_rows - row < window ? span.num_rows - row : window;
        KernelQueue queue = {it};
        for (kvtier_piece piece : it) {
            piece.source += row * piece.source_stride;
            piece.destination = staging + (piece.destination - span.destination);
            piece.num_rows = num_rows;
            if (cudaError_t code = queue.add(piece)) return code;
        }
        if (cudaError_t code = queue.launch()) return code;
        kvtier_piece rows = span;
        rows.source = staging;
        rows.source_stride = pitch;
        rows.destination += row * pitch;
        rows.num_rows = num_rows;
        if (cudaError_t code = copy_piece(it, rows)) return code;
    }
    return cudaSuccess;
}

}  // namespace

cudaError_t copy_group(kvtier_copier& copier, const kvtier_batch& batch, const kvtier_group& group, const char** call) {
    const Group it = {copier, batch, group, copier.streams[batch.direction], call};
    switch (group.path) {
        case KVTIER_BATCH: return copy_batched(it);
        case KVTIER_KERNEL: return copy_by_kernel(it);
        case KVTIER_GATHER: return copy_gathered(it);
        default: return copy_merged(it);
    }
}

}  // namespace kvtier
