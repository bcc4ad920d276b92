// What waits for what. Nothing else does.
#include "rig.h"

namespace cd = cuda_double;

namespace {

Layout layered() { return layouts()[4]; }

TEST(a_store_waits_for_the_step_that_writes_its_source) {
    for (uint32_t path : kPaths) {
        Rig rig(layered());
        Gate gate(rig.compute);
        std::string later(rig.block_bytes, 'w');
        cd::run_on(rig.compute, [&] {
            std::string gpu = rig.whole_gpu();
            rig.set_gpu(gpu, 3, later);
            memcpy(rig.gpu, gpu.data(), gpu.size());
        });
        Planned planned = rig.plan(KVTIER_STORE, {{3, 2}}, path);
        planned.batch.after_mark = rig.mark();
        uint64_t other;
        CHECK(kvtier_cuda_mark(rig.copier, 0, &other, &rig.error) == KVTIER_OK);  // a later mark, of an idle stream
        CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(rig.poll().empty());  // seen as finished before the stream has run: the third trap
        gate.open = true;
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.whole_cpu().substr(2 * rig.slot_bytes, rig.block_bytes) == later);
    }
}

TEST(a_load_waits_for_the_last_reader_of_its_destination) {
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

TEST(a_load_does_not_wait_for_steps_after_its_mark) {
    Rig rig(layered());
    Planned planned = rig.plan(KVTIER_LOAD, {{2, 3}}, KVTIER_MERGED);
    planned.batch.after_mark = rig.mark();
    Gate gate(rig.compute);
    rig.mark();
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
    CHECK(rig.wait().error.status == KVTIER_OK);
    gate.open = true;
}

TEST(a_later_step_overwrites_a_source_only_after_the_store) {
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

TEST(a_layer_is_there_when_its_wave_is) {
    for (const unsigned delay : {0, 0, 0, 0, 0, 2000}) {
        Rig rig(layered());
        cd::set_max_delay_us(200);
        cd::set_library_delay_us(delay);
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
        CHECK(rig.wait().error.status == KVTIER_OK);
        CHECK(rig.on_gpu(3) == slot);
        cd::drain(rig.compute);
        CHECK(seen == slot);
        CHECK(kvtier_cuda_wait_layer(rig.copier, ticket, 0, 0, &rig.error) == KVTIER_UNKNOWN_TICKET);
    }
}

TEST(stores_do_not_hold_up_loads) {
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
    cd::end_stream(other);
}

TEST(marks_are_bounded_and_captures_refused) {
    Rig rig(layered());
    uint64_t mark = 0;
    Gate gate(rig.compute);
    for (int i = 0; i < 64; ++i) rig.mark();
    CHECK(kvtier_cuda_mark(rig.copier, Rig::at(rig.compute), &mark, &rig.error) == KVTIER_BUSY);
    gate.open = true;
    cd::drain(rig.compute);
    Gate again(rig.compute);
    CHECK(rig.mark() == 65);
    Planned planned = rig.plan(KVTIER_LOAD, {{1, 1}}, KVTIER_MERGED);
    planned.batch.after_mark = 1;  // out of the ring, hence finished
    CHECK(kvtier_cuda_submit(rig.copier, planned.get(), &rig.error) == KVTIER_OK);
    CHECK(rig.wait().ticket == planned.batch.ticket);  // mark 65, which has the place of mark 1, is unfinished
    again.open = true;
    cd::drain(rig.compute);
    const uint64_t ticket = rig.submit(KVTIER_LOAD, {{1, 1}}, KVTIER_MERGED);
    cd::set_capturing(true);
    CHECK(kvtier_cuda_mark(rig.copier, Rig::at(rig.compute), &mark, &rig.error) == KVTIER_BAD_ARGUMENT);
    CHECK(kvtier_cuda_wait_layer(rig.copier, ticket, 0, Rig::at(rig.compute), &rig.error) == KVTIER_BAD_ARGUMENT);
    CHECK(rig.wait().ticket == ticket);
}

// Every call of a step, on every path, while nothing on the device can go on.
TEST(no_call_waits_for_the_device) {
    for (uint32_t path : kPaths) {
        for (uint32_t direction : {KVTIER_LOAD, KVTIER_STORE}) {
            Rig rig(layered());
            Gate gate(rig.compute);
            const uint64_t ticket = rig.submit(direction, direction == KVTIER_LOAD ? kLoads : kStores, path);
            CHECK(kvtier_cuda_wait_layer(rig.copier, ticket, 0, Rig::at(rig.compute), &rig.error) == KVTIER_OK);
            CHECK(rig.poll().empty() && rig.counts().num_open_tickets == 1 && rig.mark() == 2);
            CHECK(cd::num_host_waits() == 0);
            gate.open = true;
            CHECK(rig.wait().error.status == KVTIER_OK && cd::broken_rule() == "");
        }
    }
    // The exception, which CUDA makes: host memory that is not registered.
    Rig rig(layered(), 0, false);
    rig.submit(KVTIER_STORE, kStores, KVTIER_MERGED);
    CHECK(rig.wait().error.status == KVTIER_OK && cd::num_host_waits() > 0);
}

TEST(the_threads_own_device_is_back_after_each_call) {
    cd::set_num_devices(2);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    Rig rig(layered());  // on device 0
    CHECK(cd::current_device() == 1);
    rig.submit(KVTIER_STORE, kStores, KVTIER_GATHER);
    CHECK(cd::current_device() == 1);
    CHECK(rig.wait().error.status == KVTIER_OK && cd::current_device() == 1);
    CHECK(kvtier_cuda_wait_layer(rig.copier, 9, 0, 0, &rig.error) == KVTIER_UNKNOWN_TICKET);
    CHECK(cd::current_device() == 1 && cudaSetDevice(0) == cudaSuccess);
}

TEST(closing_waits_with_a_bound) {
    Rig rig(layered());
    Gate gate(rig.compute);
    rig.submit(KVTIER_STORE, {{3, 2}}, KVTIER_MERGED);
    CHECK(kvtier_cuda_close(rig.copier, 20, &rig.error) == KVTIER_BUSY);
    gate.open = true;
    CHECK(rig.wait().error.status == KVTIER_OK);
}

}  // namespace
