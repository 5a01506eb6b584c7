// CUDA C++ as C++ of the CPU, for one kernel at a time: the threads of a block are fibers, which take turns where they
// wait for one another. Copies and products are done at once, so what a kernel computes is found, but not what it races.
#pragma once
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#define __CUDA_ARCH__ 0
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

template <class T> static T max(T a, T b) { return a < b ? b : a; }
template <class T> static T min(T a, T b) { return b < a ? b : a; }

struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) static unsigned char shared_bytes[232448];

static float __uint_as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t __float_as_uint(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static float __fsub_rn(float a, float b) { return a - b; }
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

struct Fiber {
    ucontext_t context;
    char stack[64 << 10];
    bool done;
};
static Fiber fibers[1024];
static ucontext_t home;
static void (*body)();

static void leave() { swapcontext(&fibers[threadIdx.x].context, &home); }
static void enter()
{
    body();
    fibers[threadIdx.x].done = true;
}

// A place where so many threads wait for one another.
struct Meeting {
    int here = 0;
    unsigned times = 0;
    void wait(int threads)
    {
        const unsigned before = times;
        if (++here == threads)
            here = 0, times++;
        while (times == before) leave();
    }
};
static Meeting of_block, of_warps[32], of_places[16];
static void __syncthreads() { of_block.wait(blockDim.x); }
static void __syncwarp() { of_warps[threadIdx.x / 32].wait(32); }

// All lanes of the warp must come here.
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask)
{
    static T shown[1024];
    shown[threadIdx.x] = value;
    __syncwarp();
    value = shown[threadIdx.x ^ mask];
    __syncwarp();
    return value;
}

// Runs the blocks one after another; shared memory is NaN before each.
template <class Kernel> static void run(Dim grid, int threads, Kernel kernel)
{
    static Kernel *held;
    held = &kernel;
    body = [] { (*held)(); };
    gridDim = grid, blockDim = {(unsigned)threads, 1, 1};
    for (unsigned block = 0; block < grid.x * grid.y * grid.z; block++) {
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        memset(shared_bytes, 0xff, sizeof shared_bytes);
        for (int i = 0; i < threads; i++) {
            Fiber &fiber = fibers[i];
            fiber.done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack;
            fiber.context.uc_stack.ss_size = sizeof fiber.stack;
            fiber.context.uc_link = &home;
            makecontext(&fiber.context, enter, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (unsigned i = 0; i < blockDim.x; i++) {
                if (fibers[i].done) continue;
                any = true;
                threadIdx = {i, 0, 0};
                swapcontext(&home, &fibers[i].context);
            }
        }
    }
}
