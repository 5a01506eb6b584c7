// Exchanges in generated kernels (codegen/peer_exchanges.py): optimizer updates between an all-to-all of gradients and an
// all-gather of parameters, or after an exchange of whole gradients; and all-gathers of a few bytes.
//
// Data goes to slots in the windows of the peers. Each rank has four. No slot is written while it is read:
// - SliceExchange has two rounds in a launch, and a slot for each. When a launch begins, the launch before it has ended on this GPU.
//   So the peers have begun its second round, and have read what they received in the first one. When the second round begins, the
//   peers have begun this launch. So they have ended the launch before it.
// - The others have one round, and use two slots in turn. When launch n + 2 begins, launch n + 1 has ended on this GPU. So the peers
//   have begun it, and have ended launch n.
//
// Macros (peer_window.py): SLOTS_AT: the byte of a window where slots start. SLOT: bytes of a slot. LAUNCHES_AT: the byte of a
// window where launches are counted. Others: peer_window.cuh.
#pragma once
#include "index/peer_window.cuh"

// A slot of what a rank sends, in a window. number: of a round of SliceExchange, or what `turn` returns.
__device__ __forceinline__ char *slot(char *window, int number, int64_t rank) {
    return window + SLOTS_AT + (number * RANKS + rank) * (int64_t)SLOT;
}

// What the blocks of a launch add together to the counter of launches. Less is added until all of them have read it.
constexpr uint32_t LAUNCH = 1 << 16;

__device__ __forceinline__ uint32_t *launches(const Windows &windows) { return (uint32_t *)(windows.own() + LAUNCHES_AT); }

// The slot for this launch of an exchange with one round.
__device__ __forceinline__ int turn(const Windows &windows) { return 2 + *(volatile uint32_t *)launches(windows) / LAUNCH % 2; }

// Each block of an exchange with one round calls it once when all its threads know the turn. number: of the block among `blocks`.
__device__ __forceinline__ void end_turn(const Windows &windows, int number, int blocks) {
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

// The part of a block in the exchange of a vector that has a slice of `length` elements for each rank: elements `start` to
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

    // First half: each rank's slice of a vector goes to that rank.
    __device__ __forceinline__ void send(const E *vector) {
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != windows.rank)
                copy_bytes(slot(windows.of[peer], 0, windows.rank) + byte, (const char *)(vector + peer * length + start),
                    count * sizeof(E));
        rounds.next();
    }

    // What `rank` has sent; `vector` is what this rank has sent.
    __device__ __forceinline__ const E *received(const E *vector, int64_t rank) const {
        return rank == windows.rank ? vector + own : (const E *)(slot(windows.own(), 0, rank) + byte);
    }

    // Second half: stores to this go to this rank's slice of `vector`, and to the peers.
    __device__ __forceinline__ Everywhere<E> updated(E *vector) const {
        Everywhere<E> to;
        #pragma unroll
        for (int rank = 0; rank < RANKS; rank++)
            to.at[rank] = rank == windows.rank ? vector + own : (E *)(slot(windows.of[rank], 1, windows.rank) + byte);
        return to;
    }

    // Puts what the peers have stored into their slices of `vector`.
    __device__ __forceinline__ void finish(E *vector, int block, int blocks) {
        rounds.next();
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != windows.rank)
                copy_bytes((char *)(vector + peer * length + start), slot(windows.own(), 1, peer) + byte, count * sizeof(E));
        rounds.end();
    }
};

// The part of a warp in an exchange in which all ranks send their whole vectors, of `length` elements, to all others: elements
// `start` to `start + count`. It takes one round. Between two GPUs it sends as many bytes as SliceExchange. Warps do not wait for
// each other, so some update elements while data of others arrives.
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
          number(turn(windows)) {}

    __device__ __forceinline__ void send(const E *vector) {
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != windows.rank)
                copy_bytes<ByWarp>(slot(windows.of[peer], number, windows.rank) + byte, (const char *)(vector + start),
                    count * sizeof(E));
        rounds.next();
    }

    // What `rank` has sent; `vector` is what this rank has sent.
    __device__ __forceinline__ const E *received(const E *vector, int64_t rank) const {
        return rank == windows.rank ? vector + start : (const E *)(slot(windows.own(), number, rank) + byte);
    }

    __device__ __forceinline__ E *updated(E *vector) const { return vector + start; }

    // block: the number of this block among `blocks` of exchanges with one round.
    __device__ __forceinline__ void finish(E *vector, int block, int blocks) {
        rounds.end();
        __syncthreads();
        end_turn(windows, block, blocks);
    }
};

// An all-gather by one block: item r of `received` is what rank r has sent. size: bytes of an item. at: its byte in a slot. block:
// the number of this block among `blocks` of exchanges with one round.
__device__ __forceinline__ void gather_from_peers(
    const Windows &windows, const char *sent, char *received, int64_t at, int64_t size, int block, int blocks) {
    Rounds<> rounds(windows);
    const int number = turn(windows);
    for (int rank = 0; rank < RANKS; rank++)
        copy_bytes(rank == windows.rank ? received + rank * size : slot(windows.of[rank], number, windows.rank) + at, sent, size);
    rounds.next();
    for (int peer = 0; peer < RANKS; peer++)
        if (peer != windows.rank) copy_bytes(received + peer * size, slot(windows.own(), number, peer) + at, size);
    rounds.end();
    end_turn(windows, block, blocks);
}
