// All kernels include this file. NVRTC compiles a source for element types T and U. A kernel is an extern "C" function;
// CudaLaunch in core/kernel.py describes its arguments.
#pragma once
#include "common/exp2_approximate.cuh"

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

// Arithmetic that CUDA has no function for: integer division, powers, the normal distribution.

template <typename E> constexpr bool IS_FLOAT = false;
template <> constexpr bool IS_FLOAT<float> = true;
template <> constexpr bool IS_FLOAT<double> = true;

// floor_divide, floor_remainder and integer_power, as in Python and NumPy, for every type.
//
// Integers are computed in 64 bits, which hold the elements of all integer types. The result wraps around when the caller
// stores it in a narrower type. The quotient and the remainder by 0 are 0.
template <typename E> __device__ __forceinline__ E floor_divide(E a, E b) {
    if constexpr (IS_FLOAT<E>) {
        const E remainder = fmod(a, b); // exact, with the sign of a
        const bool other_sign = remainder != 0 && (remainder < 0) != (b < 0);
        const E quotient = (a - remainder) / b - (E)other_sign, below = floor(quotient); // a whole number up to rounding
        const E whole = quotient - below > (E)0.5 ? below + 1 : below;
        return b == 0 ? a / b : quotient == 0 ? copysign((E)0, a / b) : whole;
    } else {
        const int64_t x = (int64_t)a, y = (int64_t)b;
        if (y == 0 || y == -1) return (E)((uint64_t)x * (uint64_t)y); // the smallest integer wraps around
        return (E)(x / y - (x % y != 0 && (x < 0) != (y < 0)));
    }
}

template <typename E> __device__ __forceinline__ E floor_remainder(E a, E b) {
    if constexpr (IS_FLOAT<E>) {
        const E remainder = fmod(a, b);
        const bool other_sign = (remainder < 0) != (b < 0);
        return remainder == 0 ? copysign((E)0, b) : other_sign ? remainder + b : remainder;
    } else {
        const int64_t x = (int64_t)a, y = (int64_t)b;
        if (y == 0 || y == -1) return 0;
        const int64_t remainder = x % y;
        return (E)(remainder + (remainder != 0 && (remainder < 0) != (y < 0) ? y : 0));
    }
}

// Powers by repeated squaring. A negative exponent gives the reciprocal without its fraction: 0, unless base is 1 or -1.
__device__ __forceinline__ int64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 || (base == -1 && exponent % 2 == 0) ? 1 : base == -1 ? -1 : 0;
    uint64_t factor = (uint64_t)base, power = 1;
    for (; exponent > 0; exponent /= 2, factor *= factor)
        if (exponent % 2 == 1) power *= factor;
    return (int64_t)power;
}

// Division by a constant divisor: a multiplication and at most one correction.
// I: uint32_t, for numbers below 2^32, or int64_t, which divides as usual.
template <typename I> struct Divisor {
    I number;

    __device__ __forceinline__ explicit Divisor(int64_t number) : number((I)number) {}
    // Returns n / number; n becomes the remainder.
    __device__ __forceinline__ I operator()(I &n) const {
        const I quotient = n / number;
        n -= quotient * number;
        return quotient;
    }
};

template <> struct Divisor<uint32_t> {
    uint32_t number, reciprocal;

    __device__ __forceinline__ explicit Divisor(int64_t n) : number((uint32_t)n), reciprocal(0xffffffffu / number) {}
    __device__ __forceinline__ uint32_t operator()(uint32_t &n) const {
        // reciprocal / 2^32 is below 1 / number by at most 2^-32: this is the quotient or one less
        uint32_t quotient = __umulhi(n, reciprocal);
        n -= quotient * number;
        if (n >= number) n -= number, quotient++;
        return quotient;
    }
};

// e^x, with a relative error below 2^-22 + |x| 2^-23: for results that are rounded to bfloat16.
__device__ __forceinline__ float exp_approximate(float x) { return exp2_approximate(x * 1.44269504f); }

// The normal distribution function and its density, for gelu.
//
// e^(-x^2 / 2)
__device__ __forceinline__ float normal_exp(float x) { return exp2_approximate(x * x * -0.72134752f); }

__device__ __forceinline__ float normal_pdf(float x) { return normal_exp(x) * 0.39894228f; }
__device__ __forceinline__ double normal_pdf(double x) { return exp(x * x * -0.5) * 0.3989422804014327; }

// The smaller tail is e^(-x^2 / 2) q(|x|), where q is a polynomial up to 5 and constant from there on. kernels/cpu/elementary.h
// has the same coefficients. There are no branches, and gelu's derivative uses the same exponential. The absolute error is below
// 2e-7.
__device__ __forceinline__ float normal_cdf(float x) {
    constexpr float Q[] = {0.249977887f,   -0.132827923f,   0.0619738623f,   -0.0255390741f,  0.00906078238f,
                           -0.00262103672f, 0.000574403792f, -8.7071734e-05f, 7.9842943e-06f, -3.2963487e-07f};
    const float y = fminf(fabsf(x), 5);
    float q = Q[9];
    #pragma unroll
    for (int i = 8; i >= 0; i--) q = fmaf(q, y, Q[i]);
    const float tail = normal_exp(x) * fmaf(fmaf(q, y, -0.398941159f), y, 0.5f);
    return x < 0 ? tail : 1 - tail;
}
__device__ __forceinline__ double normal_cdf(double x) { return 0.5 * erfc(x * -0.7071067811865476); }

// cp.async: copies from global to shared memory that need no registers. Before compute capability 8.0 they are synchronous.

// Copies BYTES (4, 8 or 16) to shared memory if `take`, else writes zeros. CACHED: a 16-byte copy allocates in L1, for data
// that other blocks of the multiprocessor read too. Smaller copies always do.
template <int BYTES, bool CACHED = false, typename E>
__device__ __forceinline__ void cp_async(E *to, const E *from, bool take) {
#if __CUDA_ARCH__ >= 800
    const unsigned target = (unsigned)__cvta_generic_to_shared(to);
    const int bytes = take ? BYTES : 0; // the instruction fills up with zeros
    if (BYTES == 16 && !CACHED)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(from), "n"(BYTES), "r"(bytes)
            : "memory");
#else
    typedef Vector<E, BYTES / sizeof(E)> Bytes;
    *(Bytes *)to = take ? *(const Bytes *)from : Bytes{};
#endif
}

// Ends a group of copies. A pipeline stage without copies commits an empty group, so that groups count stages.
__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the last LEFT.
template <int LEFT> __device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// Philox4x32-10 (J. Salmon et al., SC 2011): number i of a stream depends on (seed, step, stream, i) only.
// Four numbers of 32 bits. The key is the seed, the counter (block, stream, step low, step high).
__device__ __forceinline__ void philox(const uint32_t *rng, uint32_t stream, uint32_t block, uint32_t (&words)[4]) {
    uint32_t c0 = block, c1 = stream, c2 = rng[2], c3 = rng[3], k0 = rng[0], k1 = rng[1];
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}
