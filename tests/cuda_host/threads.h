// The threads of `host.h`, which `threads.cpp` runs.
#pragma once
#include <stddef.h>

struct Dim { unsigned x, y, z; };
struct alignas(1024) SharedMemory { unsigned char bytes[233472]; };
struct alignas(16) FiberMemory { char bytes[72 << 10]; }; // at first zero

#pragma GCC visibility push(hidden)
extern Dim threadIdx, blockIdx, blockDim, gridDim;
extern unsigned current; // the fiber that runs: threads of blocks that run together have consecutive numbers
extern bool arrived;     // whether a thread has arrived at a barrier in the current round

// Of each block and of each thread that run together. `host.h` defines them.
extern SharedMemory shared_of_block[];
extern FiberMemory fibers[];
extern bool done[]; // whether the thread has ended

// What a thread waits for: that these bits of a word in memory have another value.
struct Wait {
    const unsigned *word;
    unsigned bits, value;
    bool over() const { return word == nullptr || (*word & bits) != value; }
};
extern Wait waits[];

// Lets other threads run.
void leave();
static inline void wait_while(const unsigned &word, unsigned bits, unsigned value)
{
    waits[current] = {&word, bits, value};
    leave();
}
template <class Word> void wait_for_change(const Word &word)
{
    const unsigned &bits = *(const unsigned *)&word; // a cast to a reference would be to one of a copy
    if (sizeof word == sizeof bits) wait_while(bits, ~0u, bits);
    else leave();
}

// Ends all threads of the blocks that run. One of them calls it.
[[noreturn]] void end_blocks();

// Runs blocks, `together` at a time. Shared memory is full of NaN before each.
void run_blocks(Dim grid, int threads, unsigned together, void (*body)());
#pragma GCC visibility pop
