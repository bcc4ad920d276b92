// Opening and closing a copier, and marks. No call but `close` waits for the device.
#include "copier.h"

#include "copy_kernels.h"

#include <chrono>
#include <memory>
#include <thread>

using namespace kvtier;

namespace {

// The handles of a lost device are left alone: they are gone with their context, or good for nothing.
void destroy(kvtier_copier& copier) {
    if (copier.lost.status != KVTIER_OK) return;
    for (auto& open : copier.open)
        for (OpenTicket& ticket : open) release_events(copier, ticket);
    for (const Mark& mark : copier.marks)
        if (mark.event != nullptr) cudaEventDestroy(mark.event);
    for (cudaEvent_t event : copier.free_events) cudaEventDestroy(event);
    for (cudaStream_t stream : copier.streams)
        if (stream != nullptr) cudaStreamDestroy(stream);
    if (copier.staging != nullptr) cudaFree(copier.staging);
    cudaGetLastError();
}

}  // namespace

int32_t kvtier_cuda_open(const kvtier_options* options, kvtier_copier** out, kvtier_error* error) {
    return guarded(error, [&]() -> int32_t {
        if (options == nullptr || out == nullptr) return fail(error, KVTIER_BAD_ARGUMENT, 0, "options, out: NULL");
        *out = nullptr;
        kvtier_device device;
        if (int32_t status = kvtier_cuda_probe(options->device, &device, error)) return status;
        DeviceScope scope(options->device);
        if (scope.code() != cudaSuccess) return cuda_fail(error, scope.code(), "cudaSetDevice");
        auto copier = std::make_unique<kvtier_copier>();
        copier->device = options->device;
        const bool has_kernel = load_copy_kernel() == cudaSuccess;
        if (!has_kernel) cudaGetLastError();  // a device older than the kernel's code
        copier->kernels_read_host = has_kernel && options->host_registered != 0 && device.reads_host != 0;
        copier->batch_copy = find_batch_copy();
        for (cudaStream_t& stream : copier->streams) {
            // Non-blocking: copies and steps on the legacy default stream wait for each other by marks only.
            if (cudaError_t code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) {
                const int32_t status = cuda_fail(error, code, "cudaStreamCreateWithFlags");
                destroy(*copier);
                return status;
            }
        }
        if (options->staging_bytes > 0 && has_kernel) {
            const cudaError_t code = cudaMalloc(reinterpret_cast<void**>(&copier->staging), options->staging_bytes);
            if (code == cudaSuccess) {
                copier->counts.staging_bytes = options->staging_bytes;
            } else {
                copier->staging = nullptr;  // stores then go piece by piece
                cudaGetLastError();
            }
        }
        *out = copier.release();
        return KVTIER_OK;
    });
}

int32_t kvtier_cuda_mark(kvtier_copier* copier, uint64_t stream, uint64_t* mark, kvtier_error* error) {
    return on_copier(copier, error, [&]() -> int32_t {
        if (mark == nullptr) return fail(error, KVTIER_BAD_ARGUMENT, 0, "mark = NULL");
        if (int32_t status = refuse_if_lost(*copier, error)) return status;
        const auto handle = reinterpret_cast<cudaStream_t>(stream);
        if (int32_t status = refuse_capture(*copier, handle, error)) return status;
        const uint64_t id = copier->last_mark + 1;
        Mark& place = copier->marks[id % kNumMarks];
        if (place.event == nullptr) {
            if (int32_t status = new_event(*copier, &place.event, error)) return status;
        } else if (cudaError_t code = place.id == 0 ? cudaSuccess : cudaEventQuery(place.event)) {
            if (code != cudaErrorNotReady) return note_own(*copier, error, code, "cudaEventQuery");
            cudaGetLastError();
            return fail(error, KVTIER_BUSY, 0, "%llu marks are unfinished", static_cast<unsigned long long>(kNumMarks));
        }
        place.id = 0;  // should recording fail, nobody waits for the event of another mark
        if (cudaError_t code = cudaEventRecord(place.event, handle))
            return note(*copier, error, code, "cudaEventRecord");
        place.id = copier->last_mark = *mark = id;
        return KVTIER_OK;
    });
}

int32_t kvtier_cuda_counts(kvtier_copier* copier, kvtier_counts* out, kvtier_error* error) {
    return on_copier(copier, error, [&]() -> int32_t {
        if (out == nullptr) return fail(error, KVTIER_BAD_ARGUMENT, 0, "out = NULL");
        *out = copier->counts;
        out->num_open_tickets = copier->open[0].size() + copier->open[1].size();
        return KVTIER_OK;
    });
}

int32_t kvtier_cuda_close(kvtier_copier* copier, uint32_t timeout_ms, kvtier_error* error) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    for (;;) {
        bool idle = true;
        const int32_t status = on_copier(copier, error, [&]() -> int32_t {
            for (cudaStream_t stream : copier->streams) {
                if (copier->lost.status != KVTIER_OK) break;
                const cudaError_t code = cudaStreamQuery(stream);
                if (code == cudaErrorNotReady) cudaGetLastError();
                if (code != cudaSuccess && (code == cudaErrorNotReady ||
                                            note_own(*copier, nullptr, code, "cudaStreamQuery") != KVTIER_DEVICE_LOST))
                    idle = false;
            }
            if (idle) destroy(*copier);
            return KVTIER_OK;
        });
        if (status != KVTIER_OK) return status;
        if (idle) {
            delete copier;
            return KVTIER_OK;
        }
        if (std::chrono::steady_clock::now() >= end)
            return fail(error, KVTIER_BUSY, 0, "copies still run after %u ms", timeout_ms);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}
