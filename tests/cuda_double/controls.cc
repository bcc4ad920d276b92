// The controls of the double.
#include <new>

#include "world.h"

namespace {

using Lock = std::unique_lock<std::mutex>;

// Takes away what the library has left: streams end, events and memory go.
void reap() {
    std::set<cudaStream_t> streams;
    {
        Lock lock(world().mutex);
        streams.swap(world().streams);
        for (cudaEvent_t event : world().events) delete event;
        world().events.clear();
    }
    for (cudaStream_t stream : streams) stream->end();
    while (!world().memory.empty()) cudaFree(*world().memory.begin());
}

}  // namespace

namespace {
thread_local int allocations_left = -1, uncounted = 0;
}

Uncounted::Uncounted() { ++uncounted; }
Uncounted::~Uncounted() { --uncounted; }

void* operator new(size_t bytes) {
    if (uncounted == 0 && allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
    if (void* const address = malloc(bytes)) return address;
    throw std::bad_alloc();
}
void operator delete(void* address) noexcept { free(address); }
void operator delete(void* address, size_t) noexcept { free(address); }

namespace cuda_double {

void fail_allocation(int skip) { allocations_left = skip; }
bool is_device_lost() { return world().lost != cudaSuccess || world().was_reset; }

void reset() {
    reap();
    Lock lock(world().mutex);
    world().failures.clear();
    world().host_ranges.clear();  // a lost device does not unregister
    world().rule.clear();
    world().lost = cudaSuccess;
    world().was_reset = world().kernel_is_loaded = false;
    allocations_left = -1;
    world().has_batch_copy = world().reads_host = true;
    world().capturing = false;
    world().batch_copy_code = 0;
    world().num_devices = 1;
    world().driver_version = 13000;
    world().num_host_waits = 0;
    world().max_delay_us = world().library_delay_us = 0;
}
void fail(const std::string& call, cudaError_t code, int skip) {
    Lock lock(world().mutex);
    world().failures.insert({call, {code, skip}});
}
void lose_device(cudaError_t code) {
    Lock lock(world().mutex);
    world().lost = code;
    world().changed.notify_all();
}
void reset_device() {
    Lock lock(world().mutex);
    world().was_reset = true;
    for (cudaEvent_t event : world().events) event->dead = true;
    for (cudaStream_t stream : world().streams) stream->dead = true;
    world().changed.notify_all();
}
void hide_batch_copy() { world().has_batch_copy = false; }
void refuse_batch_copy(int code) { world().batch_copy_code = code; }
void set_num_devices(int count) { world().num_devices = count; }
void set_driver_version(int version) { world().driver_version = version; }
void set_reads_host(bool reads) { world().reads_host = reads; }
void set_capturing(bool value) { world().capturing = value; }
void set_max_delay_us(unsigned delay) { world().max_delay_us = delay; }
void set_library_delay_us(unsigned delay) { world().library_delay_us = delay; }

void* device_memory(size_t bytes) {
    void* const address = aligned_alloc(256, (bytes + 255) / 256 * 256);
    adopt_device_memory(address, bytes);
    return address;
}
void free_device_memory(void* address) {
    disown_device_memory(address);
    free(address);
}
void adopt_device_memory(void* address, size_t bytes) {
    const auto start = reinterpret_cast<uint64_t>(address);
    Lock lock(world().mutex);
    auto& ranges = world().device_ranges;
    for (auto it = ranges.begin(); it != ranges.end();)  // what was there before is gone
        it = it->first < start + bytes && start < it->first + it->second ? ranges.erase(it) : std::next(it);
    ranges[start] = bytes;
}
void disown_device_memory(void* address) {
    Lock lock(world().mutex);
    world().device_ranges.erase(reinterpret_cast<uint64_t>(address));
}
cudaStream_t new_stream() {
    Lock lock(world().mutex);
    return new CUstream_st;
}
void end_stream(cudaStream_t stream) { stream->end(); }
void run_on(cudaStream_t stream, std::function<void()> body) {
    Lock lock(world().mutex);
    stream_of(stream)->push(std::move(body));
}
void drain(cudaStream_t stream) {
    Lock lock(world().mutex);
    world().changed.wait(lock, [&] { return stream_of(stream)->idle(); });
}
size_t num_live_events() { return world().events.size(); }
size_t num_live_streams() { return world().streams.size(); }
size_t num_registered() { return world().host_ranges.size(); }
size_t registered_bytes() {
    size_t bytes = 0;
    for (const auto& [start, size] : world().host_ranges) bytes += size;
    return bytes;
}
size_t num_host_waits() {
    Lock lock(world().mutex);
    return world().num_host_waits;
}
std::string broken_rule() {
    Lock lock(world().mutex);
    return world().rule;
}

}  // namespace cuda_double
