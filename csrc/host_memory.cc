// The device as it is, and registering host memory with it.
#include "driver.h"
#include "status.h"

using namespace kvtier;

uint32_t kvtier_cuda_abi_version(void) { return KVTIER_CUDA_ABI_VERSION; }

namespace {

int attribute(cudaDeviceAttr name, int device, int otherwise) {
    int value = otherwise;
    if (cudaDeviceGetAttribute(&value, name, device) == cudaSuccess) return value;
    cudaGetLastError();
    return otherwise;
}

int32_t check_device(int device, int num_devices, kvtier_error* error) {
    if (device >= 0 && device < num_devices) return KVTIER_OK;
    return fail(error, KVTIER_NO_DEVICE, 0, "device = %d: this machine has %d CUDA devices", device, num_devices);
}

int32_t check_range(uint64_t address, uint64_t bytes, uint64_t chunk_bytes, kvtier_error* error) {
    if (address == 0 || bytes == 0 || chunk_bytes == 0 || address % 4096 != 0 || chunk_bytes % 4096 != 0)
        return fail(error, KVTIER_BAD_ARGUMENT, 0, "address, bytes, chunk_bytes: not 0, and pages throughout");
    return KVTIER_OK;
}

// Unregisters [address, end) chunk by chunk and returns the first error.
cudaError_t unregister(uint64_t address, uint64_t end, uint64_t chunk_bytes) {
    cudaError_t first = cudaSuccess;
    for (uint64_t at = address; at < end; at += chunk_bytes) {
        cudaError_t code = cudaHostUnregister(reinterpret_cast<void*>(at));
        if (first == cudaSuccess) first = code;
        if (code != cudaSuccess) cudaGetLastError();
    }
    return first;
}

}  // namespace

int32_t kvtier_cuda_probe(int32_t device, kvtier_device* out, kvtier_error* error) {
    return guarded(error, [&] {
        if (out == nullptr) return fail(error, KVTIER_BAD_ARGUMENT, 0, "out = NULL");
        memset(out, 0, sizeof *out);
        const auto no_device = [&](cudaError_t code, const char* call) {
            cuda_fail(error, code, call);  // whatever the code, there is no device to work with
            if (error != nullptr) error->status = KVTIER_NO_DEVICE;
            return static_cast<int32_t>(KVTIER_NO_DEVICE);
        };
        if (cudaError_t code = cudaRuntimeGetVersion(&out->runtime_version))
            return no_device(code, "cudaRuntimeGetVersion");
        if (cudaError_t code = cudaDriverGetVersion(&out->driver_version))
            return no_device(code, "cudaDriverGetVersion");
        // Without a driver that succeeds and says 0, and the next call would speak of an old driver.
        if (cudaError_t code = cudaGetDeviceCount(&out->num_devices))
            return no_device(code, out->driver_version == 0 ? "no CUDA driver is installed: cudaGetDeviceCount"
                                                            : "cudaGetDeviceCount");
        if (int32_t status = check_device(device, out->num_devices, error)) return status;
        out->numa_node = attribute(cudaDevAttrHostNumaId, device, -1);
        out->reads_host = attribute(cudaDevAttrCanUseHostPointerForRegisteredMem, device, 0);
        cudaDeviceProp properties;
        if (cudaError_t code = cudaGetDeviceProperties(&properties, device))
            return no_device(code, "cudaGetDeviceProperties");
        snprintf(out->name, sizeof out->name, "%s", properties.name);
        out->has_batch_copy = find_batch_copy() != nullptr;
        return static_cast<int32_t>(KVTIER_OK);
    });
}

int32_t kvtier_cuda_register_host(int32_t device, uint64_t address, uint64_t bytes, uint64_t chunk_bytes,
                                  kvtier_error* error) {
    return guarded(error, [&] {
        if (int32_t status = check_range(address, bytes, chunk_bytes, error)) return status;
        DeviceScope scope(device);
        if (scope.code() != cudaSuccess) return cuda_fail(error, scope.code(), "cudaSetDevice");
        const uint64_t end = address + bytes;
        for (uint64_t at = address; at < end; at += chunk_bytes) {
            const uint64_t size = end - at < chunk_bytes ? end - at : chunk_bytes;
            // Portable: one arena may serve several devices. Mapped: kernels read it.
            cudaError_t code =
                cudaHostRegister(reinterpret_cast<void*>(at), size, cudaHostRegisterPortable | cudaHostRegisterMapped);
            if (code != cudaSuccess) {
                unregister(address, at, chunk_bytes);
                return cuda_fail(error, code, "cudaHostRegister");
            }
        }
        return static_cast<int32_t>(KVTIER_OK);
    });
}

int32_t kvtier_cuda_unregister_host(int32_t device, uint64_t address, uint64_t bytes, uint64_t chunk_bytes,
                                    kvtier_error* error) {
    return guarded(error, [&] {
        if (int32_t status = check_range(address, bytes, chunk_bytes, error)) return status;
        DeviceScope scope(device);
        if (scope.code() != cudaSuccess) return cuda_fail(error, scope.code(), "cudaSetDevice");
        cudaError_t code = unregister(address, address + bytes, chunk_bytes);
        if (code != cudaSuccess) return cuda_fail(error, code, "cudaHostUnregister");
        return static_cast<int32_t>(KVTIER_OK);
    });
}
