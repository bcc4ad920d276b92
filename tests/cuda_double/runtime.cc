// CUDA's runtime calls on plain memory. Copies check what CUDA would check.
#include "copy_kernels.h"
#include "driver.h"
#include "world.h"

namespace kvtier {
void copy_kernel(const KernelWork& work, uint32_t num_ctas);
}

namespace {

thread_local int current_device = 0;

// Called with the lock. Host memory need not be registered, but then the whole copy must be outside of what is.
cudaError_t check_sides(uint64_t to, uint64_t from, uint64_t bytes, bool to_device) {
    const uint64_t device = to_device ? to : from, host = to_device ? from : to;
    if (!inside(world().device_ranges, device, bytes)) {
        world().broke("a copy's device side is not in device memory");
        return cudaErrorInvalidValue;
    }
    if (meets(world().host_ranges, host, bytes) && !inside(world().host_ranges, host, bytes)) {
        world().broke("a copy crosses the border of a registered range");
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

// Called with the lock. CUDA goes through memory of its own for what is not registered, and makes the caller wait.
void wait_if_unregistered(std::unique_lock<std::mutex>& lock, uint64_t host, uint64_t bytes, cudaStream_t stream) {
    if (inside(world().host_ranges, host, bytes)) return;
    ++world().num_host_waits;
    world().changed.wait(lock, [&] { return stream->idle() || stream->dead || world().lost != cudaSuccess; });
}

int batch_copy(unsigned long long* destinations, unsigned long long* sources, size_t* sizes, size_t count,
               kvtier::BatchCopyAttributes* attributes, size_t* indices, size_t num_attributes, size_t* fail_index,
               cudaStream_t stream) {
    const Uncounted uncounted;
    std::unique_lock<std::mutex> lock(world().mutex);
    if (cudaError_t code = world().enter("cuMemcpyBatchAsync")) return code;
    if (stream->dead) return cudaErrorInvalidResourceHandle;
    if (world().batch_copy_code != 0) return world().batch_copy_code;
    if (stream == nullptr || num_attributes != 1 || indices[0] != 0 || fail_index == nullptr) {
        world().broke("batch copy: arguments");
        return cudaErrorInvalidValue;
    }
    struct Row {
        uint64_t to, from;
        size_t bytes;
        std::shared_ptr<std::vector<char>> early;
    };
    std::vector<Row> rows;
    for (size_t i = 0; i < count; ++i) {
        const bool to_device = inside(world().device_ranges, destinations[i], sizes[i]);
        if (cudaError_t code = check_sides(destinations[i], sources[i], sizes[i], to_device)) return code;
        Row row = {destinations[i], sources[i], sizes[i], nullptr};
        // Any other order than that of the stream lets the driver read sources at once, so the double does.
        if (attributes->source_access_order != 1)
            row.early = std::make_shared<std::vector<char>>(reinterpret_cast<const char*>(sources[i]),
                                                            reinterpret_cast<const char*>(sources[i]) + sizes[i]);
        rows.push_back(row);
    }
    std::shuffle(rows.begin(), rows.end(), std::mt19937(static_cast<unsigned>(count)));
    stream_of(stream)->push([rows] {
        for (const Row& row : rows)
            move_bytes(row.to, row.early ? reinterpret_cast<uint64_t>(row.early->data()) : row.from, row.bytes);
    });
    for (const Row& row : rows) {
        const uint64_t host = inside(world().device_ranges, row.to, row.bytes) ? row.from : row.to;
        wait_if_unregistered(lock, host, row.bytes, stream);
    }
    return 0;
}

}  // namespace

int cuda_double::current_device() { return ::current_device; }

#define KVTIER_ENTER(name)                            \
    const Uncounted uncounted;                        \
    std::unique_lock<std::mutex> lock(world().mutex); \
    if (cudaError_t code = world().enter(#name)) return code
#define KVTIER_KNOWN(handle) \
    if ((handle) != nullptr && (handle)->dead) return cudaErrorInvalidResourceHandle

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "text of the double"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheDouble"; }
cudaError_t cudaGetDevice(int* device) {
    KVTIER_ENTER(cudaGetDevice);
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    KVTIER_ENTER(cudaSetDevice);
    if (device < 0 || device >= world().num_devices) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    KVTIER_ENTER(cudaDriverGetVersion);
    *version = world().driver_version;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    KVTIER_ENTER(cudaRuntimeGetVersion);
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    KVTIER_ENTER(cudaGetDeviceCount);
    if (world().driver_version < 13000) return cudaErrorInsufficientDriver;
    *count = world().num_devices;
    return world().num_devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
    KVTIER_ENTER(cudaDeviceGetAttribute);
    *value = name == cudaDevAttrHostNumaId ? 0 : world().reads_host;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
    KVTIER_ENTER(cudaGetDeviceProperties);
    strcpy(out->name, "the double");
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    KVTIER_ENTER(cudaGetDriverEntryPointByVersion);
    const bool has = world().has_batch_copy && strcmp(name, "cuMemcpyBatchAsync") == 0 && version == 12080;
    *found = has ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    *function = has ? reinterpret_cast<void*>(&batch_copy) : nullptr;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    thread_local cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
    std::swap(own, *mode);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    KVTIER_ENTER(cudaHostRegister);
    if (meets(world().host_ranges, reinterpret_cast<uint64_t>(address), bytes))
        return cudaErrorHostMemoryAlreadyRegistered;
    world().host_ranges[reinterpret_cast<uint64_t>(address)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
    KVTIER_ENTER(cudaHostUnregister);
    const bool known = world().host_ranges.erase(reinterpret_cast<uint64_t>(address)) == 1;
    return known ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaMalloc(void** out, size_t bytes) {
    {
        KVTIER_ENTER(cudaMalloc);
    }
    const Uncounted uncounted;
    *out = cuda_double::device_memory(bytes);
    world().memory.insert(*out);
    return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
    world().memory.erase(address);
    cuda_double::free_device_memory(address);  // the double's memory is the process's, lost device or not
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    KVTIER_ENTER(cudaStreamCreateWithFlags);
    if (flags != cudaStreamNonBlocking) world().broke("a copy stream that the default stream waits for");
    *out = *world().streams.insert(new CUstream_st(true)).first;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    {
        KVTIER_ENTER(cudaStreamDestroy);
        KVTIER_KNOWN(stream);
        world().streams.erase(stream);
    }
    stream->end();
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    KVTIER_ENTER(cudaStreamQuery);
    KVTIER_KNOWN(stream);
    return stream_of(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
    KVTIER_ENTER(cudaStreamIsCapturing);
    *out = world().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    KVTIER_ENTER(cudaStreamWaitEvent);
    KVTIER_KNOWN(stream);
    KVTIER_KNOWN(event);
    CUstream_st* const it = stream_of(stream);
    if (auto recording = event->last)
        it->push([recording, it] {
            std::unique_lock<std::mutex> wait(world().mutex);
            world().changed.wait(wait, [&] { return recording->done || it->dead || world().lost != cudaSuccess; });
        });
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    KVTIER_ENTER(cudaEventCreateWithFlags);
    if (flags != cudaEventDisableTiming) world().broke("an event with timing");
    *out = *world().events.insert(new CUevent_st).first;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    KVTIER_ENTER(cudaEventDestroy);
    KVTIER_KNOWN(event);
    world().events.erase(event);
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    KVTIER_ENTER(cudaEventRecord);
    KVTIER_KNOWN(stream);
    KVTIER_KNOWN(event);
    auto recording = event->last = std::make_shared<Recording>();
    stream_of(stream)->push([recording] {
        std::lock_guard<std::mutex> set(world().mutex);
        recording->done = true;
        world().changed.notify_all();
    });
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    KVTIER_ENTER(cudaEventQuery);
    KVTIER_KNOWN(event);
    return event->last == nullptr || event->last->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    KVTIER_ENTER(cudaMemcpyAsync);
    KVTIER_KNOWN(stream);
    const auto target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
    if (cudaError_t code = check_sides(target, source, bytes, kind == cudaMemcpyHostToDevice)) return code;
    stream_of(stream)->push([=] { move_bytes(target, source, bytes); });
    wait_if_unregistered(lock, kind == cudaMemcpyHostToDevice ? source : target, bytes, stream_of(stream));
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t row_bytes,
                              size_t num_rows, cudaMemcpyKind kind, cudaStream_t stream) {
    KVTIER_ENTER(cudaMemcpy2DAsync);
    KVTIER_KNOWN(stream);
    const auto target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
    if (row_bytes > to_pitch || row_bytes > from_pitch || to_pitch >= 1ull << 31 || from_pitch >= 1ull << 31) {
        world().broke("a pitch");
        return cudaErrorInvalidValue;
    }
    for (size_t row = 0; row < num_rows; ++row)
        if (cudaError_t code = check_sides(target + row * to_pitch, source + row * from_pitch, row_bytes,
                                           kind == cudaMemcpyHostToDevice))
            return code;
    stream_of(stream)->push([=] {
        for (size_t row = 0; row < num_rows; ++row)
            move_bytes(target + row * to_pitch, source + row * from_pitch, row_bytes);
    });
    wait_if_unregistered(lock, kind == cudaMemcpyHostToDevice ? source : target, row_bytes, stream_of(stream));
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void* kernel) {
    KVTIER_ENTER(cudaFuncGetAttributes);
    if (kernel != reinterpret_cast<const void*>(&kvtier::copy_kernel)) return cudaErrorInvalidValue;
    world().kernel_is_loaded = true;
    *out = {48};
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t, cudaStream_t stream) {
    KVTIER_ENTER(cudaLaunchKernel);
    KVTIER_KNOWN(stream);
    if (kernel != reinterpret_cast<const void*>(&kvtier::copy_kernel) || grid.x == 0 || grid.x > 12 || block.x != 512)
        world().broke("a launch");
    if (!world().kernel_is_loaded) world().broke("a first launch, which may wait for the device");
    const auto work = std::make_shared<kvtier::KernelWork>(*static_cast<kvtier::KernelWork*>(arguments[0]));
    for (uint32_t i = 0; i < work->num_pieces; ++i) {
        const kvtier::KernelPiece& it = work->pieces[i];
        const uint32_t end = i + 1 < work->num_pieces ? work->pieces[i + 1].first_unit : work->num_units;
        const uint64_t num_rows = (end - it.first_unit) / it.units_per_row;
        for (uint64_t row = 0; row < num_rows; ++row)
            for (uint64_t address : {it.source + row * it.source_stride, it.destination + row * it.destination_stride})
                if (!inside(world().device_ranges, address, it.row_bytes) &&
                    !inside(world().host_ranges, address, it.row_bytes)) {
                    world().broke("a kernel reaches for memory that is neither the device's nor registered");
                    return cudaErrorIllegalAddress;
                }
    }
    stream_of(stream)->push([work, grid] {
        if (world().lost == cudaSuccess) kvtier::copy_kernel(*work, grid.x);
    });
    return cudaSuccess;
}
