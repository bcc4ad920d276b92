// Bytes are where they belong, whatever the layout and the path; and the path is the one that was asked for.
#include "copy_kernels.h"
#include "rig.h"

namespace cd = cuda_double;

namespace {

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

TEST(all_layouts_and_paths) {
    for (const Layout& layout : layouts())
        for (uint32_t path : kPaths)
            for (uint64_t staging_bytes : {0ull, 8192ull, 1ull << 20})
                for (bool waves : {false, true}) stores_and_loads_are_exact(layout, path, staging_bytes, waves);
}

TEST(kernel_bodies_copy_any_span) {
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

TEST(paths_are_what_was_asked_for) {
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

// The 85th piece does not fit into the argument of the kernel before.
TEST(many_pieces_take_several_kernels) {
    Pairs loads;
    for (uint32_t i = 0; i < 16; ++i) loads.push_back({15 - i, i});  // no two of them a run
    Rig rig(layouts().back());
    const std::string cpu = rig.whole_cpu();
    std::string gpu = rig.whole_gpu();
    for (auto [source, destination] : loads)
        rig.set_gpu(gpu, destination, cpu.substr(source * rig.slot_bytes, rig.block_bytes));
    rig.submit(KVTIER_LOAD, loads, KVTIER_KERNEL, true);
    CHECK(rig.wait().error.status == KVTIER_OK && rig.whole_gpu() == gpu);
    CHECK(rig.counts().num_kernels == 16);  // a wave is never joined with the next
    Planned planned = rig.plan(KVTIER_LOAD, loads, KVTIER_KERNEL);
    const auto num_pieces = static_cast<uint32_t>(planned.pieces.size());
    CHECK(num_pieces == 256);
    planned.groups = {{KVTIER_KERNEL, 0, 0, num_pieces, {}}};
    planned.batch.after_mark = rig.mark();
    memset(rig.gpu, 0, rig.gpu_bytes);
    gpu.assign(rig.gpu_bytes, 0);
    for (auto [source, destination] : loads)
        rig.set_gpu(gpu, destination, cpu.substr(source * rig.slot_bytes, rig.block_bytes));
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
    CHECK(rig.wait().error.status == KVTIER_OK && rig.whole_gpu() == gpu);
    CHECK(rig.counts().num_kernels == 16 + 4);  // 84 + 84 + 84 + 4
}

// The double refuses a launch of more than twelve CTAs; this one has work for sixteen.
TEST(a_kernel_takes_few_processors) {
    Rig rig({"large", {{64, 131072 + 512, 131072}}});
    Planned planned = rig.plan(KVTIER_LOAD, {{0, 0}}, KVTIER_KERNEL);
    planned.pieces[0].num_rows = 16;
    planned.batch.after_mark = rig.mark();
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
    CHECK(rig.wait().error.status == KVTIER_OK && cd::broken_rule() == "");
    for (uint32_t block = 0; block < kBlocks; ++block)
        CHECK(rig.on_gpu(block) == rig.whole_cpu().substr(block * rig.slot_bytes, rig.block_bytes));
}

TEST(an_old_driver_gets_plain_copies) {
    cd::hide_batch_copy();
    kvtier_device device;
    CHECK(kvtier_cuda_probe(0, &device, nullptr) == KVTIER_OK && !device.has_batch_copy);
    stores_and_loads_are_exact(layered(), KVTIER_BATCH, 0, false);
    Rig rig(layered());
    rig.submit(KVTIER_STORE, kStores, KVTIER_BATCH);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.counts().num_batch_copies == 0 && rig.counts().num_replaced_groups == 4);
}

TEST(a_batch_copy_that_is_not_supported_is_asked_once) {
    cd::refuse_batch_copy(801);
    Rig rig(layered());
    rig.submit(KVTIER_LOAD, kLoads, KVTIER_BATCH, true);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.counts().num_batch_copies == 1 && rig.counts().num_replaced_groups == 3);
}

TEST(a_device_that_cannot_run_the_kernel_gets_plain_copies) {
    cd::fail("cudaFuncGetAttributes", cudaErrorNoKernelImageForDevice);
    Rig rig(layered());
    rig.submit(KVTIER_LOAD, kLoads, KVTIER_KERNEL, true);
    CHECK(rig.wait().error.status == KVTIER_OK);
    rig.submit(KVTIER_STORE, kStores, KVTIER_GATHER);
    CHECK(rig.wait().error.status == KVTIER_OK);
    CHECK(rig.counts().num_kernels == 0 && rig.counts().num_replaced_groups == 3 + 4);
}

TEST(kernels_need_memory_they_can_reach) {
    for (bool registers : {true, false}) {
        cd::set_reads_host(!registers);
        Rig rig(layered(), 0, registers);
        rig.submit(KVTIER_LOAD, kLoads, KVTIER_KERNEL);
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.counts().num_kernels == 0 && rig.counts().num_replaced_groups > 0 && cd::broken_rule() == "");
    }
}

// Random plans with every path and random delays, while a second thread polls and a third asks for counts.
TEST(random_plans_from_several_threads) {
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

}  // namespace
