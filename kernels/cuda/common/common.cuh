// What all kernels share. Each source is compiled by NVRTC for certain element types: -DT=float, and -DU=int64_t where
// there are two. A kernel is an extern "C" function of that source; core/kernel.py says how an operation names it.
#pragma once

// NVRTC has no <stdint.h> of its own.
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#else
#include <math.h>
#include <stdint.h>
#endif

#define KERNEL extern "C" __global__ void

#define WARP 32
#define FULL_MASK 0xffffffffu

// The thread's number in the grid, and how many there are: for (i = first; i < n; i += stride).
__device__ __forceinline__ int64_t grid_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t grid_size() { return (int64_t)gridDim.x * blockDim.x; }

// The first statement of every kernel: what the kernels before it have written can be read from here on, and the next
// kernel may be started, to wait at its own. So a kernel's launch overlaps the end of the one before it (programmatic
// dependent launch, CUDA C++ Programming Guide). As that one's blocks have all come past here by then, all kernels before
// it have ended: one that follows others of its own may read what these have before it waits for the last of them.
__device__ __forceinline__ void wait_for_inputs()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Asks the second cache for elements that are read later: on Hopper and later GPUs, a few by their sector.
template <typename E> __device__ __forceinline__ void prefetch_l2(const E *from, int count)
{
#if __CUDA_ARCH__ >= 900
    const uintptr_t begin = (uintptr_t)from / 16 * 16, end = ((uintptr_t)(from + count) + 15) / 16 * 16;
    if (count <= 4)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
    else
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"((unsigned)(end - begin)) : "memory");
#endif
}

// Several elements that one instruction reads or writes.
template <typename E, int N> struct __align__(sizeof(E) * N) Vector {
    E lane[N];
};

template <typename E, int N> __device__ __forceinline__ Vector<E, N> load(const E *from)
{
    return *reinterpret_cast<const Vector<E, N> *>(from);
}

template <typename E, int N> __device__ __forceinline__ void store(E *to, int64_t i, const Vector<E, N> &v)
{
    *reinterpret_cast<Vector<E, N> *>(to + i) = v;
}
