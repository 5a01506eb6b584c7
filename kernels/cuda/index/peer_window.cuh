// Windows: memory of the GPUs of one host which each of them has mapped. A block waits only for the blocks of the peers that have
// its number.
//
// A window has chunks (peer_exchange.cu), slots and a counter of launches (peer_exchanges.cuh), flags of blocks, and flags of copy
// engines (peer_window.py). Exchanges through windows run one after another, in the same order and with the same grids on all
// ranks.
//
// Macros (peer_window.py): RANKS. MAX_BLOCKS: the most blocks of a grid. FLAGS_AT: the byte of a window where its flags start.
#pragma once
#include "common/common.cuh"
#include "common/system_flags.cuh"

struct Windows {
    char *of[RANKS];
    int64_t rank; // of this GPU

    __device__ __forceinline__ char *own() const { return of[rank]; }
};

// Rounds of a block. In each round it waits until the block with the same number on every peer has begun it.
struct Rounds {
    const Windows &windows;
    uint32_t number; // of the last round

    __device__ __forceinline__ explicit Rounds(const Windows &windows) : windows(windows) {
        number = *flag(windows.own(), windows.rank);
    }

    // The flag in a window that the same block of `rank` sets. A rank's flag in its own window keeps the number of the last round.
    __device__ __forceinline__ uint32_t *flag(char *window, int64_t rank) const {
        return (uint32_t *)(window + FLAGS_AT) + rank * MAX_BLOCKS + blockIdx.x;
    }

    // All threads call it. What the same blocks of the peers have written before this round is visible after it.
    __device__ __forceinline__ void next() {
        number++;
        __syncthreads();
        const int peer = threadIdx.x;
        if (peer < RANKS && peer != windows.rank) {
            set_flag(flag(windows.of[peer], windows.rank), number);
            wait_for_flag(flag(windows.own(), peer), number);
        }
        __syncthreads();
    }

    // Call after the last round.
    __device__ __forceinline__ void end() const {
        if (threadIdx.x == 0) *flag(windows.own(), windows.rank) = number;
    }
};

// Copies bytes by the threads of a block.
__device__ __forceinline__ void copy_bytes(char *to, const char *from, int64_t size) {
    if ((((uintptr_t)to | (uintptr_t)from | (uintptr_t)size) & 15) == 0) {
        #pragma unroll 4
        for (int64_t i = threadIdx.x; i < size / 16; i += blockDim.x) store(to, 16 * i, load<char, 16>(from + 16 * i));
    } else {
        for (int64_t i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
    }
}
