// The copy kernel: its argument, its body, which also compiles for the host, and how to launch it.
#ifndef KVTIER_COPY_KERNELS_H
#define KVTIER_COPY_KERNELS_H

#include <cuda_runtime_api.h>

#include <cstdint>

#ifdef __CUDACC__
#define KVTIER_BOTH_SIDES __host__ __device__ __forceinline__
#else
#define KVTIER_BOTH_SIDES inline
#endif

namespace kvtier {

constexpr uint32_t kWarpLanes = 32;
constexpr uint32_t kThreadsPerCta = 512;
// A few CTAs saturate the link; more would only take processors away from the model.
constexpr uint32_t kMaxCtas = 12;
// Portions that warps take: small enough that all have one, large enough that finding it costs nothing.
constexpr uint32_t kUnitBytes = 8192;
// By value, within the 4 KiB that every device takes as arguments: no descriptor has to be copied ahead.
constexpr uint32_t kMaxKernelPieces = 84;

struct KernelPiece {
    uint64_t source;
    uint64_t destination;
    uint64_t source_stride;
    uint64_t destination_stride;
    uint64_t row_bytes;
    uint32_t units_per_row;
    uint32_t first_unit;  // number of units of all pieces before
};

struct KernelWork {
    uint32_t num_pieces;
    uint32_t num_units;
    KernelPiece pieces[kMaxKernelPieces];
};
static_assert(sizeof(KernelWork) <= 4096, "the kernel's argument must fit every device");

struct alignas(16) Bytes16 {
    uint64_t low, high;
};

// `bytes` bytes by the lanes of one warp, in words of W. Both addresses are multiples of sizeof(W) or W is one byte.
template <class W>
KVTIER_BOTH_SIDES void copy_words(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t lane) {
    W* const to = reinterpret_cast<W*>(destination);
    const W* const from = reinterpret_cast<const W*>(source);
    const uint64_t num_words = bytes / sizeof(W);
    uint64_t i = lane;
    // Four loads before the first store: reads over the link take a microsecond each, and have to overlap.
    for (; i + 3 * kWarpLanes < num_words; i += 4 * kWarpLanes) {
        const W a = from[i], b = from[i + kWarpLanes], c = from[i + 2 * kWarpLanes], d = from[i + 3 * kWarpLanes];
        to[i] = a;
        to[i + kWarpLanes] = b;
        to[i + 2 * kWarpLanes] = c;
        to[i + 3 * kWarpLanes] = d;
    }
    for (; i < num_words; i += kWarpLanes) to[i] = from[i];
}

template <class W>
KVTIER_BOTH_SIDES void copy_aligned(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t lane) {
    uint64_t head = (0 - destination) & (sizeof(W) - 1);
    if (head > bytes) head = bytes;
    const uint64_t body = (bytes - head) / sizeof(W) * sizeof(W);
    copy_words<uint8_t>(destination, source, head, lane);
    copy_words<W>(destination + head, source + head, body, lane);
    copy_words<uint8_t>(destination + head + body, source + head + body, bytes - head - body, lane);
}

// The widest words that both addresses can be read and written in.
KVTIER_BOTH_SIDES void copy_span(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t lane) {
    const uint64_t difference = destination ^ source;
    if ((difference & 15) == 0) return copy_aligned<Bytes16>(destination, source, bytes, lane);
    if ((difference & 7) == 0) return copy_aligned<uint64_t>(destination, source, bytes, lane);
    if ((difference & 3) == 0) return copy_aligned<uint32_t>(destination, source, bytes, lane);
    copy_words<uint8_t>(destination, source, bytes, lane);
}

// What one lane of one warp does. Units of a warp rise, so the piece is found by going forward only.
KVTIER_BOTH_SIDES void copy_units(const KernelWork& work, uint32_t warp, uint32_t num_warps, uint32_t lane) {
    uint32_t piece = 0;
    for (uint32_t unit = warp; unit < work.num_units; unit += num_warps) {
        while (piece + 1 < work.num_pieces && work.pieces[piece + 1].first_unit <= unit) ++piece;
        const KernelPiece& it = work.pieces[piece];
        const uint32_t index = unit - it.first_unit;
        const uint64_t row = index / it.units_per_row;
        const uint64_t offset = static_cast<uint64_t>(index % it.units_per_row) * kUnitBytes;
        const uint64_t left = it.row_bytes - offset;
        copy_span(it.destination + row * it.destination_stride + offset, it.source + row * it.source_stride + offset,
                  left < kUnitBytes ? left : kUnitBytes, lane);
    }
}

// Loads the kernel now: at the first launch CUDA might wait for the device to do so. An error: the device cannot run
// it.
cudaError_t load_copy_kernel();
cudaError_t launch_copy(const KernelWork& work, cudaStream_t stream);

}  // namespace kvtier
#endif
