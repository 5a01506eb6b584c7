// Exchanges in generated kernels (codegen/peer_exchanges.py): optimizer updates between an all-to-all of gradients and an
// all-gather of parameters, or after an exchange of whole gradients; and all-gathers of a few bytes.
//
// Data goes to slots in the windows of the peers. Each rank has four. No slot is written while it is read:
// - SliceExchange has two rounds in a launch, and a slot for each. When launch n + 1 begins, launch n has ended on this GPU. So the
//   peers have begun round 2 of launch n, and have read the slot of round 1. When round 2 of launch n + 1 begins, the peers have
//   begun this launch. So they have ended launch n, and have read the slot of round 2.
// - The other exchanges have one round, and alternate between two slots. When launch n + 2 begins, launch n + 1 has ended on this
//   GPU. So the peers have begun it. So they have ended launch n, and have read its slot.
//
// Macros (peer_window.py): SLOTS_AT: the byte of a window where slots start. SLOT: bytes of a slot. LAUNCHES_AT: the byte of a
// window where launches are counted. Others: peer_window.cuh.
#pragma once
#include "index/peer_window.cuh"

// The slot in a window for what `rank` sends. number: 0 or 1, the round of SliceExchange; or what `alternate_slot` returns.
__device__ __forceinline__ char *slot(char *window, int number, int64_t rank) {
    return window + SLOTS_AT + (number * RANKS + rank) * (int64_t)SLOT;
}

// The blocks of a launch together add LAUNCH to the counter of launches. So counter / LAUNCH stays the same until each of them
// has read it and added its share.
constexpr uint32_t LAUNCH = 1 << 16;

__device__ __forceinline__ uint32_t *launches(const Windows &windows) { return (uint32_t *)(windows.own() + LAUNCHES_AT); }

// The number of the slot of an exchange with one round: 2 and 3 in alternate launches.
__device__ __forceinline__ int alternate_slot(const Windows &windows) {
    return 2 + *(volatile uint32_t *)launches(windows) / LAUNCH % 2;
}

// Adds the share of a block to the counter of launches. Each block of an exchange with one round calls it once, after all of its
// threads have called alternate_slot. number: of the block among `blocks`.
__device__ __forceinline__ void add_share(const Windows &windows, int number, int blocks) {
    const uint32_t share = LAUNCH / blocks;
    if (threadIdx.x == 0) atomicAdd(launches(windows), number ? share : LAUNCH - share * (blocks - 1));
}

// Pointers to the same elements in the memory of all ranks: what is stored is stored everywhere.
template <typename E> struct Everywhere {
    E *at[RANKS];

    struct Element {
        const Everywhere &to;
        int64_t i;

        __device__ __forceinline__ void operator=(E x) const {
            #pragma unroll
            for (int rank = 0; rank < RANKS; rank++) to.at[rank][i] = x;
        }
    };

    __device__ __forceinline__ Element operator[](int64_t i) const { return {*this, i}; }
    __device__ __forceinline__ explicit operator uintptr_t() const {
        uintptr_t bits = 0;
        #pragma unroll
        for (int rank = 0; rank < RANKS; rank++) bits |= (uintptr_t)at[rank];
        return bits;
    }
};

template <typename E, int N>
__device__ __forceinline__ void store(const Everywhere<E> &to, int64_t i, const Vector<E, N> &v) {
    #pragma unroll
    for (int rank = 0; rank < RANKS; rank++) store(to.at[rank], i, v);
}

// A block's part of the exchange of a vector, which has a slice of `length` elements for each rank. The part is elements `start` to
// `start + count` of every slice.
template <typename E> struct SliceExchange {
    const Windows &windows;
    Rounds<> rounds;
    const int64_t length, start, own; // own: the element of a vector where this rank's part starts
    const int count;
    const int64_t byte; // of the part in a slot

    // at: the byte in a slot where the slice starts.
    __device__ __forceinline__ SliceExchange(const Windows &windows, int64_t at, int64_t length, int span, int block)
        : windows(windows), rounds(windows), length(length), start((int64_t)block * span),
          own(windows.rank * length + start), count(length - start < span ? length - start : span),
          byte(at + start * sizeof(E)) {}

    // First half: sends to each rank its slice of `vector`.
    __device__ __forceinline__ void send(const E *vector) {
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != windows.rank)
                copy_bytes(slot(windows.of[peer], 0, windows.rank) + byte, (const char *)(vector + peer * length + start),
                    count * sizeof(E));
        rounds.next();
    }

    // What `rank` has sent. vector: what this rank has sent.
    __device__ __forceinline__ const E *received(const E *vector, int64_t rank) const {
        return rank == windows.rank ? vector + own : (const E *)(slot(windows.own(), 0, rank) + byte);
    }

    // Second half: what is stored to the result goes to this rank's slice of `vector`, and to the peers.
    __device__ __forceinline__ Everywhere<E> updated(E *vector) const {
        Everywhere<E> to;
        #pragma unroll
        for (int rank = 0; rank < RANKS; rank++)
            to.at[rank] = rank == windows.rank ? vector + own : (E *)(slot(windows.of[rank], 1, windows.rank) + byte);
        return to;
    }

    // Copies what the peers have stored to their slices of `vector`.
    __device__ __forceinline__ void finish(E *vector, int block, int blocks) {
        rounds.next();
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != windows.rank)
                copy_bytes((char *)(vector + peer * length + start), slot(windows.own(), 1, peer) + byte, count * sizeof(E));
        rounds.end();
    }
};

// A warp's part of an exchange in which each rank sends its whole vector, of `length` elements, to all others. The part is elements
// `start` to `start + count`. It takes one round. Between two GPUs it sends as many bytes as SliceExchange. Warps do not wait for
// each other, so some warps update their elements while the data of other warps arrives.
template <typename E> struct WholeExchange {
    const Windows &windows;
    Rounds<ByWarp> rounds;
    const int64_t start, own; // own: the element of a vector where this part starts, which is `start`
    const int count;
    const int64_t byte; // of the part in a slot
    const int number;   // of the slot

    // at: the byte in a slot where the vector starts.
    __device__ __forceinline__ WholeExchange(const Windows &windows, int64_t at, int64_t length, int span, int block)
        : windows(windows), rounds(windows), start((int64_t)(block * blockDim.x + threadIdx.x) / 32 * span), own(start),
          count(length - start < span ? (length > start ? length - start : 0) : span), byte(at + start * sizeof(E)),
          number(alternate_slot(windows)) {}

    __device__ __forceinline__ void send(const E *vector) {
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != windows.rank)
                copy_bytes<ByWarp>(slot(windows.of[peer], number, windows.rank) + byte, (const char *)(vector + start),
                    count * sizeof(E));
        rounds.next();
    }

    // What `rank` has sent. vector: what this rank has sent.
    __device__ __forceinline__ const E *received(const E *vector, int64_t rank) const {
        return rank == windows.rank ? vector + start : (const E *)(slot(windows.own(), number, rank) + byte);
    }

    __device__ __forceinline__ E *updated(E *vector) const { return vector + start; }

    // block: the number of this block among `blocks` of exchanges with one round.
    __device__ __forceinline__ void finish(E *vector, int block, int blocks) {
        rounds.end();
        __syncthreads();
        add_share(windows, block, blocks);
    }
};

// An all-gather by one block: item r of `received` is what rank r has sent. size: bytes of an item. at: its byte in a slot. block:
// the number of this block among `blocks` of exchanges with one round.
__device__ __forceinline__ void gather_from_peers(
    const Windows &windows, const char *sent, char *received, int64_t at, int64_t size, int block, int blocks) {
    Rounds<> rounds(windows);
    const int number = alternate_slot(windows);
    for (int rank = 0; rank < RANKS; rank++)
        copy_bytes(rank == windows.rank ? received + rank * size : slot(windows.of[rank], number, windows.rank) + at, sent, size);
    rounds.next();
    for (int peer = 0; peer < RANKS; peer++)
        if (peer != windows.rank) copy_bytes(received + peer * size, slot(windows.own(), number, peer) + at, size);
    rounds.end();
    add_share(windows, block, blocks);
}
