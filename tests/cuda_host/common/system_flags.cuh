// kernels/cuda/common/system_flags.cuh on the CPU: see host.h.
#pragma once
#include "common/common.cuh"

static void set_flag(uint32_t *flag, uint32_t number) { *flag = number; }
static void wait_for_flag(const uint32_t *flag, uint32_t number) { while ((int32_t)(*flag - number) < 0) leave(); }
template <class Word, int N> static void wait_for_words(Word (&words)[N], const Word *from, Word empty)
{
    for (int i = 0; i < N; i++)
        while ((words[i] = from[i]) == empty) leave();
}
