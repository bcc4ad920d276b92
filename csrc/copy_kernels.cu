// The kernel itself: everything it does is in copy_kernels.h.
#include "copy_kernels.h"

namespace kvtier {

#ifdef __CUDACC__
__global__ void __launch_bounds__(kThreadsPerCta, 1) copy_kernel(const __grid_constant__ KernelWork work) {
    const uint32_t thread = blockIdx.x * kThreadsPerCta + threadIdx.x;
    copy_units(work, thread / kWarpLanes, gridDim.x * (kThreadsPerCta / kWarpLanes), thread % kWarpLanes);
}
#else
// As a host function, for tests: the same work, warp by warp and lane by lane.
void copy_kernel(const KernelWork& work, uint32_t num_ctas) {
    const uint32_t num_warps = num_ctas * (kThreadsPerCta / kWarpLanes);
    for (uint32_t warp = 0; warp < num_warps; ++warp)
        for (uint32_t lane = 0; lane < kWarpLanes; ++lane) copy_units(work, warp, num_warps, lane);
}
#endif

cudaError_t load_copy_kernel() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&copy_kernel));
}

cudaError_t launch_copy(const KernelWork& work, cudaStream_t stream) {
    constexpr uint32_t warps_per_cta = kThreadsPerCta / kWarpLanes;
    const uint32_t needed = (work.num_units + warps_per_cta - 1) / warps_per_cta;
    const uint32_t num_ctas = needed < kMaxCtas ? needed : kMaxCtas;
    void* arguments[] = {const_cast<KernelWork*>(&work)};
    return cudaLaunchKernel(reinterpret_cast<const void*>(&copy_kernel), dim3(num_ctas), dim3(kThreadsPerCta),
                            arguments, 0, stream);
}

}  // namespace kvtier
