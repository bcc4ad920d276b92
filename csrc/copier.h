// The state of a copier: two streams, the tickets open on each, marks, events to use again.
#ifndef KVTIER_COPIER_H
#define KVTIER_COPIER_H

#include <deque>
#include <mutex>
#include <vector>

#include "driver.h"
#include "status.h"

namespace kvtier {

constexpr uint64_t kNumMarks = 64;

struct OpenTicket {
    uint64_t ticket;
    std::vector<cudaEvent_t> waves;  // one event per wave, made before the first copy is enqueued
    uint32_t num_recorded;           // events recorded, the last one also after a failure
    bool end_is_recorded;            // false: CUDA refused even that, and only an idle stream proves the end
    kvtier_error error;
};

struct Mark {
    uint64_t id;  // 0: not used yet
    cudaEvent_t event;
};

}  // namespace kvtier

struct kvtier_copier {
    std::mutex mutex;
    int device = 0;
    bool kernels_read_host = false;
    cudaStream_t streams[2] = {};  // by direction: loads and stores never wait for each other
    std::deque<kvtier::OpenTicket> open[2];
    std::vector<cudaEvent_t> free_events;
    kvtier::Mark marks[kvtier::kNumMarks] = {};
    uint64_t last_mark = 0;
    kvtier::BatchCopy batch_copy = nullptr;
    char* staging = nullptr;
    kvtier_counts counts = {};
    kvtier_error lost = {};  // status KVTIER_OK while the device is well
};

namespace kvtier {

// Enqueues a group on its direction's stream. After an error some of its copies may be enqueued.
cudaError_t copy_group(kvtier_copier& copier, const kvtier_batch& batch, const kvtier_group& group, const char** call);

// Under the copier's lock, on its device, with the thread's own device back afterwards.
template <class Body>
inline int32_t on_copier(kvtier_copier* copier, kvtier_error* error, Body body) noexcept {
    return guarded(error, [&]() -> int32_t {
        if (copier == nullptr) return fail(error, KVTIER_BAD_ARGUMENT, 0, "copier = NULL");
        std::lock_guard<std::mutex> lock(copier->mutex);
        DeviceScope scope(copier->device);
        if (scope.code() != cudaSuccess && !is_lost(scope.code()))
            return cuda_fail(error, scope.code(), "cudaSetDevice");
        return body();
    });
}

inline int32_t refuse_if_lost(const kvtier_copier& copier, kvtier_error* error) {
    if (copier.lost.status != KVTIER_OK && error != nullptr) *error = copier.lost;
    return copier.lost.status;
}

// As cuda_fail; remembers the end of the device.
inline int32_t note(kvtier_copier& copier, kvtier_error* error, cudaError_t code, const char* call) {
    kvtier_error own;
    cuda_fail(&own, code, call);
    if (own.status == KVTIER_DEVICE_LOST && copier.lost.status == KVTIER_OK) copier.lost = own;
    if (error != nullptr) *error = own;
    return own.status;
}

// The same for a call on the copier's own streams and events: that CUDA does not know them means that somebody has
// reset the device, and with it the context they were made in.
inline int32_t note_own(kvtier_copier& copier, kvtier_error* error, cudaError_t code, const char* call) {
    const int32_t status = note(copier, error, code, call);
    if (code != cudaErrorInvalidResourceHandle) return status;
    if (copier.lost.status == KVTIER_OK) {
        cuda_fail(&copier.lost, code, call);
        copier.lost.status = KVTIER_DEVICE_LOST;
    }
    if (error != nullptr) *error = copier.lost;
    return KVTIER_DEVICE_LOST;
}

inline int32_t refuse_capture(kvtier_copier& copier, cudaStream_t stream, kvtier_error* error) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaError_t code = cudaStreamIsCapturing(stream, &capture))
        return note(copier, error, code, "cudaStreamIsCapturing");
    if (capture == cudaStreamCaptureStatusNone) return KVTIER_OK;
    // The copy stream would be drawn into the graph, and the graph's replay would wait for a copy long gone.
    return fail(error, KVTIER_BAD_ARGUMENT, 0, "the stream is capturing a graph: call this outside of the capture");
}

inline int32_t new_event(kvtier_copier& copier, cudaEvent_t* out, kvtier_error* error) {
    if (!copier.free_events.empty()) {
        *out = copier.free_events.back();
        copier.free_events.pop_back();
        return KVTIER_OK;
    }
    const cudaError_t code = cudaEventCreateWithFlags(out, cudaEventDisableTiming);
    if (code != cudaSuccess) return note(copier, error, code, "cudaEventCreateWithFlags");
    return KVTIER_OK;
}

// `release_events` must not fail: room for what is given back is made when events are taken.
inline void release_events(kvtier_copier& copier, OpenTicket& ticket) {
    for (cudaEvent_t event : ticket.waves) copier.free_events.push_back(event);
    ticket.waves.clear();
}

}  // namespace kvtier
#endif
