// The operands of convolutions on Hopper's matrix units, in shared memory: float32 as three bfloat16 numbers whose sum
// it is (Format<BF16X3>), so that nothing has to be measured or scaled first; or as two float16 numbers, see conv/fp16x2.cuh.
//
// Positions: of all images one after another, row by row, PITCH apart, images IMAGE_PITCH apart. They are so far apart that what
// a window reads beyond the end of a row or an image are the zeros that lie between it and the next one. So of all
// outputs an element of the window is as many positions away, and one copy of the images' positions serves all elements
// of the window: products read it from a place that is so much further on. Outputs between images are computed for
// nothing.
//
// A plane: of a piece of 8 channels the positions, 16 bytes each. Units of the matrix are 8 positions by 8 channels, 128
// bytes anywhere in a plane, in which k may be the channels as well as the positions.
#pragma once
#ifndef KH
#define KH 3
#define KW 3
#define PH 1
#define PW 1
#define DH 1
#define DW 1
#define IN_CHANNELS 64
#define IN_ROWS 56
#define IN_COLUMNS 56
#define OUT_CHANNELS 64
#define OUT_ROWS 56
#define OUT_COLUMNS 56
#define PITCH 58
#define IMAGE_PITCH (58 * 58)
#define STAGE_CHANNELS 32
#define WIDE_C 2
#define FLIPPED 0
#define WEIGHT_STAGES 4
#define STAGE_POSITIONS 128
#define SPLIT 1
#define SHARED_BYTES (226 << 10)
#endif
#include "common/epilogue.cuh"
#include "sm90/bf16x3.cuh"

constexpr int TAPS = KH * KW;
constexpr int REACH_BACK = PH * PITCH + PW;                      // positions that a window reaches back
constexpr int REACH = (KH - 1) * DH * PITCH + (KW - 1) * DW; // from its first to its last element
__device__ constexpr int tap_offset(int tap_y, int tap_x) { return tap_y * DH * PITCH + tap_x * DW; }

__device__ constexpr int ceil_div(int length, int part) { return (length + part - 1) / part; }

// Where an element of a gradient by the weights lies in a part of it, to be summed: neighbouring lanes have neighbouring
// channels of some filters.
__device__ __forceinline__ int split_offset(int filter, int channel, int tap) {
    return (tap * OUT_CHANNELS + filter) * IN_CHANNELS + channel;
}

__device__ __forceinline__ bool finite(T x) { return fabs(x) < (T)INFINITY; }

// The first place in shared memory that is aligned to so many bytes; of a pointer into it, so that the compiler knows.
template <int BYTES> __device__ __forceinline__ char *aligned_shared() {
    return (char *)shared_bytes + (BYTES - (unsigned)__cvta_generic_to_shared(shared_bytes) % BYTES) % BYTES;
}

// Puts words in pieces to their places in a stage.
template <class Layout> struct StoreSplit {
    char *to;

    __device__ __forceinline__ void operator()(int plane, int line, const float (&found)[CHUNK_ELEMENTS]) const {
        Chunk words[BF16X3_TERMS];
        split_bf16x3(words, found);
        #pragma unroll
        for (int p = 0; p < TERMS_USED; p++) *(Chunk *)(to + Layout::offset(p, plane, line)) = words[p];
    }
};

// Images (N, C, H, W).
template <int C, int H, int W> struct ImageArray {
    static constexpr int AREA = H * W, SIZE = C * AREA;
    const T *x;
    int count;

    // Where the element of channel 0 at a position lies; -1 where the images have none.
    __device__ __forceinline__ int at(int position) const {
        const int image = position / IMAGE_PITCH, y = position % IMAGE_PITCH / PITCH, column = position % PITCH;
        const bool inside = position >= 0 && image < count && y < H && column < W;
        return inside ? image * (C * AREA) + y * W + column : -1;
    }

    // Starts to copy what a thread's line has, Layout::ROWS from `first` on, of the channels from `channel` on, to slots of its
    // own in `staging`; and hands it on (plane, line, elements).
    template <class Layout, int THREADS> __device__ __forceinline__ void start(
        T *staging, int thread, int first, int channel) const {
        static_assert(Layout::ROWS <= THREADS, "a line for each thread");
        const int place = thread < Layout::ROWS ? at(first + thread) : -1;
        #pragma unroll
        for (int i = 0; i < Layout::GROUPS * CHUNK_ELEMENTS; i++)
            cp_async<sizeof(T)>(staging + i * THREADS + thread, x + (place + (channel + i) * AREA),
                place >= 0 && channel + i < C);
        cp_async_commit_group();
    }
    template <class Layout, int THREADS, class Store> static __device__ __forceinline__ void finish(
        Store &&store, T *staging, int thread) {
        cp_async_wait_group<0>();
        #pragma unroll
        for (int plane = 0; plane < Layout::GROUPS; plane++) {
            float found[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) // as in `gather`
                found[j] = *(volatile T *)(staging + (plane * CHUNK_ELEMENTS + j) * THREADS + thread);
            if (thread < Layout::ROWS) store(plane, thread, found);
        }
    }

    // Hands Layout::ROWS positions from `first` on, of the channels from `channel` on, to `put` (plane, line, elements)
    // once `free` is in the phase of this parity. Of the calling threads each has slots of its own in `staging`, which
    // what it reads passes through, so that LOADS_IN_FLIGHT words are under way at once.
    template <class Layout, int THREADS, int LOADS_IN_FLIGHT, class Store> __device__ __forceinline__ void gather(
        Store &&store, T *staging, int thread, int first, int channel, Mbarrier &free, int parity) const {
        constexpr int COUNT = (Layout::ROWS + THREADS - 1) / THREADS * Layout::GROUPS;
        staging += thread;
        int place = -1; // of the position that is read next
        #pragma unroll 1
        for (int i = 1 - LOADS_IN_FLIGHT; i < COUNT; i++) {
            const int next = i + LOADS_IN_FLIGHT - 1, plane = next % Layout::GROUPS;
            if (next < COUNT) {
                const int line = thread + next / Layout::GROUPS * THREADS;
                if (plane == 0) place = line < Layout::ROWS ? at(first + line) : -1;
                const int own = channel + plane * CHUNK_ELEMENTS, left = place < 0 ? 0 : C - own;
                const T *from = x + (place + own * AREA);
                T *slot = staging + next % LOADS_IN_FLIGHT * (CHUNK_ELEMENTS * THREADS);
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS; j++)
                    cp_async<sizeof(T)>(slot + j * THREADS, from + j * AREA, left > (C % CHUNK_ELEMENTS == 0 ? 0 : j));
            }
            cp_async_commit_group();
            if (i < 0) continue;
            if (i == 0) free.wait(parity);
            cp_async_wait_group<LOADS_IN_FLIGHT - 1>();
            float found[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) // after the wait, as the compiler cannot see what they have to do with it
                found[j] = *(volatile T *)(staging + (i % LOADS_IN_FLIGHT * CHUNK_ELEMENTS + j) * THREADS);
            const int line = thread + i / Layout::GROUPS * THREADS;
            if (line < Layout::ROWS) store(i % Layout::GROUPS, line, found);
        }
    }
};
typedef ImageArray<IN_CHANNELS, IN_ROWS, IN_COLUMNS> InputImages;

// An output's position.
struct OutputPosition {
    int image, y, x;

    __device__ explicit OutputPosition(int position)
        : image(position / IMAGE_PITCH), y(position % IMAGE_PITCH / PITCH), x(position % PITCH) {}

    __device__ __forceinline__ void advance(int positions) {
        x += positions;
        while (x >= PITCH) {
            x -= PITCH;
            if (++y == IMAGE_PITCH / PITCH) y = 0, image++;
        }
    }
    __device__ __forceinline__ bool inside(int batch) const { return image < batch && y < OUT_ROWS && x < OUT_COLUMNS; }
};

// Where the words of ROWS positions lie, 8 GROUPS channels of each of COUNT pieces: in planes.
template <int ROWS_, int GROUPS_, int COUNT = BF16X3_TERMS> struct CoreMatrixLayout {
    static constexpr int ROWS = ROWS_, GROUPS = GROUPS_;
    static constexpr int GROUP_BYTES = ROWS * CHUNK_BYTES, TERM_BYTES = GROUPS * GROUP_BYTES, SIZE = COUNT * TERM_BYTES; // bytes
    static __device__ __forceinline__ int offset(int piece, int plane, int line) {
        return piece * TERM_BYTES + plane * GROUP_BYTES + line * CHUNK_BYTES;
    }
};
