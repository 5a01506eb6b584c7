// kernels/cuda/common/system_flags.cuh on the CPU: see host.h.
#pragma once
#include "common/common.cuh"

// Lets other threads run before this one goes on, in one of `every` calls, so that some blocks and ranks are ahead of others.
static void delay(uint32_t every, uint32_t most)
{
    static uint32_t random = 1;
    random = random * 1664525 + 1013904223;
    for (uint32_t n = (random >> 24) % every ? 0 : (random >> 8) % most; n > 0; n--) leave();
}

static void set_flag(uint32_t *flag, uint32_t number) { *flag = number; }
static void wait_for_flag(const uint32_t *flag, uint32_t number)
{
    while ((int32_t)(*flag - number) < 0) wait_for_change(*flag);
    delay(1, 1000);
}
// What store_words has stored last. A word that differs from it was changed by a weak store: a data race with other GPUs.
struct Stored {
    const void *at;
    uint64_t word;
};
static Stored stored[1 << 16]; // by a hash of the address; of addresses with the same hash, the last one
static Stored &stored_at(const void *at) { return stored[(uintptr_t)at * 0x9e3779b97f4a7c15 >> 48]; }

template <class Word, int N> static void wait_for_words(Word (&words)[N], const Word *from, Word empty)
{
    delay(32, 256);
    for (int i = 0; i < N; i++)
        while ((words[i] = from[i]) == empty) wait_for_change(from[i]);
}
template <class Word, int N> static void store_words(Word *to, const Word (&words)[N])
{
    for (int i = 0; i < N; i++) {
        Stored &last = stored_at(to + i);
        if (last.at == to + i && last.word != to[i]) __trap();
        to[i] = words[i], last = {to + i, words[i]};
    }
}
