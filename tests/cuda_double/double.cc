// A CUDA runtime on plain memory: streams are threads, events are flags, copies check what CUDA would check.
#include "double.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "../../csrc/copy_kernels.h"
#include "../../csrc/driver.h"

namespace kvtier {
void copy_kernel(const KernelWork& work, uint32_t num_ctas);
}

namespace {

// One lock for flags of all events: a double has to be right, not fast.
std::mutex world;
std::condition_variable changed;

struct Recording {
    bool done = false;
};

struct Failure {
    cudaError_t code;
    int skip;
};

std::multimap<std::string, Failure> failures;
std::map<uint64_t, size_t> device_ranges, host_ranges;
std::string rule;
std::atomic<cudaError_t> lost{cudaSuccess};
bool has_batch_copy = true, reads_host = true, capturing = false;
int batch_copy_code = 0, num_devices = 1;
std::atomic<unsigned> max_delay_us{0};
size_t events = 0, streams = 0;

bool inside(const std::map<uint64_t, size_t>& ranges, uint64_t address, uint64_t bytes) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return false;
    --after;
    return address + bytes <= after->first + after->second;
}

bool meets(const std::map<uint64_t, size_t>& ranges, uint64_t address, uint64_t bytes) {
    for (const auto& [start, size] : ranges)
        if (address < start + size && start < address + bytes) return true;
    return false;
}

void broke(const std::string& what) {
    if (rule.empty()) rule = what;
}

// Whether a call may go on. Called with the lock.
cudaError_t enter(const char* call) {
    if (lost != cudaSuccess) return lost;
    for (auto it = failures.lower_bound(call); it != failures.end() && it->first == call; ++it) {
        if (it->second.skip-- > 0) continue;
        const cudaError_t code = it->second.code;
        failures.erase(it);
        return code;
    }
    return cudaSuccess;
}

}  // namespace

struct CUstream_st {
    std::deque<std::function<void()>> work;
    bool busy = false, ending = false;
    std::thread thread;

    CUstream_st() : thread([this] { run(); }) { ++streams; }

    void run() {
        std::mt19937 random(reinterpret_cast<uintptr_t>(this) >> 4);
        std::unique_lock<std::mutex> lock(world);
        for (;;) {
            changed.wait(lock, [this] { return ending || !work.empty(); });
            if (work.empty()) return;
            auto next = std::move(work.front());
            work.pop_front();
            busy = true;
            lock.unlock();
            const unsigned limit = max_delay_us;
            if (limit > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % limit));
            next();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }

    bool idle() const { return work.empty() && !busy; }
};

struct CUevent_st {
    std::shared_ptr<Recording> last;
};

namespace {

CUstream_st* stream_of(cudaStream_t stream) {
    static CUstream_st* const default_stream = new CUstream_st;  // as long as the process
    return stream == nullptr ? default_stream : stream;
}

// Called with the lock.
void push(cudaStream_t stream, std::function<void()> body) {
    stream_of(stream)->work.push_back(std::move(body));
    changed.notify_all();
}

// Called with the lock. Host memory need not be registered, but then the whole copy must be outside of what is.
cudaError_t check_sides(uint64_t to, uint64_t from, uint64_t bytes, bool to_device) {
    const uint64_t device = to_device ? to : from, host = to_device ? from : to;
    if (!inside(device_ranges, device, bytes)) {
        broke("a copy's device side is not in device memory");
        return cudaErrorInvalidValue;
    }
    if (meets(host_ranges, host, bytes) && !inside(host_ranges, host, bytes)) {
        broke("a copy crosses the border of a registered range");
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

void move_bytes(uint64_t to, uint64_t from, uint64_t bytes) {
    if (lost == cudaSuccess) memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

int batch_copy(unsigned long long* destinations, unsigned long long* sources, size_t* sizes, size_t count,
               kvtier::BatchCopyAttributes* attributes, size_t* indices, size_t num_attributes, size_t* fail_index,
               cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(world);
    if (cudaError_t code = enter("cuMemcpyBatchAsync")) return code;
    if (batch_copy_code != 0) return batch_copy_code;
    if (stream == nullptr || num_attributes != 1 || indices[0] != 0 || fail_index == nullptr) {
        broke("batch copy: arguments");
        return cudaErrorInvalidValue;
    }
    struct Row {
        uint64_t to, from;
        size_t bytes;
        std::shared_ptr<std::vector<char>> early;
    };
    std::vector<Row> rows;
    for (size_t i = 0; i < count; ++i) {
        const bool to_device = inside(device_ranges, destinations[i], sizes[i]);
        if (cudaError_t code = check_sides(destinations[i], sources[i], sizes[i], to_device)) return code;
        Row row = {destinations[i], sources[i], sizes[i], nullptr};
        // Any other order than that of the stream lets the driver read sources at once, so the double does.
        if (attributes->source_access_order != 1)
            row.early = std::make_shared<std::vector<char>>(reinterpret_cast<const char*>(sources[i]),
                                                            reinterpret_cast<const char*>(sources[i]) + sizes[i]);
        rows.push_back(row);
    }
    std::shuffle(rows.begin(), rows.end(), std::mt19937(static_cast<unsigned>(count)));
    push(stream, [rows] {
        for (const Row& row : rows)
            move_bytes(row.to, row.early ? reinterpret_cast<uint64_t>(row.early->data()) : row.from, row.bytes);
    });
    return 0;
}

}  // namespace

namespace cuda_double {

void reset() {
    std::lock_guard<std::mutex> lock(world);
    failures.clear();
    host_ranges.clear();  // a lost device does not unregister
    rule.clear();
    lost = cudaSuccess;
    has_batch_copy = reads_host = true;
    capturing = false;
    batch_copy_code = 0;
    num_devices = 1;
    max_delay_us = 0;
}
void fail(const std::string& call, cudaError_t code, int skip) {
    std::lock_guard<std::mutex> lock(world);
    failures.insert({call, {code, skip}});
}
void lose_device(cudaError_t code) {
    std::lock_guard<std::mutex> lock(world);
    lost = code;
    changed.notify_all();
}
void hide_batch_copy() { has_batch_copy = false; }
void refuse_batch_copy(int code) { batch_copy_code = code; }
void set_num_devices(int count) { num_devices = count; }
void set_reads_host(bool reads) { reads_host = reads; }
void set_capturing(bool value) { capturing = value; }
void set_max_delay_us(unsigned delay) { max_delay_us = delay; }

void* device_memory(size_t bytes) {
    void* const address = aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::lock_guard<std::mutex> lock(world);
    device_ranges[reinterpret_cast<uint64_t>(address)] = bytes;
    return address;
}
void free_device_memory(void* address) {
    {
        std::lock_guard<std::mutex> lock(world);
        device_ranges.erase(reinterpret_cast<uint64_t>(address));
    }
    free(address);
}
cudaStream_t new_stream() {
    std::lock_guard<std::mutex> lock(world);
    return new CUstream_st;
}
void run_on(cudaStream_t stream, std::function<void()> body) {
    std::lock_guard<std::mutex> lock(world);
    push(stream, std::move(body));
}
void drain(cudaStream_t stream) {
    std::unique_lock<std::mutex> lock(world);
    changed.wait(lock, [&] { return stream_of(stream)->idle(); });
}
size_t num_live_events() { return events; }
size_t num_live_streams() { return streams; }
size_t num_registered() { return host_ranges.size(); }
std::string broken_rule() {
    std::lock_guard<std::mutex> lock(world);
    return rule;
}

}  // namespace cuda_double

#define KVTIER_ENTER(name)                     \
    std::unique_lock<std::mutex> lock(world);  \
    if (cudaError_t code = enter(#name)) return code

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "text of the double"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheDouble"; }
cudaError_t cudaGetDevice(int* device) {
    KVTIER_ENTER(cudaGetDevice);
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    KVTIER_ENTER(cudaSetDevice);
    return device < num_devices ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaDriverGetVersion(int* version) {
    KVTIER_ENTER(cudaDriverGetVersion);
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaGetDeviceCount(int* count) {
    KVTIER_ENTER(cudaGetDeviceCount);
    *count = num_devices;
    return num_devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
    KVTIER_ENTER(cudaDeviceGetAttribute);
    *value = name == cudaDevAttrHostNumaId ? 0 : reads_host;
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
    const bool has = has_batch_copy && strcmp(name, "cuMemcpyBatchAsync") == 0 && version == 12080;
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
    if (meets(host_ranges, reinterpret_cast<uint64_t>(address), bytes)) return cudaErrorHostMemoryAlreadyRegistered;
    host_ranges[reinterpret_cast<uint64_t>(address)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
    KVTIER_ENTER(cudaHostUnregister);
    return host_ranges.erase(reinterpret_cast<uint64_t>(address)) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaMalloc(void** out, size_t bytes) {
    {
        KVTIER_ENTER(cudaMalloc);
    }
    *out = cuda_double::device_memory(bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
    cuda_double::free_device_memory(address);  // the double's memory is the process's, lost device or not
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    KVTIER_ENTER(cudaStreamCreateWithFlags);
    if (flags != cudaStreamNonBlocking) broke("a copy stream that the default stream waits for");
    *out = new CUstream_st;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    {
        std::lock_guard<std::mutex> lock(world);
        stream->ending = true;
        --streams;
        changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    KVTIER_ENTER(cudaStreamQuery);
    return stream_of(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
    KVTIER_ENTER(cudaStreamIsCapturing);
    *out = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    KVTIER_ENTER(cudaStreamWaitEvent);
    if (auto recording = event->last)
        push(stream, [recording] {
            std::unique_lock<std::mutex> wait(world);
            changed.wait(wait, [&] { return recording->done || lost != cudaSuccess; });
        });
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    KVTIER_ENTER(cudaEventCreateWithFlags);
    if (flags != cudaEventDisableTiming) broke("an event with timing");
    *out = new CUevent_st;
    ++events;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(world);
    --events;
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    KVTIER_ENTER(cudaEventRecord);
    auto recording = event->last = std::make_shared<Recording>();
    push(stream, [recording] {
        std::lock_guard<std::mutex> set(world);
        recording->done = true;
        changed.notify_all();
    });
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    KVTIER_ENTER(cudaEventQuery);
    return event->last == nullptr || event->last->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    KVTIER_ENTER(cudaMemcpyAsync);
    const auto target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
    if (cudaError_t code = check_sides(target, source, bytes, kind == cudaMemcpyHostToDevice)) return code;
    push(stream, [=] { move_bytes(target, source, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t row_bytes,
                              size_t num_rows, cudaMemcpyKind kind, cudaStream_t stream) {
    KVTIER_ENTER(cudaMemcpy2DAsync);
    const auto target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
    if (row_bytes > to_pitch || row_bytes > from_pitch || to_pitch >= 1ull << 31 || from_pitch >= 1ull << 31) {
        broke("a pitch");
        return cudaErrorInvalidValue;
    }
    for (size_t row = 0; row < num_rows; ++row)
        if (cudaError_t code = check_sides(target + row * to_pitch, source + row * from_pitch, row_bytes,
                                           kind == cudaMemcpyHostToDevice))
            return code;
    push(stream, [=] {
        for (size_t row = 0; row < num_rows; ++row)
            move_bytes(target + row * to_pitch, source + row * from_pitch, row_bytes);
    });
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t, cudaStream_t stream) {
    KVTIER_ENTER(cudaLaunchKernel);
    if (kernel != reinterpret_cast<const void*>(&kvtier::copy_kernel) || grid.x == 0 || grid.x > 12 || block.x != 512)
        broke("a launch");
    const auto work = std::make_shared<kvtier::KernelWork>(*static_cast<kvtier::KernelWork*>(arguments[0]));
    for (uint32_t i = 0; i < work->num_pieces; ++i) {
        const kvtier::KernelPiece& it = work->pieces[i];
        for (uint64_t address : {it.source, it.destination})
            if (!inside(device_ranges, address, it.row_bytes) && !inside(host_ranges, address, it.row_bytes)) {
                broke("a kernel reaches for memory that is neither the device's nor registered");
                return cudaErrorIllegalAddress;
            }
    }
    push(stream, [work, grid] {
        if (lost == cudaSuccess) kvtier::copy_kernel(*work, grid.x);
    });
    return cudaSuccess;
}
