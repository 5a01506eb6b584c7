// Flags and data in memory for which threads of several GPUs wait.
#pragma once
#include "common/common.cuh"

// Stores a number. What this thread has written, or has seen written by a barrier of its block, is visible before.
__device__ __forceinline__ void set_flag(uint32_t *flag, uint32_t number) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}

// Waits until the flag is at least this number, modulo 2^32.
__device__ __forceinline__ void wait_for_flag(const uint32_t *flag, uint32_t number) {
    uint32_t seen;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    } while ((int32_t)(seen - number) < 0);
}

// Loads neighbouring words of 4 or 8 bytes until none of them is `empty`. Each word may be stored by another GPU at any time.
template <typename Word, int N>
__device__ __forceinline__ void wait_for_words(Word (&words)[N], const Word *from, Word empty) {
    bool complete;
    do {
        if constexpr (sizeof(Word) == 4 && N == 4)
            asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from) : "memory");
        else if constexpr (sizeof(Word) == 8 && N == 2)
            asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
        else
            #pragma unroll
            for (int i = 0; i < N; i++) {
                if constexpr (sizeof(Word) == 4)
                    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(words[i]) : "l"(from + i) : "memory");
                else
                    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(words[i]) : "l"(from + i) : "memory");
            }
        complete = true;
        #pragma unroll
        for (int i = 0; i < N; i++) complete = complete && words[i] != empty;
    } while (!complete);
}

// Stores neighbouring words of 4 or 8 bytes, for which threads of other GPUs may wait (wait_for_words).
template <typename Word, int N> __device__ __forceinline__ void store_words(Word *to, const Word (&words)[N]) {
    if constexpr (sizeof(Word) == 4 && N == 4)
        asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    else if constexpr (sizeof(Word) == 8 && N == 2)
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(words[0]), "l"(words[1]) : "memory");
    else
        #pragma unroll
        for (int i = 0; i < N; i++) {
            if constexpr (sizeof(Word) == 4)
                asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to + i), "r"(words[i]) : "memory");
            else
                asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to + i), "l"(words[i]) : "memory");
        }
}
