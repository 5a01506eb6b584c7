// Copies 32 neighbouring items between global memory and the registers of a warp, of which each thread has one item. Copies go
// through shared memory. So lanes access neighbouring addresses, and loads begin before their elements are needed.
#pragma once
#include "common/common.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

// How pieces, COUNT elements of each of 32 items, lie in a stage: a row of vectors of WIDE elements for each item. The pitch of
// rows is an odd number of vectors, so the lanes of a warp read their rows from different banks.
template <typename E, int COUNT, int WIDE> struct Piece {
    static constexpr int VECTORS = COUNT / WIDE, PITCH = VECTORS % 2 ? VECTORS : VECTORS + 1;
    static constexpr int BYTES = 32 * PITCH * WIDE * sizeof(E);
    const int lane = threadIdx.x % 32;

    // The item, and the first element of its piece, that this lane copies in step i.
    __device__ __forceinline__ int row(int i) const {
        return 32 % VECTORS ? (lane + 32 * i) / VECTORS : lane / VECTORS + i * (32 / VECTORS);
    }
    __device__ __forceinline__ int at(int i) const {
        return (32 % VECTORS ? (lane + 32 * i) % VECTORS : lane % VECTORS) * WIDE;
    }
    static __device__ __forceinline__ Vector<E, WIDE> *place(char *stage, int row, int at) {
        return reinterpret_cast<Vector<E, WIDE> *>(stage) + row * PITCH + at / WIDE;
    }
};

// A stage has STAGE bytes of shared memory, and holds pieces of 32 items.
template <int STAGE> struct WarpItems {
    char *const stages;        // shared memory of the warp
    const int64_t first, left; // the first item of the warp; the number of items from it on

    // Begins to copy elements FIRST, ... FIRST + COUNT - 1 of items of LENGTH elements to stage AT.
    template <int AT, int LENGTH, int FIRST, int COUNT, int WIDE, typename E> __device__ __forceinline__ void begin(const E *x) const {
        const Piece<E, COUNT, WIDE> piece;
        static_assert(piece.BYTES <= STAGE, "codegen/thread_items.py");
        const E *const from = x + first * LENGTH + FIRST;
        #pragma unroll
        for (int i = 0; i < piece.VECTORS; i++) {
            const int row = piece.row(i), at = piece.at(i);
            Vector<E, WIDE> *const to = piece.place(stages + AT * STAGE, row, at);
            constexpr int BYTES = sizeof(E) * WIDE;
            if constexpr (BYTES >= 4)
                cp_async<BYTES>((E *)to, from + row * LENGTH + at, row < left);
            else if (row < left)
                *to = load<E, WIDE>(from + row * LENGTH + at);
        }
        cp_async_commit_group();
    }

    // Waits for the copy to stage AT, and reads the elements of this thread. The last PENDING copies need not be complete.
    template <int AT, int PENDING, int COUNT, int WIDE, typename E> __device__ __forceinline__ void finish(E (&to)[COUNT]) const {
        const Piece<E, COUNT, WIDE> piece;
        static_assert(piece.BYTES <= STAGE, "codegen/thread_items.py");
        cp_async_wait_group<PENDING>();
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < piece.VECTORS; i++) {
            const Vector<E, WIDE> v = *piece.place(stages + AT * STAGE, piece.lane, i * WIDE);
            #pragma unroll
            for (int k = 0; k < WIDE; k++) to[i * WIDE + k] = v.lane[k];
        }
        __syncwarp();
    }

    // Writes elements FIRST, ... FIRST + COUNT - 1 of the items, through stage AT.
    template <int AT, int LENGTH, int FIRST, int COUNT, int WIDE, typename E>
    __device__ __forceinline__ void store(const E (&from)[COUNT], E *y) const {
        const Piece<E, COUNT, WIDE> piece;
        static_assert(piece.BYTES <= STAGE, "codegen/thread_items.py");
        char *const stage = stages + AT * STAGE;
        #pragma unroll
        for (int i = 0; i < piece.VECTORS; i++) {
            Vector<E, WIDE> v;
            #pragma unroll
            for (int k = 0; k < WIDE; k++) v.lane[k] = from[i * WIDE + k];
            *piece.place(stage, piece.lane, i * WIDE) = v;
        }
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < piece.VECTORS; i++) {
            const int row = piece.row(i), at = piece.at(i);
            if (row < left) ::store(y + first * LENGTH + FIRST, row * LENGTH + at, *piece.place(stage, row, at));
        }
        __syncwarp();
    }
};
