// What every test of csrc needs: a layout of scenario S12 with guards, host slots, a copier, and checks that count.
#ifndef KVTIER_RIG_H
#define KVTIER_RIG_H

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvtier_cuda.h"
#include "double.h"

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);      \
            _Exit(1);                                                                      \
        }                                                                                  \
    } while (0)

struct Test {
    const char* name;
    void (*run)();
};
inline std::vector<Test>& all_tests() {
    static std::vector<Test> tests;
    return tests;
}
struct Registered {
    Registered(const char* name, void (*run)()) { all_tests().push_back({name, run}); }
};
#define TEST(name)                                 \
    void name();                                   \
    const Registered registered_##name{#name, name}; \
    void name()

constexpr uint64_t kBlocks = 16, kChunk = 16384;
using Pairs = std::vector<std::pair<uint32_t, uint32_t>>;

struct Fragment {
    uint64_t offset, stride, bytes;
};
struct Layout {
    const char* name;
    std::vector<Fragment> fragments;
};

inline std::vector<Layout> layouts() {
    std::vector<Layout> all = {
        {"block first", {{64, 1024, 1024}}},
        {"block first, whole pages", {{64, 4096, 4096}}},
        {"keys and values first", {{64, 320, 320}, {64 + 16 * 320, 320, 320}}},
        {"padded", {{64, 640, 576}}},
        {"three layers", {{64, 512, 512}, {9000, 512, 512}, {18000, 512, 512}}},
        {"odd address", {{64 + 4093, 192, 192}, {64 + 4093 + 16 * 192, 192, 192}}},
        {"odd sizes", {{67, 341, 333}, {9001, 1237, 1001}, {30011, 8, 1}}},
        {"longer than a unit", {{48, 20011, 20001}}},
        {"sixteen heads", {}},
    };
    for (uint64_t i = 0; i < 16; ++i) all.back().fragments.push_back({64 + i * 512, 32, 32});
    return all;
}

const Pairs kStores = {{0, 5}, {1, 6}, {2, 7}, {9, 1}, {4, 4}, {10, 8}, {11, 9}};
const Pairs kLoads = {{5, 12}, {6, 3}, {7, 4}, {1, 0}, {4, 9}, {8, 13}, {9, 14}};  // slots to GPU blocks
const uint32_t kPaths[] = {KVTIER_MERGED, KVTIER_BATCH, KVTIER_KERNEL, KVTIER_GATHER};

// Pieces of a list of pairs, as the planner makes them: runs times fragments; one wave per fragment or one for all.
struct Planned {
    std::vector<kvtier_piece> pieces;
    std::vector<kvtier_group> groups;
    kvtier_batch batch = {};

    kvtier_batch* get() {
        batch.pieces = pieces.data();
        batch.groups = groups.data();
        batch.num_pieces = static_cast<uint32_t>(pieces.size());
        batch.num_groups = static_cast<uint32_t>(groups.size());
        return &batch;
    }
};

struct Rig {
    Layout layout;
    uint64_t block_bytes = 0, slot_bytes = 0, gpu_bytes = 0, cpu_bytes = 0;
    char *gpu = nullptr, *cpu = nullptr;
    kvtier_copier* copier = nullptr;
    cudaStream_t compute = nullptr;
    kvtier_error error = {};
    uint64_t last_ticket = 0;
    bool registered;

    explicit Rig(const Layout& its, uint64_t staging_bytes = 1 << 20, bool registers = true)
        : layout(its), registered(registers) {
        for (const Fragment& it : layout.fragments) {
            block_bytes += it.bytes;
            gpu_bytes = std::max(gpu_bytes, it.offset + kBlocks * it.stride + 64);
        }
        slot_bytes = (block_bytes + 4095) / 4096 * 4096;
        cpu_bytes = kBlocks * slot_bytes;
        gpu = static_cast<char*>(cuda_double::device_memory(gpu_bytes));
        cpu = static_cast<char*>(aligned_alloc(4096, cpu_bytes));
        for (uint64_t i = 0; i < gpu_bytes; ++i) gpu[i] = static_cast<char>(i * 7 + i / 256 * 31 + i / 65536);
        for (uint64_t i = 0; i < cpu_bytes; ++i) cpu[i] = static_cast<char>(i * 11 + i / 4096 * 5 + 3);
        // Chunks of whole slots, so that no row crosses a border; the runs of the tests are cut accordingly.
        if (registered) CHECK(kvtier_cuda_register_host(0, at(cpu), cpu_bytes, chunk_bytes(), &error) == KVTIER_OK);
        kvtier_options options = {0, registered, staging_bytes};
        CHECK(kvtier_cuda_open(&options, &copier, &error) == KVTIER_OK);
        compute = cuda_double::new_stream();
    }
    ~Rig() {
        if (copier != nullptr) CHECK(kvtier_cuda_close(copier, 5000, &error) == KVTIER_OK);
        cuda_double::end_stream(compute);
        if (registered) kvtier_cuda_unregister_host(0, at(cpu), cpu_bytes, chunk_bytes(), &error);
        cuda_double::free_device_memory(gpu);
        free(cpu);
    }
    Rig(const Rig&) = delete;

    static uint64_t at(const void* address) { return reinterpret_cast<uint64_t>(address); }
    uint64_t chunk_bytes() const { return 8 * slot_bytes; }

    uint64_t mark() {
        uint64_t id = 0;
        CHECK(kvtier_cuda_mark(copier, at(compute), &id, &error) == KVTIER_OK);
        return id;
    }

    Planned plan(uint32_t direction, const Pairs& pairs, uint32_t path, bool wave_per_fragment = false) {
        Planned planned;
        const bool load = direction == KVTIER_LOAD;
        struct Run {
            uint64_t source, destination, blocks;
        };
        std::vector<Run> runs;
        std::map<uint32_t, uint32_t> sorted;
        for (auto [source, destination] : pairs) sorted[destination] = source;
        for (auto [destination, source] : sorted) {
            const uint64_t slot = load ? source : destination;
            if (!runs.empty() && runs.back().source + runs.back().blocks == source &&
                runs.back().destination + runs.back().blocks == destination && slot % 8 != 0)
                ++runs.back().blocks;
            else
                runs.push_back({source, destination, 1});
        }
        const uint32_t num_waves = wave_per_fragment ? static_cast<uint32_t>(layout.fragments.size()) : 1;
        const auto add = [&](const Run& run, size_t index, uint64_t offset) {
            const Fragment& it = layout.fragments[index];
            const uint64_t gpu_block = load ? run.destination : run.source, slot = load ? run.source : run.destination;
            const uint64_t on_gpu = at(gpu) + it.offset + gpu_block * it.stride;
            const uint64_t on_cpu = at(cpu) + slot * slot_bytes + offset;
            planned.pieces.push_back(load ? kvtier_piece{on_cpu, on_gpu, slot_bytes, it.stride, it.bytes, run.blocks}
                                          : kvtier_piece{on_gpu, on_cpu, it.stride, slot_bytes, it.bytes, run.blocks});
        };
        if (wave_per_fragment) {
            uint64_t offset = 0;
            for (uint32_t index = 0; index < num_waves; ++index) {
                const auto first = static_cast<uint32_t>(planned.pieces.size());
                for (const Run& run : runs) add(run, index, offset);
                offset += layout.fragments[index].bytes;
                planned.groups.push_back({path, index, first, static_cast<uint32_t>(runs.size()), {}});
            }
        } else {
            for (const Run& run : runs) {
                const auto first = static_cast<uint32_t>(planned.pieces.size());
                uint64_t offset = 0;
                for (size_t index = 0; index < layout.fragments.size(); offset += layout.fragments[index++].bytes)
                    add(run, index, offset);
                const kvtier_piece span = {0, at(cpu) + run.destination * slot_bytes, 0, slot_bytes, block_bytes,
                                           run.blocks};
                planned.groups.push_back({path, 0, first, static_cast<uint32_t>(layout.fragments.size()), span});
            }
        }
        planned.batch.ticket = ++last_ticket;
        planned.batch.num_waves = num_waves;
        planned.batch.direction = direction;
        return planned;
    }

    // Enqueues after what the compute stream has now.
    uint64_t submit(uint32_t direction, const Pairs& pairs, uint32_t path, bool wave_per_fragment = false) {
        Planned planned = plan(direction, pairs, path, wave_per_fragment);
        planned.batch.after_mark = mark();
        const int32_t status = kvtier_cuda_submit(copier, planned.get(), &error);
        if (status != KVTIER_OK) fprintf(stderr, "%s: %s\n", layout.name, error.text);
        CHECK(status == KVTIER_OK);
        return planned.batch.ticket;
    }

    std::vector<kvtier_report> poll() {
        kvtier_report reports[8];
        size_t num = 0;
        CHECK(kvtier_cuda_poll(copier, reports, 8, &num, &error) == KVTIER_OK);
        return {reports, reports + num};
    }
    // The next report, within ten seconds.
    kvtier_report wait() {
        for (int i = 0; i < 10000; ++i) {
            const auto reports = poll();
            CHECK(reports.size() <= 1);
            if (!reports.empty()) return reports[0];
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        CHECK(!"a report within ten seconds");
        return {};
    }
    kvtier_counts counts() {
        kvtier_counts out;
        CHECK(kvtier_cuda_counts(copier, &out, &error) == KVTIER_OK);
        return out;
    }

    // The fragments of a block on the GPU, one after the other.
    std::string on_gpu(uint32_t block) const {
        std::string bytes;
        for (const Fragment& it : layout.fragments) bytes.append(gpu + it.offset + block * it.stride, it.bytes);
        return bytes;
    }
    void set_gpu(std::string& memory, uint32_t block, const std::string& bytes) const {
        uint64_t offset = 0;
        for (const Fragment& it : layout.fragments) {
            memory.replace(it.offset + block * it.stride, it.bytes, bytes, offset, it.bytes);
            offset += it.bytes;
        }
    }
    std::string whole_gpu() const { return {gpu, gpu_bytes}; }
    std::string whole_cpu() const { return {cpu, cpu_bytes}; }
};

// Holds a stream until it is opened, as a slow kernel would.
struct Gate {
    std::atomic<bool> open{false};

    explicit Gate(cudaStream_t stream) {
        cuda_double::run_on(stream, [this] {
            while (!open) std::this_thread::yield();
        });
    }
};

#endif
