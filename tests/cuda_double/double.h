// Controls of the test double: what goes wrong, when, and how slowly.
#ifndef KVTIER_DOUBLE_H
#define KVTIER_DOUBLE_H

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace cuda_double {

// The double as after start: no failure, no delay, one device with everything. Takes away what a lost device has left.
void reset();
// The call of this name fails with `code`, after `skip` calls of it that do not. Once.
void fail(const std::string& call, cudaError_t code, int skip = 0);
// From now on every call fails with `code`, and streams drop what they have.
void lose_device(cudaError_t code);
bool is_device_lost();
// As cudaDeviceReset: streams drop what they have, and the library's streams and events are not known any more.
void reset_device();
// The allocation number `skip` + 1 that the library makes on this thread throws std::bad_alloc. Negative: none does.
void fail_allocation(int skip);
// A driver version as cudaDriverGetVersion says it; 0: there is no driver.
void set_driver_version(int version);
void hide_batch_copy();
// What the driver's batch copy returns, without copying; 0: it copies.
void refuse_batch_copy(int code);
void set_num_devices(int count);
int current_device();
void set_reads_host(bool reads);
void set_capturing(bool capturing);
// Every operation of a stream waits for a random time below this: streams overtake each other.
void set_max_delay_us(unsigned delay);
// Every operation of a stream of the library waits for this time, in place of the above.
void set_library_delay_us(unsigned delay);

// Device memory; copies check that their device side lies in some.
void* device_memory(size_t bytes);
void free_device_memory(void* address);
// Memory of the caller, as device memory.
void adopt_device_memory(void* address, size_t bytes);
void disown_device_memory(void* address);

cudaStream_t new_stream();
void end_stream(cudaStream_t stream);
// Has a stream run something, in order.
void run_on(cudaStream_t stream, std::function<void()> body);
// Waits for everything enqueued so far on a stream.
void drain(cudaStream_t stream);
// What the library has made and not destroyed.
size_t num_live_events();
size_t num_live_streams();
size_t num_registered();
size_t registered_bytes();
// How often a call of the library waited for a stream: what CUDA does for memory that is not registered.
size_t num_host_waits();
// What the double refused to do, because a caller broke a rule of CUDA: "" if nothing.
std::string broken_rule();

}  // namespace cuda_double
#endif
