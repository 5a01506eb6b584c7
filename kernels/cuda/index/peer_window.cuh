// Windows: memory of the GPUs of one host which each of them has mapped. Blocks, or warps, with the same number wait for each other.
//
// A window has chunks (peer_exchange.cu), slots (peer_exchanges.cuh) and flags. Exchanges through windows run one after another, in
// the same order and with the same grids on all ranks.
//
// Macros (peer_window.py): RANKS. MAX_BLOCKS: the most blocks of a grid. MAX_WARPS: the most warps that wait by themselves. FLAGS_AT:
// the byte of a window where its flags start.
#pragma once
#include "common/common.cuh"
#include "common/system_flags.cuh"

struct Windows {
    char *of[RANKS];
    int64_t rank; // of this GPU

    __device__ __forceinline__ char *own() const { return of[rank]; }
};

// The threads that wait for the peers together.
struct ByBlock {
    static __device__ __forceinline__ int number() { return blockIdx.x; }
    static __device__ __forceinline__ int thread() { return threadIdx.x; }
    static __device__ __forceinline__ int threads() { return blockDim.x; }
    static __device__ __forceinline__ void sync() { __syncthreads(); }
};
struct ByWarp {
    static __device__ __forceinline__ int number() { return MAX_BLOCKS + (blockIdx.x * blockDim.x + threadIdx.x) / 32; }
    static __device__ __forceinline__ int thread() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int threads() { return 32; }
    static __device__ __forceinline__ void sync() { __syncwarp(); }
};

// Rounds of a block or warp. In each round it waits until the block or warp with the same number on every peer has begun it.
template <typename Group = ByBlock> struct Rounds {
    const Windows &windows;
    uint32_t number; // of the last round

    __device__ __forceinline__ explicit Rounds(const Windows &windows) : windows(windows) {
        number = *flag(windows.own(), windows.rank);
    }

    // The flag in a window that the same group of `rank` sets. A rank's flag in its own window keeps the number of the last round.
    __device__ __forceinline__ uint32_t *flag(char *window, int64_t rank) const {
        return (uint32_t *)(window + FLAGS_AT) + rank * (MAX_BLOCKS + MAX_WARPS) + Group::number();
    }

    // All threads call it. What the same groups of the peers have written before this round is visible after it.
    __device__ __forceinline__ void next() {
        number++;
        Group::sync();
        const int peer = Group::thread();
        if (peer < RANKS && peer != windows.rank) {
            set_flag(flag(windows.of[peer], windows.rank), number);
            wait_for_flag(flag(windows.own(), peer), number);
        }
        Group::sync();
    }

    // Call after the last round.
    __device__ __forceinline__ void end() const {
        if (Group::thread() == 0) *flag(windows.own(), windows.rank) = number;
    }
};

// Copies bytes by the threads of a group.
template <typename Group = ByBlock> __device__ __forceinline__ void copy_bytes(char *to, const char *from, int64_t size) {
    if ((((uintptr_t)to | (uintptr_t)from | (uintptr_t)size) & 15) == 0) {
        #pragma unroll 4
        for (int64_t i = Group::thread(); i < size / 16; i += Group::threads()) store(to, 16 * i, load<char, 16>(from + 16 * i));
    } else {
        for (int64_t i = Group::thread(); i < size; i += Group::threads()) to[i] = from[i];
    }
}
