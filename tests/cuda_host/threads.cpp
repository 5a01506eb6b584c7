// Runs the threads of a CUDA kernel as fibers. It does not depend on the kernel, and is compiled once.
#include "threads.h"
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

// 0: in each round all threads take turns in the order of their numbers. Other values are seeds of random orders, a new one for each
// round. Then about half of the warps also pause, usually until the others only wait at barriers.
extern "C" { unsigned thread_order = 0; }

// The number of the only block that runs, with those that run together with it; -1: all blocks run.
extern "C" { int64_t only_block = -1; }

Dim threadIdx, blockIdx, blockDim, gridDim;
unsigned current;
bool arrived;

// A thread. It starts as a ucontext, and is resumed by longjmp, which needs no system call. It runs one kernel after the other.
struct Fiber {
    ucontext_t context;
    jmp_buf left;
    char stack[64 << 10];
    bool begun;
};
static_assert(sizeof(Fiber) <= sizeof(FiberMemory) && alignof(Fiber) <= alignof(FiberMemory));
static Fiber &fiber(unsigned number) { return *(Fiber *)fibers[number].bytes; }
static jmp_buf home;
static void (*body)();

__attribute__((noinline)) void leave()
{
    if (_setjmp(fiber(current).left) == 0)
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
static unsigned running; // the number of threads that run together
void end_blocks()
{
    memset(done, 1, running);
    memset(waits, 0, running * sizeof(Wait));
    _longjmp(home, 1);
}

static unsigned common_divisor(unsigned a, unsigned b) { return b ? common_divisor(b, a % b) : a; }

void run_blocks(Dim grid, int threads, unsigned together, void (*kernel)())
{
    body = kernel;
    gridDim = grid, blockDim = {(unsigned)threads, 1, 1};
    const unsigned all = running = together * blockDim.x;
    uint32_t state = thread_order;
    Dim blocks[together];
    const auto random_below = [&](unsigned end) {
        state = state * 1664525 + 1013904223;
        return (state >> 16) % end;
    };
    const uint64_t begin = only_block < 0 ? 0 : only_block / together * together, count = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t first = begin; first < (only_block < 0 ? count : begin + together); first += together) {
        memset(shared_of_block, 0xff, together * sizeof(SharedMemory));
        memset(done, 0, all);
        for (unsigned i = 0; i < together; i++) {
            const uint64_t block = first + i;
            blocks[i] = {(unsigned)(block % grid.x), (unsigned)(block / grid.x % grid.y), (unsigned)(block / grid.x / grid.y)};
        }
        bool paused[all / 32 + 1];
        memset(paused, 0, sizeof paused);
        for (bool any = true; any;) {
            any = false;
            unsigned start = 0, step = 1;
            if (thread_order) {
                if (!arrived || random_below(1024) == 0)
                    for (unsigned warp = 0; warp <= all / 32; warp++) paused[warp] = random_below(2);
                start = random_below(all), step = random_below(all);
                while (common_divisor(step, all) != 1) step++;
            }
            arrived = false;
            for (unsigned turn = 0; turn < all; turn++) {
                current = thread_order ? (start + turn * step) % all : turn;
                if (done[current]) continue;
                any = true;
                if (paused[current / 32] || !waits[current].over()) continue;
                waits[current].word = nullptr;
                blockIdx = blocks[current / blockDim.x];
                threadIdx = {current % blockDim.x, 0, 0};
                resume(fiber(current));
            }
        }
    }
}
