// The state of the double: streams as threads, events as flags, one lock for everything.
#ifndef KVTIER_WORLD_H
#define KVTIER_WORLD_H

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "double.h"

struct Failure {
    cudaError_t code;
    int skip;
};

struct World {
    std::mutex mutex;
    std::condition_variable changed;
    std::multimap<std::string, Failure> failures;
    std::map<uint64_t, size_t> device_ranges, host_ranges;
    std::set<cudaStream_t> streams;  // those that the library has made, as the events and the memory
    std::set<cudaEvent_t> events;
    std::set<void*> memory;
    std::string rule;
    std::atomic<cudaError_t> lost{cudaSuccess};
    bool has_batch_copy = true, reads_host = true, capturing = false;
    int batch_copy_code = 0, num_devices = 1, driver_version = 13000;
    size_t num_host_waits = 0;
    std::atomic<unsigned> max_delay_us{0}, library_delay_us{0};
    bool was_reset = false, kernel_is_loaded = false;

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
};

// What the double itself allocates does not count for `fail_allocation`.
struct Uncounted {
    Uncounted();
    ~Uncounted();
};

// Never destroyed: the default stream's thread outlives `main`.
inline World& world() {
    static World& the = *new World;
    return the;
}

struct Recording {
    bool done = false;
};

struct CUevent_st {
    std::shared_ptr<Recording> last;
    bool dead = false;
};

struct CUstream_st {
    std::deque<std::function<void()>> work;
    const bool of_library;
    bool busy = false, ending = false, dead = false;
    std::thread thread;

    explicit CUstream_st(bool of_library_ = false) : of_library(of_library_), thread([this] { run(); }) {}

    void run() {
        std::mt19937 random(reinterpret_cast<uintptr_t>(this) >> 4);
        std::unique_lock<std::mutex> lock(world().mutex);
        for (;;) {
            world().changed.wait(lock, [this] { return ending || !work.empty(); });
            if (work.empty()) return;
            auto next = std::move(work.front());
            work.pop_front();
            if (dead) continue;
            busy = true;
            lock.unlock();
            const unsigned fixed = of_library ? world().library_delay_us.load() : 0, limit = world().max_delay_us;
            const unsigned delay = fixed > 0 ? fixed : limit > 0 ? random() % limit : 0;
            if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
            next();
            next = nullptr;
            lock.lock();
            busy = false;
            world().changed.notify_all();
        }
    }

    bool idle() const { return work.empty() && !busy; }

    // Called with the lock.
    void push(std::function<void()> body) {
        work.push_back(std::move(body));
        world().changed.notify_all();
    }

    // Without the lock: runs what it has, then ends.
    void end() {
        {
            std::lock_guard<std::mutex> lock(world().mutex);
            ending = true;
            world().changed.notify_all();
        }
        thread.join();
        delete this;
    }
};

inline cudaStream_t stream_of(cudaStream_t stream) {
    static CUstream_st* const default_stream = new CUstream_st;  // as long as the process
    return stream == nullptr ? default_stream : stream;
}

inline bool inside(const std::map<uint64_t, size_t>& ranges, uint64_t address, uint64_t bytes) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return false;
    --after;
    return address + bytes <= after->first + after->second;
}

inline bool meets(const std::map<uint64_t, size_t>& ranges, uint64_t address, uint64_t bytes) {
    for (const auto& [start, size] : ranges)
        if (address < start + size && start < address + bytes) return true;
    return false;
}

inline void move_bytes(uint64_t to, uint64_t from, uint64_t bytes) {
    if (world().lost == cudaSuccess)
        memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

#endif
