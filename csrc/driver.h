// cuMemcpyBatchAsync, looked up at run time: drivers that do not have it still load this library.
#ifndef KVTIER_DRIVER_H
#define KVTIER_DRIVER_H

#include <cuda_runtime_api.h>

#ifdef KVTIER_COMPARE_WITH_DRIVER
#include <cuda.h>

#include <cstddef>
#endif

namespace kvtier {

// CUmemcpyAttributes of the driver; `make build-cuda` compares the two.
struct BatchCopyAttributes {
    int source_access_order;
    int source_location[2];       // type and id: hints for managed memory, which ours is not
    int destination_location[2];
    unsigned flags;
};

#ifdef KVTIER_COMPARE_WITH_DRIVER
static_assert(sizeof(BatchCopyAttributes) == sizeof(CUmemcpyAttributes) &&
                  offsetof(BatchCopyAttributes, source_access_order) == offsetof(CUmemcpyAttributes, srcAccessOrder) &&
                  offsetof(BatchCopyAttributes, source_location) == offsetof(CUmemcpyAttributes, srcLocHint) &&
                  offsetof(BatchCopyAttributes, destination_location) == offsetof(CUmemcpyAttributes, dstLocHint) &&
                  offsetof(BatchCopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags),
              "the driver's structure");
static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1, "the driver's number");
#endif

// CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order. The only one that is right for a store, whose
// source is written by a step that may still be in the queue: with ANY the driver may read it before that. A load's
// source is written by nobody while its ticket is open, but its bytes come from a store that another stream ran, and
// there is no figure yet that a looser order would gain anything.
constexpr int kSourceInStreamOrder = 1;

// The form of version 12.8: 13.0 dropped `fail_index`, and the driver keeps both under their versions.
using BatchCopy = int (*)(unsigned long long* destinations, unsigned long long* sources, size_t* sizes, size_t count,
                          BatchCopyAttributes* attributes, size_t* attribute_indices, size_t num_attributes,
                          size_t* fail_index, cudaStream_t stream);

// NULL where the driver has no such function.
inline BatchCopy find_batch_copy() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &function, 12080, cudaEnableDefault, &found);
    if (code != cudaSuccess) cudaGetLastError();
    if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
    return reinterpret_cast<BatchCopy>(function);
}

}  // namespace kvtier
#endif
