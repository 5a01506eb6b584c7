// Runs a CUDA kernel as C++ on the CPU. The threads of a block are fibers that switch at barriers. Asynchronous copies and products
// are done at once, so results are right or wrong as on a GPU. A thread runs until it waits at a barrier. So where a barrier is
// missing, results depend on the order of the threads: see `thread_order`.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

extern "C" int abs(int);

#define __CUDA_ARCH__ 0
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __builtin_assume(condition)
#define __grid_constant__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

// Mathematical functions of float. The headers of the C++ library have them too, but take 0.2 s of each compilation.
#define OF_FLOAT(name) static float name(float x) { return name##f(x); }
OF_FLOAT(acos) OF_FLOAT(asin) OF_FLOAT(atan) OF_FLOAT(cbrt) OF_FLOAT(ceil) OF_FLOAT(cos) OF_FLOAT(cosh) OF_FLOAT(erf)
OF_FLOAT(erfc) OF_FLOAT(exp) OF_FLOAT(exp2) OF_FLOAT(expm1) OF_FLOAT(fabs) OF_FLOAT(floor) OF_FLOAT(log) OF_FLOAT(log1p)
OF_FLOAT(log2) OF_FLOAT(rint) OF_FLOAT(round) OF_FLOAT(sin) OF_FLOAT(sinh) OF_FLOAT(sqrt) OF_FLOAT(tan) OF_FLOAT(tanh)
OF_FLOAT(trunc)
#define OF_FLOATS(name) static float name(float x, float y) { return name##f(x, y); }
OF_FLOATS(atan2) OF_FLOATS(copysign) OF_FLOATS(fmax) OF_FLOATS(fmin) OF_FLOATS(fmod) OF_FLOATS(pow)
static float fma(float x, float y, float z) { return fmaf(x, y, z); }

template <class T> static T max(T a, T b) { return a < b ? b : a; }
template <class T> static T min(T a, T b) { return b < a ? b : a; }

struct Dim { unsigned x, y, z; };
// TOGETHER: blocks that run at the same time: a cluster, or all that wait for each other. They have no static shared memory.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef TOGETHER
#define TOGETHER CLUSTER
#endif

#define OFTEN __attribute__((optimize("O1"))) // a function that takes most of the time

static Dim threadIdx, blockIdx, blockDim, gridDim;
static unsigned current; // the fiber that runs: threads of these blocks have consecutive numbers
alignas(1024) static unsigned char shared_of_block[TOGETHER][233472];
#define shared_bytes (shared_of_block[TOGETHER > 1 ? current / blockDim.x : 0])

static float __uint_as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t __float_as_uint(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector)
{
    uint32_t found = 0;
    for (int i = 0; i < 4; i++) found |= (uint32_t)((((uint64_t)high << 32 | low) >> (selector >> 4 * i & 7) * 8) & 0xff) << 8 * i;
    return found;
}
template <class T> static T __dp4a(T a, T b, T c)
{
    const auto byte = [](T word, int i) { return (T)((uint32_t)word << 8 * (3 - i)) >> 24; };
    for (int i = 0; i < 4; i++) c += byte(a, i) * byte(b, i);
    return c;
}
static uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
static float __fsub_rn(float a, float b) { return a - b; }
static uintptr_t __cvta_generic_to_shared(const void *at) { return (const unsigned char *)at - shared_bytes; }
template <class T, class X> static T atomicAdd(T *at, X x) { const T before = *at; *at += x; return before; }
template <class T> static T atomicMax(T *at, T x) { const T before = *at; *at = x > before ? x : before; return before; }
static void __nanosleep(unsigned) {}
static int __popcll(uint64_t bits) { return __builtin_popcountll(bits); }
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }
static int __ffs(uint32_t bits) { return __builtin_ffs(bits); }
static void __trap() { __builtin_abort(); }

// Two numbers rounded to bfloat16, to nearest even.
static uint32_t rounded_pair(float low, float high)
{
    uint32_t word = 0;
    for (int i = 0; i < 2; i++) {
        const uint32_t bits = __float_as_uint(i == 0 ? low : high);
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        word |= (nan ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16) << 16 * i;
    }
    return word;
}

// A thread. It starts as a ucontext, and is resumed by longjmp, which needs no system call. It runs one kernel after the other.
struct Fiber {
    ucontext_t context;
    jmp_buf left;
    char stack[64 << 10];
    bool begun;
};
constexpr int FIBERS = TOGETHER > 2 ? 512 * TOGETHER : 1024;
static Fiber fibers[FIBERS];
static bool done[FIBERS]; // whether the thread has ended
static jmp_buf home;
static void (*body)();

__attribute__((noinline)) static void leave()
{
    if (_setjmp(fibers[current].left) == 0)
        _longjmp(home, 1);
}
static void enter()
{
    for (;;) {
        body();
        done[current] = true;
        leave();
    }
}
__attribute__((noinline)) static void resume(Fiber &fiber)
{
    if (_setjmp(home) != 0)
        return;
    if (fiber.begun)
        _longjmp(fiber.left, 1);
    fiber.begun = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = sizeof fiber.stack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    setcontext(&fiber.context);
}

static bool arrived; // whether a thread has arrived at a barrier in the current round

// A barrier. `arrive` returns the current phase; `wait_for` waits until it ends.
struct HostBarrier {
    int here = 0;
    unsigned phase = 0;
    unsigned arrive(int threads)
    {
        arrived = true;
        const unsigned own = phase;
        if (++here == threads)
            here = 0, phase++;
        return own;
    }
    void wait_for(unsigned own) const
    {
        while (phase == own) leave();
    }
    void wait(int threads) { wait_for(arrive(threads)); }
};
static HostBarrier of_cluster, of_block[TOGETHER], of_warps[FIBERS / 32], named[TOGETHER][16];
static void __syncthreads() { of_block[current / blockDim.x].wait(blockDim.x); }
static void __syncwarp() { of_warps[current / 32].wait(32); }

// The values that the lanes of each warp exchange, up to six words.
static uint32_t exchanged[FIBERS / 32][32][6];

template <class V> static V __shfl_sync(unsigned, V value, int from)
{
    const int warp = current / 32;
    memcpy(exchanged[warp][threadIdx.x % 32], &value, sizeof(V));
    __syncwarp();
    memcpy(&value, exchanged[warp][from], sizeof(V));
    __syncwarp();
    return value;
}
template <class V> static V __shfl_xor_sync(unsigned all, V value, int mask)
{
    return __shfl_sync(all, value, threadIdx.x % 32 ^ mask);
}

template <class V> static V __shfl_up_sync(unsigned all, V value, unsigned distance)
{
    const unsigned lane = threadIdx.x % 32;
    return __shfl_sync(all, value, lane < distance ? lane : lane - distance);
}

// The lanes with the same value.
template <class V> static uint32_t __match_any_sync(unsigned, V own)
{
    uint32_t lanes = 0;
    for (int lane = 0; lane < 32; lane++) lanes |= (uint32_t)(__shfl_sync(~0u, own, lane) == own) << lane;
    return lanes;
}
static uint32_t __ballot_sync(unsigned all, bool own)
{
    const uint32_t same = __match_any_sync(all, own);
    return own ? same : ~same;
}
static bool __any_sync(unsigned all, bool own) { return __ballot_sync(all, own) != 0; }

static void unpack_bfloat16(uint32_t word, float &low, float &high)
{
    low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000);
}

// mma.sync.m16n8k16, with one rounding. Of its words, a lane gives four to A and two to B.
template <class Unpack>
OFTEN static void multiply_add(float &c0, float &c1, float &c2, float &c3, const uint32_t (&words)[6], Unpack unpack)
{
    static float elements[FIBERS / 32][32][12];
    float(&of_warp)[32][12] = elements[current / 32];
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int i = 0; i < 6; i++) {
        float *const pair = of_warp[threadIdx.x % 32] + 2 * i;
        unpack(words[i], pair[0], pair[1]);
    }
    __syncwarp();
    double sums[4] = {c0, c1, c2, c3};
    for (int k = 0; k < 16; k++) {
        const int lane = k / 2 % 4, of_a = k / 8 * 4 + k % 2, of_b = 8 + k / 8 * 2 + k % 2;
        for (int i = 0; i < 4; i++)
            sums[i] += (double)of_warp[4 * g + lane][of_a + i / 2 * 2] * of_warp[4 * (2 * c + i % 2) + lane][of_b];
    }
    c0 = (float)sums[0], c1 = (float)sums[1], c2 = (float)sums[2], c3 = (float)sums[3];
    __syncwarp();
}
static void multiply_bfloat16(float &c0, float &c1, float &c2, float &c3, const uint32_t (&words)[6])
{
    multiply_add(c0, c1, c2, c3, words, unpack_bfloat16);
}

// 0: in each round all threads take turns in the order of their numbers. Other values are seeds of random orders, a new one for each
// round. Then about half of the warps also pause, usually until the others only wait at barriers.
extern "C" { unsigned thread_order = 0; }

// The number of the only block that runs, with those that run together with it; -1: all blocks run.
extern "C" { int64_t only_block = -1; }

static unsigned common_divisor(unsigned a, unsigned b) { return b ? common_divisor(b, a % b) : a; }

// Runs blocks, TOGETHER at a time. Shared memory is full of NaN before each.
template <class Kernel> OFTEN static void run(Dim grid, int threads, Kernel kernel)
{
    static Kernel *held;
    held = &kernel;
    body = [] { (*held)(); };
    gridDim = grid, blockDim = {(unsigned)threads, 1, 1};
    const unsigned all = TOGETHER * blockDim.x;
    uint32_t state = thread_order;
    Dim blocks[TOGETHER];
    const auto random_below = [&](unsigned end) {
        state = state * 1664525 + 1013904223;
        return (state >> 16) % end;
    };
    const uint64_t begin = only_block < 0 ? 0 : only_block / TOGETHER * TOGETHER, count = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t first = begin; first < (only_block < 0 ? count : begin + TOGETHER); first += TOGETHER) {
        memset(shared_of_block, 0xff, sizeof shared_of_block);
        memset(done, 0, sizeof done);
        for (unsigned i = 0; i < TOGETHER; i++) {
            const uint64_t block = first + i;
            blocks[i] = {(unsigned)(block % grid.x), (unsigned)(block / grid.x % grid.y), (unsigned)(block / grid.x / grid.y)};
        }
        bool paused[FIBERS / 32] = {};
        for (bool any = true; any;) {
            any = false;
            unsigned start = 0, step = 1;
            if (thread_order) {
                if (!arrived || random_below(1024) == 0)
                    for (bool &warp : paused) warp = random_below(2);
                start = random_below(all), step = random_below(all);
                while (common_divisor(step, all) != 1) step++;
            }
            arrived = false;
            for (unsigned turn = 0; turn < all; turn++) {
                current = thread_order ? (start + turn * step) % all : turn;
                if (done[current]) continue;
                any = true;
                if (paused[current / 32]) continue;
                blockIdx = blocks[current / blockDim.x];
                threadIdx = {current % blockDim.x, 0, 0};
                resume(fibers[current]);
            }
        }
    }
}
