// What goes wrong costs a ticket at most, and is told.
#include "rig.h"

namespace cd = cuda_double;

namespace {

Layout layered() { return layouts()[4]; }

TEST(a_failed_copy_fails_its_ticket_after_what_was_enqueued) {
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
        const auto wave = [&](uint32_t which) {
            return kvtier_cuda_wait_layer(rig.copier, 1, which, Rig::at(rig.compute), &rig.error);
        };
        const bool first_is_whole = it.path == KVTIER_BATCH || it.path == KVTIER_KERNEL ||
                                    strcmp(it.call, "cudaEventRecord") == 0;  // the call is made once per wave
        if (load) CHECK(wave(0) == (first_is_whole ? KVTIER_OK : KVTIER_COPY_FAILED));
        if (load) CHECK(wave(1) == KVTIER_COPY_FAILED && wave(2) == KVTIER_COPY_FAILED);
        gate.open = true;
        const kvtier_report report = rig.wait();
        CHECK(report.error.status == KVTIER_COPY_FAILED && report.error.cuda_code == cudaErrorInvalidValue);
        CHECK(strstr(report.error.text, it.call) && strstr(report.error.text, "text of the double"));
        CHECK(rig.counts().num_failed_tickets == 1);
        rig.submit(it.direction, {{2, 3}, {7, 9}}, it.path, load);  // the copier is as good as new
        CHECK(rig.wait().error.status == KVTIER_OK);
    }
}

TEST(what_is_short_refuses_before_anything_is_enqueued) {
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

TEST(opening_survives_what_is_short) {
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

TEST(a_registration_that_fails_leaves_nothing_registered) {
    void* const memory = aligned_alloc(4096, 8 * 4096);
    kvtier_error error;
    for (int skip = 0; skip < 4; ++skip) {
        cd::fail("cudaHostRegister", cudaErrorMemoryAllocation, skip);
        CHECK(kvtier_cuda_register_host(0, Rig::at(memory), 7 * 4096, 2 * 4096, &error) == KVTIER_NO_MEMORY);
        CHECK(strstr(error.text, "cudaHostRegister") && cd::num_registered() == 0);
    }
    CHECK(kvtier_cuda_register_host(0, Rig::at(memory), 7 * 4096, 2 * 4096, &error) == KVTIER_OK);
    CHECK(cd::num_registered() == 4 && cd::registered_bytes() == 7 * 4096);
    CHECK(kvtier_cuda_unregister_host(0, Rig::at(memory), 7 * 4096, 2 * 4096, &error) == KVTIER_OK);
    CHECK(cd::num_registered() == 0);
    CHECK(kvtier_cuda_register_host(0, Rig::at(memory) + 8, 4096, 4096, &error) == KVTIER_BAD_ARGUMENT);
    free(memory);
}

TEST(a_lost_device_fails_every_ticket_and_takes_no_more) {
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

TEST(a_reset_device_fails_every_ticket_and_takes_no_more) {
    Rig rig(layered());
    Gate gate(rig.compute);
    rig.submit(KVTIER_LOAD, kLoads, KVTIER_MERGED);
    rig.submit(KVTIER_STORE, {{3, 2}}, KVTIER_GATHER);
    cd::reset_device();
    const auto reports = rig.poll();
    CHECK(reports.size() == 2);
    for (const kvtier_report& it : reports)
        CHECK(it.error.status == KVTIER_DEVICE_LOST && it.error.cuda_code == cudaErrorInvalidResourceHandle);
    uint64_t mark;
    CHECK(kvtier_cuda_mark(rig.copier, Rig::at(rig.compute), &mark, &rig.error) == KVTIER_DEVICE_LOST);
    gate.open = true;
    cd::drain(rig.compute);
}

// As above, but it is the next submission, or closing, that meets it.
TEST(a_reset_device_is_noticed_by_whatever_comes_next) {
    {
        Rig rig(layered());
        Planned planned = rig.plan(KVTIER_LOAD, kLoads, KVTIER_MERGED);
        planned.batch.after_mark = rig.mark();
        cd::reset_device();
        CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_DEVICE_LOST);
        CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_DEVICE_LOST && rig.poll().empty());
    }
    Rig rig(layered());
    cd::reset_device();
    CHECK(kvtier_cuda_close(rig.copier, 20, &rig.error) == KVTIER_OK);
    rig.copier = nullptr;
}

// Whichever allocation fails: the batch is refused and has moved nothing, or its ticket is reported as failed.
TEST(host_memory_that_is_short_costs_a_ticket) {
    for (uint32_t path : {KVTIER_MERGED, KVTIER_BATCH}) {
        int num_refused = 0, num_failed = 0, skip = 0;
        for (bool whole = false; !whole; ++skip) {
            Rig rig(layered());
            Planned planned = rig.plan(KVTIER_LOAD, kLoads, path, true);
            planned.batch.after_mark = rig.mark();
            planned.get();
            const std::string gpu = rig.whole_gpu();
            cd::fail_allocation(skip);
            const int32_t status = kvtier_cuda_submit(rig.copier, &planned.batch, &rig.error);
            cd::fail_allocation(-1);
            if (status == KVTIER_OK) {
                const kvtier_error error = rig.wait().error;
                whole = error.status == KVTIER_OK;
                num_failed += !whole;
                CHECK(whole || error.status == KVTIER_COPY_FAILED);
            } else {
                CHECK(status == KVTIER_NO_MEMORY && rig.poll().empty() && rig.whole_gpu() == gpu);
                ++num_refused;
            }
            rig.submit(KVTIER_LOAD, kLoads, path);
            CHECK(rig.wait().error.status == KVTIER_OK);
        }
        CHECK(num_refused > 0 && (num_failed > 0) == (path == KVTIER_BATCH));
    }
}

TEST(a_machine_without_cuda_says_why) {
    kvtier_device device;
    kvtier_error error;
    cd::set_num_devices(0);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_NO_DEVICE && error.cuda_code == cudaErrorNoDevice);
    cd::set_num_devices(1);
    CHECK(kvtier_cuda_probe(1, &device, &error) == KVTIER_NO_DEVICE && strstr(error.text, "device = 1"));
    cd::fail("cudaGetDeviceCount", cudaErrorInsufficientDriver);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_NO_DEVICE && error.cuda_code == 35);
    cd::set_driver_version(0);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_NO_DEVICE);
    CHECK(error.status == KVTIER_NO_DEVICE && strstr(error.text, "no CUDA driver is installed"));
    cd::set_driver_version(12080);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_NO_DEVICE && strstr(error.text, "cudaGetDeviceCount"));
    CHECK(device.driver_version == 12080 && device.runtime_version == 13000);
    kvtier_copier* copier = nullptr;
    const kvtier_options options = {0, 1, 0};
    CHECK(kvtier_cuda_open(&options, &copier, &error) == KVTIER_NO_DEVICE && copier == nullptr);
    cd::set_driver_version(13000);
    CHECK(kvtier_cuda_probe(0, &device, &error) == KVTIER_OK && strcmp(device.name, "the double") == 0);
}

TEST(bad_batches_are_refused) {
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
    refused([](Planned& it) { it.groups[1].num_pieces -= 1; });  // the span would not be filled
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

}  // namespace
