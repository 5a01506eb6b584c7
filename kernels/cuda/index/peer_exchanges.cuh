// Exchanges in generated kernels (forms/peer_exchanges.py): optimizer updates between an all-to-all of gradients and an
// all-gather of parameters, or after an exchange of whole gradients; and all-gathers of a few bytes.
//
// Data goes to slots in the windows of the peers. Launches use two sets of slots in turn, so no slot is written before it is read:
// when launch n + 2 begins on this GPU, its launch n + 1 has ended, in which it has received gradients from every peer. So every
// peer has begun launch n + 1, after it had ended launch n and had read the slots of that launch.
//
// In the slots of vectors, data is its own flag, as in the Lamport protocol of TensorRT-LLM's all-reduce: an element is EMPTY, a NaN
// that is never sent, until data arrives. A thread waits for the elements that it reads, and makes them EMPTY again. So a sender
// needs no fence. Threads of two GPUs store in a slot, so all of its loads and stores have system scope (PTX ISA, "Memory
// Consistency Model": a weak store and a store of another GPU would be a data race). All-gathers set flags (Rounds).
//
// Macros (peer_window.py): SLOTS_AT: the byte of a window where the slots of vectors start. SLOT: bytes of such a slot.
// ITEM_SLOTS_AT, ITEM_SLOT: the same for the items of all-gathers. LAUNCHES_AT: the byte where launches are counted. Others:
// peer_window.cuh.
#pragma once
#include "index/peer_window.cuh"

// The blocks of a launch together add LAUNCH to the counter of launches. So counter / LAUNCH stays the same until each of them
// has read it and added its share.
constexpr uint32_t LAUNCH = 1 << 16;

__device__ __forceinline__ uint32_t *launches(const Windows &windows) { return (uint32_t *)(windows.own() + LAUNCHES_AT); }

// 0 and 1 in alternate launches.
__device__ __forceinline__ int parity(const Windows &windows) { return *(volatile uint32_t *)launches(windows) / LAUNCH % 2; }

// Adds the share of a block to the counter of launches. Each block that exchanges data calls it once, with all threads, after
// they have called `parity`. number: of the block among `blocks`.
__device__ __forceinline__ void add_share(const Windows &windows, int number, int blocks) {
    const uint32_t share = LAUNCH / blocks;
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(launches(windows), number ? share : LAUNCH - share * (blocks - 1));
}

template <int BYTES> struct WordOf { typedef uint32_t Type; };
template <> struct WordOf<8> { typedef uint64_t Type; };

// The bits of an element.
template <typename E> struct Bits {
    static_assert(sizeof(E) == 4 || sizeof(E) == 8, "float or double");
    typedef typename WordOf<sizeof(E)>::Type Word;
    static constexpr Word EMPTY = ~(Word)0;

    static __device__ __forceinline__ Word of(E x) {
        Word word;
        memcpy(&word, &x, sizeof(E));
        return word;
    }
    static __device__ __forceinline__ E number(Word word) {
        E x;
        memcpy(&x, &word, sizeof(E));
        return x;
    }
};

// Stores elements where a thread of another GPU may wait for them, and another NaN in place of EMPTY.
template <typename E, int N> __device__ __forceinline__ void send(E *to, const Vector<E, N> &v) {
    typedef typename Bits<E>::Word Word;
    Word words[N];
    #pragma unroll
    for (int k = 0; k < N; k++) {
        const Word word = Bits<E>::of(v.lane[k]);
        words[k] = word == Bits<E>::EMPTY ? word >> 1 : word;
    }
    store_words((Word *)to, words);
}

// Elements that a thread reads when they have arrived, each once in a launch. local: this rank has computed them.
template <typename E> struct Arriving {
    E *at;
    bool local;

    __device__ __forceinline__ Arriving operator+(int64_t i) const { return {at + i, local}; }
    __device__ __forceinline__ E operator[](int64_t i) const;
    __device__ __forceinline__ explicit operator uintptr_t() const { return (uintptr_t)at; }
};

template <typename E, int N> __device__ __forceinline__ Vector<E, N> load(const Arriving<E> &from) {
    typedef typename Bits<E>::Word Word;
    if (from.local) return load<E, N>((const E *)from.at);
    Word words[N];
    wait_for_words(words, (const Word *)from.at, Bits<E>::EMPTY);
    Vector<E, N> found;
    #pragma unroll
    for (int k = 0; k < N; k++) found.lane[k] = Bits<E>::number(words[k]), words[k] = Bits<E>::EMPTY;
    store_words((Word *)from.at, words);
    return found;
}

template <typename E> __device__ __forceinline__ E Arriving<E>::operator[](int64_t i) const { return load<E, 1>(*this + i).lane[0]; }

// Pointers to the same elements in the memory of all ranks: what is stored is stored everywhere.
template <typename E> struct Everywhere {
    E *at[RANKS];

    struct Element {
        const Everywhere &to;
        int64_t i;

        __device__ __forceinline__ void operator=(E x) const {
            #pragma unroll
            for (int rank = 0; rank < RANKS; rank++) send(to.at[rank] + i, Vector<E, 1>{x});
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
    for (int rank = 0; rank < RANKS; rank++) send(to.at[rank] + i, v);
}

// A warp's part of an exchange of vectors or slices of `length` elements: elements `start` to `start + count`.
template <typename E> struct WarpPart {
    static constexpr int WIDE = 16 / sizeof(E);
    const Windows &windows;
    const int64_t rank, start, byte; // rank: of this GPU. byte: of the part in a slot
    const int count, launch;         // launch: its parity

    // at: the byte in a slot where the vector starts.
    __device__ __forceinline__ WarpPart(const Windows &windows, int64_t at, int64_t length, int span, int block)
        : windows(windows), rank(windows.rank), start((int64_t)(block * blockDim.x + threadIdx.x) / 32 * span),
          byte(at + start * sizeof(E)), count(max((int64_t)0, min(length - start, (int64_t)span))), launch(parity(windows)) {}

    // The part in the window of `receiver`, sent by `sender`. round: of the exchange, 0 or 1.
    __device__ __forceinline__ E *slot(int round, int64_t receiver, int64_t sender) const {
        return (E *)(windows.of[receiver] + SLOTS_AT + ((2 * round + launch) * RANKS + sender) * (int64_t)SLOT + byte);
    }

    // What `sender` sends to this rank in the first round. own: where this rank has its own elements.
    __device__ __forceinline__ Arriving<E> from(int64_t sender, const E *own) const {
        return {sender == rank ? (E *)own : slot(0, rank, sender), sender == rank};
    }

    // Copies the part from memory to a slot, or from a slot to memory.
    template <typename From> __device__ __forceinline__ void copy(E *to, const From &from) const {
        const int lane = threadIdx.x % 32, vectors = ((uintptr_t)to | (uintptr_t)from) % 16 == 0 ? count / WIDE : 0;
        #pragma unroll 2
        for (int i = lane * WIDE; i < vectors * WIDE; i += 32 * WIDE) send(to + i, load<E, WIDE>(from + i));
        for (int i = vectors * WIDE + lane; i < count; i += 32) send(to + i, load<E, 1>(from + i));
    }
};

// The exchange of a vector with a slice of `length` elements for each rank. A warp's part is the same in every slice.
template <typename E> struct SliceExchange {
    const WarpPart<E> part;
    const int64_t length, own, start; // own: the element of a vector where this rank's part starts
    const int count;

    __device__ __forceinline__ SliceExchange(const Windows &windows, int64_t at, int64_t length, int span, int block)
        : part(windows, at, length, span, block), length(length), own(part.rank * length + part.start), start(part.start),
          count(part.count) {}

    // First round: sends to each rank its slice of `vector`.
    __device__ __forceinline__ void send(const E *vector) const {
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != part.rank) part.copy(part.slot(0, peer, part.rank), vector + peer * length + start);
    }
    __device__ __forceinline__ Arriving<E> received(const E *vector, int64_t rank) const { return part.from(rank, vector + own); }

    // Second round: what is stored to the result goes to this rank's slice of `vector`, and to the peers.
    __device__ __forceinline__ Everywhere<E> updated(E *vector) const {
        Everywhere<E> to;
        #pragma unroll
        for (int rank = 0; rank < RANKS; rank++) to.at[rank] = rank == part.rank ? vector + own : part.slot(1, rank, part.rank);
        return to;
    }

    // Copies what the peers have stored to their slices of `vector`.
    __device__ __forceinline__ void finish(E *vector) const {
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != part.rank)
                part.copy(vector + peer * length + start, Arriving<E>{part.slot(1, part.rank, peer), false});
    }
};

// An exchange in which each rank sends its whole vector, of `length` elements, to all others. It takes one round. Between two GPUs
// it sends as many bytes as SliceExchange. Its functions have the names of those of SliceExchange.
template <typename E> struct WholeExchange {
    const WarpPart<E> part;
    const int64_t own, start; // own: the element of a vector where this part starts
    const int count;

    __device__ __forceinline__ WholeExchange(const Windows &windows, int64_t at, int64_t length, int span, int block)
        : part(windows, at, length, span, block), own(part.start), start(part.start), count(part.count) {}

    __device__ __forceinline__ void send(const E *vector) const {
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != part.rank) part.copy(part.slot(0, peer, part.rank), vector + own);
    }
    __device__ __forceinline__ Arriving<E> received(const E *vector, int64_t rank) const { return part.from(rank, vector + own); }
    __device__ __forceinline__ E *updated(E *vector) const { return vector + own; }
    __device__ __forceinline__ void finish(E *) const {}
};

// An all-gather by one block: item r of `received` is what rank r has sent. size: bytes of an item. at: its byte in a slot.
__device__ __forceinline__ void gather_from_peers(
    const Windows &windows, const char *sent, char *received, int64_t at, int64_t size) {
    Rounds rounds(windows);
    const int launch = parity(windows);
    const auto item = [&](int64_t receiver, int64_t sender) {
        return windows.of[receiver] + ITEM_SLOTS_AT + (launch * RANKS + sender) * (int64_t)ITEM_SLOT + at;
    };
    for (int rank = 0; rank < RANKS; rank++)
        copy_bytes(rank == windows.rank ? received + rank * size : item(rank, windows.rank), sent, size);
    rounds.next();
    for (int peer = 0; peer < RANKS; peer++)
        if (peer != windows.rank) copy_bytes(received + peer * size, item(windows.rank, peer), size);
    rounds.end();
}
