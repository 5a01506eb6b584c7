// All kernels include this file. NVRTC compiles a source for element types T and U. A kernel is an extern "C" function;
// CudaLaunch in core/kernel.py describes its arguments.
#pragma once

// NVRTC has no <stdint.h>.
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

#include "common/arithmetic.cuh"

#define KERNEL extern "C" __global__ void

// The text that follows if the macro `flag` is 1, and nothing if it is 0: a parameter of a kernel, or a statement.
#define IF(flag, ...) IF_VALUE(flag, __VA_ARGS__)
#define IF_VALUE(value, ...) IF_##value(__VA_ARGS__)
#define IF_0(...)
#define IF_1(...) __VA_ARGS__

#define WARP 32
#define FULL_MASK 0xffffffffu

// Index of this thread in the grid, and the number of threads, for grid-stride loops.
__device__ __forceinline__ int64_t grid_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t grid_size() { return (int64_t)gridDim.x * blockDim.x; }

// The first statement of every kernel (programmatic dependent launch, CUDA C++ Programming Guide). After it, all writes of
// earlier kernels are visible, and the next kernel may start and run up to its own wait. So a kernel's launch overlaps the end
// of its predecessor.
//
// A kernel starts only after all blocks of its predecessor have passed this wait. So the kernels before the predecessor are
// complete, and their writes are visible. A later launch of one candidate may read these before its wait.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// For the macros of a MemoryLayout (core/kernel.py): an array at `at`, whose elements have BYTES bytes according to the
// launch, the first multiple of BYTES in `memory`, and the end of `count` elements.
template <typename E, int BYTES, typename Byte> __device__ __forceinline__ E *array_at(Byte *at) {
    static_assert(sizeof(E) == BYTES && sizeof(Byte) == 1, "the elements of the launch's MemoryLayout");
    return (E *)at;
}
template <int BYTES, typename Byte> __device__ __forceinline__ char *array_aligned(Byte *memory) {
    return (char *)memory + (BYTES - (unsigned)__cvta_generic_to_shared(memory) % BYTES) % BYTES;
}
template <int BYTES, typename Byte> __device__ __forceinline__ char *array_end(Byte *at, int64_t count) {
    struct Element {
        char bytes[BYTES];
    };
    return (char *)((Element *)at + count);
}

// Prefetches `count` elements to L2, on Hopper and later: the sector of up to four elements, or a bulk prefetch of more.
template <typename E> __device__ __forceinline__ void prefetch_l2(const E *from, int count) {
#if __CUDA_ARCH__ >= 900
    const uintptr_t begin = (uintptr_t)from / 16 * 16, end = ((uintptr_t)(from + count) + 15) / 16 * 16;
    if (count <= 4)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
    else
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"((unsigned)(end - begin)) : "memory");
#endif
}

// The type in which sums of many elements of type A are added, so that their error does not grow with the number.
template <typename A> struct TotalOf { typedef A type; };
template <> struct TotalOf<float> { typedef double type; };

// The bits of the bfloat16 that is nearest to x, ties to even; the number that such bits stand for.
__device__ __forceinline__ uint16_t bfloat16_bits(float x) {
#if __CUDA_ARCH__ >= 800
    uint16_t rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
#else
    const uint32_t bits = __float_as_uint(x);
    return x == x ? bits + 0x7fff + (bits >> 16 & 1) >> 16 : bits >> 16 | 0x40;
#endif
}
__device__ __forceinline__ float bfloat16_value(uint16_t bits) {
#if __CUDA_ARCH__
    float x; // one instruction for either half of a register; a shift takes two for the upper half
    asm("mov.b32 %0, {%1, %2};" : "=f"(x) : "h"((uint16_t)0), "h"(bits));
    return x;
#else
    return __uint_as_float((uint32_t)bits << 16);
#endif
}

// A bfloat16 in memory: arithmetic is float32. Arrays of bfloat16 are arrays of uint16_t for Python.
struct bfloat16 {
    uint16_t bits;

    bfloat16() = default;
    __device__ __forceinline__ explicit bfloat16(float x) : bits(bfloat16_bits(x)) {}
    __device__ __forceinline__ operator float() const { return bfloat16_value(bits); }
};
// The type of the elements of an array whose type is E for Python, in kernels whose arrays may be bfloat16.
template <typename E> struct StoredAs { typedef E type; };
template <> struct StoredAs<uint16_t> { typedef bfloat16 type; };

// N elements that one instruction loads or stores.
template <typename E, int N> struct __align__(sizeof(E) * N) Vector {
    E lane[N];
};

template <typename E, int N> __device__ __forceinline__ Vector<E, N> load(const E *from) {
    return *reinterpret_cast<const Vector<E, N> *>(from);
}

// The same for elements that are read once: they bypass L1, so others stay there.
template <typename E, int N> __device__ __forceinline__ Vector<E, N> load_once(const E *from) {
#if __CUDA_ARCH__
    Vector<E, N> v;
    if constexpr (sizeof(v) == 16)
        *reinterpret_cast<int4 *>(&v) = __ldcg(reinterpret_cast<const int4 *>(from));
    else if constexpr (sizeof(v) == 8)
        *reinterpret_cast<int2 *>(&v) = __ldcg(reinterpret_cast<const int2 *>(from));
    else
        v = load<E, N>(from);
    return v;
#else
    return load<E, N>(from);
#endif
}

template <typename E, int N> __device__ __forceinline__ void store(E *to, int64_t i, const Vector<E, N> &v) {
    *reinterpret_cast<Vector<E, N> *>(to + i) = v;
}

// The same for arrays whose elements are numbers of type A, or bfloat16 with numbers of type A for arithmetic.
template <typename A, int N> __device__ __forceinline__ Vector<A, N> load_as(const A *from) { return load<A, N>(from); }
template <typename A, int N> __device__ __forceinline__ Vector<A, N> load_as(const bfloat16 *from) {
    const Vector<bfloat16, N> elements = load<bfloat16, N>(from);
    Vector<A, N> numbers;
    #pragma unroll
    for (int i = 0; i < N; i++) numbers.lane[i] = elements.lane[i];
    return numbers;
}

template <typename A, int N> __device__ __forceinline__ void store_as(A *to, int64_t i, const Vector<A, N> &v) {
    store(to, i, v);
}
template <typename A, int N> __device__ __forceinline__ void store_as(bfloat16 *to, int64_t i, const Vector<A, N> &v) {
    Vector<bfloat16, N> elements;
    #pragma unroll
    for (int k = 0; k < N; k++) elements.lane[k] = bfloat16(v.lane[k]);
    store(to, i, elements);
}
