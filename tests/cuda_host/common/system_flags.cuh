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
    while ((int32_t)(*flag - number) < 0) leave();
    delay(1, 1000);
}
template <class Word, int N> static void wait_for_words(Word (&words)[N], const Word *from, Word empty)
{
    delay(32, 256);
    for (int i = 0; i < N; i++)
        while ((words[i] = from[i]) == empty) leave();
}
template <class Word, int N> static void store_words(Word *to, const Word (&words)[N])
{
    for (int i = 0; i < N; i++) to[i] = words[i];
}
