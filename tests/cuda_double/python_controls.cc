// The double's controls for callers that speak C only.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "double.h"

namespace cd = cuda_double;

namespace {

std::map<cudaStream_t, std::shared_ptr<std::atomic<bool>>>& gates() {
    static auto& the = *new std::map<cudaStream_t, std::shared_ptr<std::atomic<bool>>>;
    return the;
}

}  // namespace

extern "C" {

void double_reset() {
    for (auto& [stream, open] : gates()) *open = true;
    gates().clear();
    cd::reset();
}
void double_fail(const char* call, int code, int skip) { cd::fail(call, static_cast<cudaError_t>(code), skip); }
void double_lose_device(int code) { cd::lose_device(static_cast<cudaError_t>(code)); }
void double_hide_batch_copy() { cd::hide_batch_copy(); }
void double_set_driver_version(int version) { cd::set_driver_version(version); }
void double_set_num_devices(int count) { cd::set_num_devices(count); }
void double_set_capturing(int capturing) { cd::set_capturing(capturing != 0); }
void double_set_library_delay_us(unsigned delay) { cd::set_library_delay_us(delay); }
void double_set_max_delay_us(unsigned delay) { cd::set_max_delay_us(delay); }
void double_adopt(void* memory, size_t bytes) { cd::adopt_device_memory(memory, bytes); }
void double_disown(void* memory) { cd::disown_device_memory(memory); }
cudaStream_t double_new_stream() { return cd::new_stream(); }
void double_end_stream(cudaStream_t stream) { cd::end_stream(stream); }
// Has a stream stop where it is until `double_let_go`.
void double_hold(cudaStream_t stream) {
    auto open = gates()[stream] = std::make_shared<std::atomic<bool>>(false);
    cd::run_on(stream, [open] {
        while (!*open) std::this_thread::yield();
    });
}
void double_let_go(cudaStream_t stream) { *gates().at(stream) = true; }
// Has a stream copy bytes, as a step that reads or writes blocks would.
void double_copy_on(cudaStream_t stream, void* to, const void* from, size_t bytes) {
    cd::run_on(stream, [=] { memcpy(to, from, bytes); });
}
void double_drain(cudaStream_t stream) { cd::drain(stream); }
size_t double_num_live_streams() { return cd::num_live_streams(); }
size_t double_num_registered() { return cd::num_registered(); }
size_t double_num_host_waits() { return cd::num_host_waits(); }
size_t double_broken_rule(char* text, size_t bytes) {
    const std::string rule = cd::broken_rule();
    snprintf(text, bytes, "%s", rule.c_str());
    return rule.size();
}
}
