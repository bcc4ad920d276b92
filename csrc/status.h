// From CUDA's codes to ours, and the current device for the length of a call.
#ifndef KVTIER_STATUS_H
#define KVTIER_STATUS_H

#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

#include "kvtier_cuda.h"

namespace kvtier {

__attribute__((format(printf, 4, 5))) inline int32_t fail(kvtier_error* error, int32_t status, int cuda_code,
                                                          const char* format, ...) {
    if (error != nullptr) {
        error->status = status;
        error->cuda_code = cuda_code;
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return status;
}

inline int32_t succeed(kvtier_error* error) {
    if (error != nullptr) memset(error, 0, sizeof *error);
    return KVTIER_OK;
}

// Whether no later call on the context can succeed.
inline bool is_lost(cudaError_t code) {
    switch (code) {
        case cudaErrorCudartUnloading:
        case cudaErrorDeviceUninitialized:
        case cudaErrorECCUncorrectable:
        case cudaErrorNvlinkUncorrectable:
        case cudaErrorIllegalAddress:
        case cudaErrorLaunchTimeout:
        case cudaErrorContextIsDestroyed:
        case cudaErrorAssert:
        case cudaErrorHardwareStackError:
        case cudaErrorIllegalInstruction:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc:
        case cudaErrorLaunchFailure:
        case cudaErrorTensorMemoryLeak:
        case cudaErrorContained:
        case cudaErrorExternalDevice:
        case cudaErrorMpsClientTerminated:
        case cudaErrorUnknown:
            return true;
        default:
            return false;
    }
}

inline int32_t status_of(cudaError_t code) {
    switch (code) {
        case cudaSuccess: return KVTIER_OK;
        case cudaErrorMemoryAllocation: return KVTIER_NO_MEMORY;
        case cudaErrorInsufficientDriver:
        case cudaErrorNoDevice:
        case cudaErrorInvalidDevice:
        case cudaErrorDevicesUnavailable:
        case cudaErrorInitializationError: return KVTIER_NO_DEVICE;
        default: return is_lost(code) ? KVTIER_DEVICE_LOST : KVTIER_CUDA_ERROR;
    }
}

// Enters what CUDA said about `call`, and takes it out of CUDA's memory of the last error.
inline int32_t cuda_fail(kvtier_error* error, cudaError_t code, const char* call) {
    cudaGetLastError();
    return fail(error, status_of(code), code, "%s: %s (%s)", call, cudaGetErrorString(code), cudaGetErrorName(code));
}

// The device of a call; the thread's own one is back when the call ends.
class DeviceScope {
   public:
    explicit DeviceScope(int device) {
        code_ = cudaGetDevice(&before_);
        // A thread that captures a graph forbids queries and allocations to all others, unless they say that they
        // know what they do: ours touch no capturing stream.
        relaxed_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
        if (code_ == cudaSuccess && before_ != device) {
            code_ = cudaSetDevice(device);
            changed_ = code_ == cudaSuccess;
        }
    }
    ~DeviceScope() {
        if (changed_) cudaSetDevice(before_);
        if (relaxed_) cudaThreadExchangeStreamCaptureMode(&mode_);
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;
    cudaError_t code() const { return code_; }

   private:
    cudaError_t code_ = cudaSuccess;
    int before_ = 0;
    bool changed_ = false;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    bool relaxed_ = false;
};

// No exception crosses the C ABI.
template <class Body>
int32_t guarded(kvtier_error* error, Body body) noexcept {
    try {
        succeed(error);
        return body();
    } catch (const std::bad_alloc&) {
        return fail(error, KVTIER_NO_MEMORY, 0, "host memory is short");
    } catch (...) {
        return fail(error, KVTIER_CUDA_ERROR, 0, "an unexpected C++ exception");
    }
}

}  // namespace kvtier
#endif
