// Every rule of csrc's host side, driven through the double. One line per test; the first thing that is wrong ends it.
#include "../../csrc/copy_kernels.h"
#include "rig.h"

namespace cd = cuda_double;

namespace {

const Pairs kStores = {{0, 5}, {1, 6}, {2, 7}, {9, 1}, {4, 4}, {10, 8}, {11, 9}};
const Pairs kLoads = {{5, 12}, {6, 3}, {7, 4}, {1, 0}, {4, 9}, {8, 13}, {9, 14}};  // slots to GPU blocks
const uint32_t kPaths[] = {KVTIER_MERGED, KVTIER_BATCH, KVTIER_KERNEL, KVTIER_GATHER};

Layout layered() { return layouts()[4]; }
Layout padded() { return layouts()[3]; }

void stores_and_loads_are_exact(const Layout& layout, uint32_t path, uint64_t staging_bytes, bool waves) {
    Rig rig(layout, staging_bytes);
    std::string cpu = rig.whole_cpu(), gpu = rig.whole_gpu();
    for (auto [source, destination] : kStores)
        cpu.replace(destination * rig.slot_bytes, rig.block_bytes, rig.on_gpu(source));
    const uint32_t store_path = waves && path == KVTIER_GATHER ? static_cast<uint32_t>(KVTIER_MERGED) : path;
    CHECK(rig.submit(KVTIER_STORE, kStores, store_path, waves) == 1);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.whole_cpu() == cpu);  // padding of slots and other slots included
    CHECK(rig.whole_gpu() == gpu);
    for (auto [source, destination] : kLoads)
        rig.set_gpu(gpu, destination, cpu.substr(source * rig.slot_bytes, rig.block_bytes));
    rig.submit(KVTIER_LOAD, kLoads, path, waves);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.whole_gpu() == gpu);  // guards and padding included
    CHECK(rig.whole_cpu() == cpu);
    CHECK(cd::broken_rule() == "");
}

void all_layouts_and_paths() {
    for (const Layout& layout : layouts())
        for (uint32_t path : kPaths)
            for (uint64_t staging_bytes : {0ull, 8192ull, 1ull << 20})
                for (bool waves : {false, true}) stores_and_loads_are_exact(layout, path, staging_bytes, waves);
}

void kernel_bodies_copy_any_span() {
    std::vector<char> from(1 << 16), to(1 << 16), expected(1 << 16);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 13 + i / 251);
    for (uint64_t source : {0, 1, 4, 8, 15, 16})
        for (uint64_t destination : {0, 1, 2, 4, 8, 12, 16, 31})
            for (uint64_t bytes : {1, 2, 15, 16, 17, 31, 511, 512, 2047, 2048, 8191, 8192, 8193, 20003})
                for (uint64_t rows : {1, 3}) {
                    std::fill(to.begin(), to.end(), 'g');
                    expected = to;
                    const uint64_t stride = bytes + 5;
                    if (source + rows * stride > from.size() || destination + rows * stride > to.size()) continue;
                    kvtier::KernelWork work = {};
                    const auto units = static_cast<uint32_t>((bytes + kvtier::kUnitBytes - 1) / kvtier::kUnitBytes);
                    work.num_pieces = 1;
                    work.num_units = units * static_cast<uint32_t>(rows);
                    work.pieces[0] = {Rig::at(from.data()) + source, Rig::at(to.data()) + destination, stride, stride,
                                      bytes, units, 0};
                    for (uint64_t row = 0; row < rows; ++row)
                        std::copy_n(from.begin() + source + row * stride, bytes,
                                    expected.begin() + destination + row * stride);
                    for (uint32_t warp = 0; warp < 3; ++warp)
                        for (uint32_t lane = 0; lane < 32; ++lane) kvtier::copy_units(work, warp, 3, lane);
                    CHECK(to == expected);
                }
}

void paths_are_what_was_asked_for() {
    {
        Rig rig(layered());
        rig.submit(KVTIER_STORE, kStores, KVTIER_GATHER);
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.counts().num_kernels == 4 && rig.counts().num_copies == 4);  // a run, a kernel, a copy
        rig.submit(KVTIER_LOAD, kLoads, KVTIER_KERNEL, true);
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.counts().num_kernels == 7 && rig.counts().num_copies == 4);  // a kernel per wave
        rig.submit(KVTIER_LOAD, kLoads, KVTIER_BATCH, true);
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.counts().num_batch_copies == 3 && rig.counts().num_copies == 4);
        CHECK(rig.counts().num_replaced_groups == 0);
    }
    Rig rig(padded());
    rig.submit(KVTIER_LOAD, {{0, 0}, {1, 1}, {2, 2}, {5, 9}}, KVTIER_MERGED);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.counts().num_copies == 2);  // runs, not blocks, even across padding
}

void an_old_driver_gets_plain_copies() {
    cd::hide_batch_copy();
    kvtier_device device;
    CHECK(kvtier_cuda_probe(0, &device, nullptr) == KVTIER_OK && !device.has_batch_copy);
    stores_and_loads_are_exact(layered(), KVTIER_BATCH, 0, false);
    Rig rig(layered());
    rig.submit(KVTIER_STORE, kStores, KVTIER_BATCH);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.counts().num_batch_copies == 0 && rig.counts().num_replaced_groups == 4);
}

void a_batch_copy_that_is_not_supported_is_asked_once() {
    cd::refuse_batch_copy(801);
    Rig rig(layered());
    rig.submit(KVTIER_LOAD, kLoads, KVTIER_BATCH, true);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.counts().num_batch_copies == 1 && rig.counts().num_replaced_groups == 3);
}

void kernels_need_memory_they_can_reach() {
    for (bool registers : {true, false}) {
        cd::set_reads_host(!registers);
        Rig rig(layered(), 0, registers);
        rig.submit(KVTIER_LOAD, kLoads, KVTIER_KERNEL);
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.counts().num_kernels == 0 && rig.counts().num_replaced_groups > 0 && cd::broken_rule() == "");
    }
}

void a_store_waits_for_the_step_that_writes_its_source() {
    for (uint32_t path : kPaths) {
        Rig rig(layered());
        Gate gate(rig.compute);
        std::string later(rig.block_bytes, 'w');
        cd::run_on(rig.compute, [&] {
            std::string gpu = rig.whole_gpu();
            rig.set_gpu(gpu, 3, later);
            memcpy(rig.gpu, gpu.data(), gpu.size());
        });
        rig.submit(KVTIER_STORE, {{3, 2}}, path);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(rig.poll().empty());  // seen as finished before the stream has run: the third trap
        gate.open = true;
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.whole_cpu().substr(2 * rig.slot_bytes, rig.block_bytes) == later);
    }
}

void a_load_waits_for_the_last_reader_of_its_destination() {
    for (uint32_t path : kPaths) {
        Rig rig(layered());
        Gate gate(rig.compute);
        const std::string before = rig.on_gpu(3);
        std::string read;
        cd::run_on(rig.compute, [&] { read = rig.on_gpu(3); });
        rig.submit(KVTIER_LOAD, {{2, 3}}, path);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(rig.poll().empty());
        gate.open = true;
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(read == before && rig.on_gpu(3) != before);
    }
}

void a_load_does_not_wait_for_steps_after_its_mark() {
    Rig rig(layered());
    Planned planned = rig.plan(KVTIER_LOAD, {{2, 3}}, KVTIER_MERGED);
    planned.batch.after_mark = rig.mark();
    Gate gate(rig.compute);
    rig.mark();
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
    CHECK(rig.wait().error.status == KVTIER_OK);
    gate.open = true;
}

void a_later_step_overwrites_a_source_only_after_the_store() {
    for (int round = 0; round < 20; ++round) {
        Rig rig(layered());
        cd::set_max_delay_us(300);
        const std::string before = rig.on_gpu(3);
        const uint64_t ticket = rig.submit(KVTIER_STORE, {{3, 2}}, KVTIER_MERGED);
        CHECK(kvtier_cuda_wait_layer(rig.copier, ticket, 0, Rig::at(rig.compute), &rig.error) == KVTIER_OK);
        cd::run_on(rig.compute, [&] { memset(rig.gpu, 0, rig.gpu_bytes); });
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.whole_cpu().substr(2 * rig.slot_bytes, rig.block_bytes) == before);
        cd::drain(rig.compute);
    }
}

void a_layer_is_there_when_its_wave_is() {
    for (int round = 0; round < 20; ++round) {
        Rig rig(layered());
        cd::set_max_delay_us(200);
        const std::string slot = rig.whole_cpu().substr(2 * rig.slot_bytes, rig.block_bytes);
        const uint64_t ticket = rig.submit(KVTIER_LOAD, {{2, 3}}, KVTIER_MERGED, true);
        std::string seen;
        for (uint32_t layer = 0; layer < 3; ++layer) {
            CHECK(kvtier_cuda_wait_layer(rig.copier, ticket, layer, Rig::at(rig.compute), &rig.error) == KVTIER_OK);
            cd::run_on(rig.compute, [&, layer] {
                const Fragment& it = rig.layout.fragments[layer];
                seen.append(rig.gpu + it.offset + 3 * it.stride, it.bytes);
            });
        }
        cd::drain(rig.compute);
        CHECK(seen == slot);
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(kvtier_cuda_wait_layer(rig.copier, ticket, 0, 0, &rig.error) == KVTIER_UNKNOWN_TICKET);
    }
}

void stores_do_not_hold_up_loads() {
    Rig rig(layered());
    Gate gate(rig.compute);
    rig.submit(KVTIER_STORE, {{3, 2}}, KVTIER_MERGED);
    Planned planned = rig.plan(KVTIER_LOAD, {{5, 6}}, KVTIER_MERGED);
    cudaStream_t other = cd::new_stream();
    CHECK(kvtier_cuda_mark(rig.copier, Rig::at(other), &planned.batch.after_mark, &rig.error) == KVTIER_OK);
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
    CHECK(rig.wait().ticket == 2);
    gate.open = true;
    CHECK(rig.wait().ticket == 1);
    cudaStreamDestroy(other);
}

void a_failed_copy_fails_its_ticket_after_what_was_enqueued() {
    struct Case {
        const char* call;
        uint32_t direction, path;
    };
    for (const Case& it : {Case{"cudaMemcpyAsync", KVTIER_LOAD, KVTIER_MERGED},
                           Case{"cuMemcpyBatchAsync", KVTIER_LOAD, KVTIER_BATCH},
                           Case{"cudaLaunchKernel", KVTIER_LOAD, KVTIER_KERNEL},
                           Case{"cudaEventRecord", KVTIER_LOAD, KVTIER_MERGED},
                           Case{"cudaMemcpyAsync", KVTIER_STORE, KVTIER_GATHER}}) {
        Rig rig(layered());
        Gate gate(rig.compute);
        const bool load = it.direction == KVTIER_LOAD;
        Planned planned = rig.plan(it.direction, {{2, 3}, {7, 9}}, it.path, load);
        planned.batch.after_mark = rig.mark();
        cd::fail(it.call, cudaErrorInvalidValue, 1);
        CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        CHECK(rig.poll().empty());  // earlier copies of the ticket still wait: its blocks are not free yet
        if (load)
            CHECK(kvtier_cuda_wait_layer(rig.copier, 1, 2, Rig::at(rig.compute), &rig.error) == KVTIER_COPY_FAILED);
        gate.open = true;
        const kvtier_report report = rig.wait();
        CHECK(report.error.status == KVTIER_COPY_FAILED && report.error.cuda_code == cudaErrorInvalidValue);
        CHECK(strstr(report.error.text, it.call) && strstr(report.error.text, "text of the double"));
        CHECK(rig.counts().num_failed_tickets == 1);
        rig.submit(it.direction, {{2, 3}, {7, 9}}, it.path, load);  // the copier is as good as new
        CHECK(rig.wait().error.status == KVTIER_OK);
    }
}

void what_is_short_refuses_before_anything_is_enqueued() {
    Rig rig(layered());
    const std::string gpu = rig.whole_gpu();
    for (const char* call : {"cudaEventCreateWithFlags", "cudaStreamWaitEvent"}) {
        Planned planned = rig.plan(KVTIER_LOAD, kLoads, KVTIER_MERGED, true);
        planned.batch.after_mark = rig.mark();
        const bool waits = strcmp(call, "cudaStreamWaitEvent") == 0;
        cd::fail(call, cudaErrorMemoryAllocation, waits ? 0 : 1);
        CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_NO_MEMORY);
        CHECK(rig.counts().num_open_tickets == 0 && rig.counts().num_copies == 0);
        CHECK(rig.whole_gpu() == gpu);
    }
}

void opening_survives_what_is_short() {
    const size_t streams = cd::num_live_streams();
    cd::fail("cudaStreamCreateWithFlags", cudaErrorMemoryAllocation, 1);
    kvtier_copier* copier = nullptr;
    kvtier_error error;
    const kvtier_options options = {0, 1, 1 << 20};
    CHECK(kvtier_cuda_open(&options, &copier, &error) == KVTIER_NO_MEMORY && copier == nullptr);
    CHECK(cd::num_live_streams() == streams);
    cd::fail("cudaMalloc", cudaErrorMemoryAllocation);
    Rig rig(layered());
    CHECK(rig.counts().staging_bytes == 0);
    rig.submit(KVTIER_STORE, kStores, KVTIER_GATHER);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.counts().num_replaced_groups == 4);
}

void a_registration_that_fails_leaves_nothing_registered() {
    void* const memory = aligned_alloc(4096, 8 * 4096);
    kvtier_error error;
    for (int skip = 0; skip < 4; ++skip) {
        cd::fail("cudaHostRegister", cudaErrorMemoryAllocation, skip);
        CHECK(kvtier_cuda_register_host(0, Rig::at(memory), 7 * 4096, 2 * 4096, &error) == KVTIER_NO_MEMORY);
        CHECK(strstr(error.text, "cudaHostRegister") && cd::num_registered() == 0);
    }
    CHECK(kvtier_cuda_register_host(0, Rig::at(memory), 7 * 4096, 2 * 4096, &error) == KVTIER_OK);
    CHECK(cd::num_registered() == 4);
    CHECK(kvtier_cuda_unregister_host(0, Rig::at(memory), 7 * 4096, 2 * 4096, &error) == KVTIER_OK);
    CHECK(cd::num_registered() == 0);
    CHECK(kvtier_cuda_register_host(0, Rig::at(memory) + 8, 4096, 4096, &error) == KVTIER_BAD_ARGUMENT);
    free(memory);
}

void a_lost_device_fails_every_ticket_and_takes_no_more() {
    Rig rig(layered());
    Gate gate(rig.compute);
    rig.submit(KVTIER_LOAD, kLoads, KVTIER_MERGED);
    rig.submit(KVTIER_STORE, {{3, 2}}, KVTIER_MERGED);
    cd::lose_device(cudaErrorLaunchFailure);
    gate.open = true;
    const auto reports = rig.poll();
    CHECK(reports.size() == 2);
    for (const kvtier_report& it : reports) CHECK(it.error.status == KVTIER_DEVICE_LOST && it.error.cuda_code == 719);
    uint64_t mark;
    CHECK(kvtier_cuda_mark(rig.copier, 0, &mark, &rig.error) == KVTIER_DEVICE_LOST);
    Planned planned = rig.plan(KVTIER_LOAD, kLoads, KVTIER_MERGED);
    planned.batch.after_mark = 1;
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_DEVICE_LOST);
    CHECK(strstr(rig.error.text, "text of the double") && rig.poll().empty());
    cd::drain(rig.compute);
}

void a_machine_without_cuda_says_why() {
    kvtier_device device;
    kvtier_error error;
    cd::set_num_devices(0);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_NO_DEVICE && error.cuda_code == cudaErrorNoDevice);
    cd::set_num_devices(1);
    CHECK(kvtier_cuda_probe(1, &device, &error) == KVTIER_NO_DEVICE && strstr(error.text, "device = 1"));
    cd::fail("cudaGetDeviceCount", cudaErrorInsufficientDriver);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_NO_DEVICE && error.cuda_code == 35);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_OK && strcmp(device.name, "the double") == 0);
}

void marks_are_bounded_and_captures_refused() {
    Rig rig(layered());
    uint64_t mark = 0;
    Gate gate(rig.compute);
    for (int i = 0; i < 64; ++i) rig.mark();
    CHECK(kvtier_cuda_mark(rig.copier, Rig::at(rig.compute), &mark, &rig.error) == KVTIER_BUSY);
    gate.open = true;
    cd::drain(rig.compute);
    CHECK(rig.mark() == 65);
    Planned planned = rig.plan(KVTIER_LOAD, {{1, 1}}, KVTIER_MERGED);
    planned.batch.after_mark = 1;  // out of the ring, hence finished
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
    cd::set_capturing(true);
    CHECK(kvtier_cuda_mark(rig.copier, Rig::at(rig.compute), &mark, &rig.error) == KVTIER_BAD_ARGUMENT);
    CHECK(kvtier_cuda_wait_layer(rig.copier, 1, 0, Rig::at(rig.compute), &rig.error) == KVTIER_BAD_ARGUMENT);
    CHECK(rig.wait().ticket == 1);
}

void bad_batches_are_refused() {
    Rig rig(layered());
    const uint64_t mark = rig.mark();
    const auto refused = [&](void (*spoil)(Planned&)) {
        Planned planned = rig.plan(KVTIER_STORE, kStores, KVTIER_GATHER);
        planned.batch.after_mark = mark;
        planned.get();
        spoil(planned);
        CHECK(kvtier_cuda_submit(rig.copier, &planned.batch, &rig.error) == KVTIER_BAD_ARGUMENT && rig.error.text[0]);
    };
    refused([](Planned& it) { it.batch.after_mark = 0; });  // a copy that waits for no step
    refused([](Planned& it) { it.batch.after_mark = 2; });
    refused([](Planned& it) { it.batch.direction = 2; });
    refused([](Planned& it) { it.batch.num_waves = 0; });
    refused([](Planned& it) { it.batch.num_waves = KVTIER_MAX_WAVES + 1; });
    refused([](Planned& it) { it.batch.pieces = nullptr; });
    refused([](Planned& it) { it.pieces[1].row_bytes = 0; });
    refused([](Planned& it) { it.pieces[2].source_stride = 1, it.pieces[2].num_rows = 2; });
    refused([](Planned& it) { it.groups[0].path = 4; });
    refused([](Planned& it) { it.groups[1].wave = 1; });
    refused([](Planned& it) { it.groups[1].num_pieces = UINT32_MAX; });
    refused([](Planned& it) { it.groups[1].span.destination += 1; });
    refused([](Planned& it) { it.groups[1].span.row_bytes -= 1; });
    CHECK(kvtier_cuda_submit(nullptr, nullptr, &rig.error) == KVTIER_BAD_ARGUMENT);
    Gate gate(rig.compute);
    rig.submit(KVTIER_STORE, {{0, 0}}, KVTIER_MERGED);
    Planned again = rig.plan(KVTIER_STORE, {{1, 1}}, KVTIER_MERGED);
    again.batch.ticket = rig.last_ticket - 1;
    again.batch.after_mark = mark;
    CHECK(kvtier_cuda_submit(rig.copier, again.get(), &rig.error) == KVTIER_BAD_ARGUMENT);
    gate.open = true;
    CHECK(rig.wait().error.status == KVTIER_OK);
}

void closing_waits_with_a_bound() {
    Rig rig(layered());
    Gate gate(rig.compute);
    rig.submit(KVTIER_STORE, {{3, 2}}, KVTIER_MERGED);
    CHECK(kvtier_cuda_close(rig.copier, 20, &rig.error) == KVTIER_BUSY);
    gate.open = true;
    CHECK(rig.wait().error.status == KVTIER_OK);
}

// Random plans with every path and random delays, while a second thread polls and a third asks for counts.
void random_plans_from_several_threads() {
    srand(1);
    for (int round = 0; round < 6; ++round) {
        Rig rig(layouts()[static_cast<size_t>(rand()) % layouts().size()]);
        cd::set_max_delay_us(60);
        std::atomic<int> reported{0}, failed{0};
        std::atomic<bool> done{false};
        std::thread polls([&] {
            while (!done) {
                kvtier_report reports[4];
                kvtier_error error;
                size_t num = 0;
                CHECK(kvtier_cuda_poll(rig.copier, reports, 4, &num, &error) == KVTIER_OK);
                for (size_t i = 0; i < num; ++i) failed += reports[i].error.status != KVTIER_OK;
                reported += static_cast<int>(num);
                std::this_thread::yield();
            }
        });
        std::thread counts([&] {
            kvtier_counts out;
            while (!done) CHECK(kvtier_cuda_counts(rig.copier, &out, nullptr) == KVTIER_OK);
        });
        std::string cpu = rig.whole_cpu(), gpu = rig.whole_gpu();
        for (int step = 1; step <= 40; ++step) {
            const bool load = rand() % 2;
            Pairs pairs;
            const auto shift = static_cast<uint32_t>(rand() % 16), length = static_cast<uint32_t>(1 + rand() % 10);
            for (uint32_t i = 0; i < length; ++i) pairs.push_back({i, (i + shift) % 16});
            for (auto [source, destination] : pairs) {
                if (load) {
                    rig.set_gpu(gpu, destination, cpu.substr(source * rig.slot_bytes, rig.block_bytes));
                    continue;
                }
                uint64_t offset = destination * rig.slot_bytes;
                for (const Fragment& it : rig.layout.fragments) {
                    cpu.replace(offset, it.bytes, gpu, it.offset + source * it.stride, it.bytes);
                    offset += it.bytes;
                }
            }
            rig.submit(load ? KVTIER_LOAD : KVTIER_STORE, pairs, static_cast<uint32_t>(rand()) % 4);
            for (int i = 0; reported < step; ++i) {  // the next plan may need these blocks
                CHECK(i < 100000);
                std::this_thread::sleep_for(std::chrono::microseconds(100));
            }
        }
        done = true;
        polls.join();
        counts.join();
        CHECK(failed == 0 && rig.whole_gpu() == gpu && rig.whole_cpu() == cpu && cd::broken_rule() == "");
    }
}

#define TEST(name) {#name, name}
const std::pair<const char*, void (*)()> kTests[] = {
    TEST(all_layouts_and_paths),
    TEST(kernel_bodies_copy_any_span),
    TEST(paths_are_what_was_asked_for),
    TEST(an_old_driver_gets_plain_copies),
    TEST(a_batch_copy_that_is_not_supported_is_asked_once),
    TEST(kernels_need_memory_they_can_reach),
    TEST(a_store_waits_for_the_step_that_writes_its_source),
    TEST(a_load_waits_for_the_last_reader_of_its_destination),
    TEST(a_load_does_not_wait_for_steps_after_its_mark),
    TEST(a_later_step_overwrites_a_source_only_after_the_store),
    TEST(a_layer_is_there_when_its_wave_is),
    TEST(stores_do_not_hold_up_loads),
    TEST(a_failed_copy_fails_its_ticket_after_what_was_enqueued),
    TEST(what_is_short_refuses_before_anything_is_enqueued),
    TEST(opening_survives_what_is_short),
    TEST(a_registration_that_fails_leaves_nothing_registered),
    TEST(a_lost_device_fails_every_ticket_and_takes_no_more),
    TEST(a_machine_without_cuda_says_why),
    TEST(marks_are_bounded_and_captures_refused),
    TEST(bad_batches_are_refused),
    TEST(closing_waits_with_a_bound),
    TEST(random_plans_from_several_threads),
};

}  // namespace

int main(int argc, char** argv) {
    int num_run = 0;
    for (const auto& [name, test] : kTests) {
        if (argc > 1 && strstr(name, argv[1]) == nullptr) continue;
        printf("%s\n", name);
        fflush(stdout);
        cd::reset();
        test();
        CHECK(cd::num_live_events() == 0);
        ++num_run;
    }
    printf("%d passed\n", num_run);
    return num_run == 0;
}
