// Shifted implicit GEMM for stride-1 convolutions on Hopper: the padded flat index, and operands in shared memory.
//
// Positions number the pixels of all images in one flat index. Rows are PITCH positions apart and images IMAGE_PITCH, with
// zeros between them. So each tap is one constant offset (tap_offset) from the output, and one tile of the images in shared
// memory serves all taps. Outputs between images are computed and dropped.
//
// Operands are bf16x3, tf32 or bfloat16 (sm90/bf16x3.cuh), which need no statistics, or fp16x2 (conv/fp16x2.cuh).
//
// Macros: PaddedIndex.macros() in problem.py, and those of each kernel's rule. STAGE_CHANNELS, STAGE_POSITIONS: of a
// pipeline stage. WEIGHT_STAGES: stages of weights. WIDE_C: elements per store.
#pragma once
#include "common/epilogue.cuh"
#include "sm90/bf16x3.cuh"

constexpr int TAPS = KH * KW;
constexpr int REACH_BACK = PH * PITCH + PW;                  // positions from the first tap to the output
constexpr int REACH = (KH - 1) * DH * PITCH + (KW - 1) * DW; // positions from the first tap to the last
__device__ constexpr int tap_offset(int tap_y, int tap_x) { return tap_y * DH * PITCH + tap_x * DW; }

__device__ constexpr int ceil_div(int length, int part) { return (length + part - 1) / part; }

// Offset of an element of the weight gradient in the sums of a split: neighbouring lanes write neighbouring channels.
__device__ __forceinline__ int split_offset(int filter, int channel, int tap) {
    return (tap * OUT_CHANNELS + filter) * IN_CHANNELS + channel;
}

// Stores eight channels of a position in a stage as an operand.
template <class Layout, class Operand> struct StoreOperand {
    char *to;

    __device__ __forceinline__ void operator()(int group, int row, const float (&x)[CHUNK_ELEMENTS]) const {
        Chunk chunks[Operand::CHUNKS];
        Operand::split(chunks, x);
        #pragma unroll
        for (int i = 0; i < Operand::CHUNKS; i++) *(Chunk *)(to + Layout::chunk(i, group, row)) = chunks[i];
    }
};

// Images (N, C, H, W).
template <int C, int H, int W> struct ImageArray {
    static constexpr int AREA = H * W, SIZE = C * AREA;
    const T *x;
    int count;

    // Offset of the element of channel 0 at a position; -1 in the padding.
    __device__ __forceinline__ int at(int position) const {
        const int image = position / IMAGE_PITCH, y = position % IMAGE_PITCH / PITCH, column = position % PITCH;
        const bool inside = position >= 0 && image < count && y < H && column < W;
        return inside ? image * (C * AREA) + y * W + column : -1;
    }

    // Starts to load Layout::ROWS positions from `first` on, and the channels of a stage from `channel` on, into `staging`:
    // one position per thread. finish_load() waits and passes them to store(group of channels, row, elements).
    template <class Layout, int THREADS> __device__ __forceinline__ void start_load(
        T *staging, int thread, int first, int channel) const {
        static_assert(Layout::ROWS <= THREADS, "a position for each thread");
        const int offset = thread < Layout::ROWS ? at(first + thread) : -1;
        #pragma unroll
        for (int i = 0; i < Layout::GROUPS * CHUNK_ELEMENTS; i++)
            cp_async<sizeof(T)>(staging + i * THREADS + thread, x + (offset + (channel + i) * AREA),
                offset >= 0 && channel + i < C);
        cp_async_commit_group();
    }
    template <class Layout, int THREADS, class Store> static __device__ __forceinline__ void finish_load(
        Store &&store, T *staging, int thread) {
        cp_async_wait_group<0>();
        #pragma unroll
        for (int group = 0; group < Layout::GROUPS; group++) {
            float found[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) // volatile: as in `load`
                found[j] = *(volatile T *)(staging + (group * CHUNK_ELEMENTS + j) * THREADS + thread);
            if (thread < Layout::ROWS) store(group, thread, found);
        }
    }

    // Loads Layout::ROWS positions from `first` on, and the channels of a stage from `channel` on. After the phase `parity`
    // of `free` it passes them to store(group of channels, row, elements). Each thread has slots in `staging` for
    // LOADS_IN_FLIGHT chunks.
    template <class Layout, int THREADS, int LOADS_IN_FLIGHT, class Store> __device__ __forceinline__ void load(
        Store &&store, T *staging, int thread, int first, int channel, Mbarrier &free, int parity) const {
        constexpr int COUNT = (Layout::ROWS + THREADS - 1) / THREADS * Layout::GROUPS;
        staging += thread;
        int offset = -1; // of the position that is loaded next
        #pragma unroll 1
        for (int i = 1 - LOADS_IN_FLIGHT; i < COUNT; i++) {
            const int next = i + LOADS_IN_FLIGHT - 1, group = next % Layout::GROUPS;
            if (next < COUNT) {
                const int row = thread + next / Layout::GROUPS * THREADS;
                if (group == 0) offset = row < Layout::ROWS ? at(first + row) : -1;
                const int own = channel + group * CHUNK_ELEMENTS, remaining = offset < 0 ? 0 : C - own;
                const T *from = x + (offset + own * AREA);
                T *slot = staging + next % LOADS_IN_FLIGHT * (CHUNK_ELEMENTS * THREADS);
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS; j++)
                    cp_async<sizeof(T)>(slot + j * THREADS, from + j * AREA, remaining > (C % CHUNK_ELEMENTS == 0 ? 0 : j));
            }
            cp_async_commit_group();
            if (i < 0) continue;
            if (i == 0) free.wait(parity);
            cp_async_wait_group<LOADS_IN_FLIGHT - 1>();
            float found[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) // volatile: the compiler does not know that the wait fills them
                found[j] = *(volatile T *)(staging + (i % LOADS_IN_FLIGHT * CHUNK_ELEMENTS + j) * THREADS);
            const int row = thread + i / Layout::GROUPS * THREADS;
            if (row < Layout::ROWS) store(i % Layout::GROUPS, row, found);
        }
    }
};
typedef ImageArray<IN_CHANNELS, IN_ROWS, IN_COLUMNS> InputImages;

// Loads Layout::ROWS positions from `first` on, and the channels of a stage from `channel` on. An item is CHUNK_ELEMENTS channels of
// WIDE neighbouring positions. Each of THREADS threads loads its next item before it stores the previous one. `first` plus BEFORE
// is a multiple of WIDE.
template <class Layout, int THREADS, int BEFORE> struct ImageLoader {
    static constexpr int WIDE = IN_COLUMNS % 2 == 0 ? 2 : 1; // positions in the same row of an image
    static constexpr int SKIPPED = BEFORE % WIDE;            // positions of the first item before `first`
    static constexpr int ACROSS = (Layout::ROWS + SKIPPED + WIDE - 1) / WIDE, COUNT = ACROSS * Layout::GROUPS;
    const InputImages &images;
    const int thread;
    int first, channel, item; // of the next load
    Vector<T, WIDE> next[CHUNK_ELEMENTS];

    __device__ __forceinline__ void read() {
        const int from = item < COUNT ? images.at(first - SKIPPED + item % ACROSS * WIDE) : -1;
        const int own = channel + item / ACROSS * CHUNK_ELEMENTS;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const bool inside = from >= 0 && own + (IN_CHANNELS % CHUNK_ELEMENTS == 0 ? 0 : j) < IN_CHANNELS;
            next[j] = inside ? ::load<T, WIDE>(images.x + from + (own + j) * InputImages::AREA) : Vector<T, WIDE>{};
        }
    }

    __device__ __forceinline__ void start(int first_, int channel_) {
        first = first_, channel = channel_, item = thread;
        read();
    }

    // Stores all: store(group of channels, row, elements).
    template <class Store> __device__ __forceinline__ void finish(Store &&store) {
        #pragma unroll 1
        while (item < COUNT) {
            Vector<T, WIDE> current[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) current[j] = next[j];
            const int row = item % ACROSS * WIDE - SKIPPED, group = item / ACROSS;
            item += THREADS;
            read();
            #pragma unroll
            for (int i = 0; i < WIDE; i++) {
                if ((unsigned)(row + i) >= Layout::ROWS) continue;
                float x[CHUNK_ELEMENTS];
                #pragma unroll
                for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = current[j].lane[i];
                store(group, row + i, x);
            }
        }
    }
};

// The image and pixel of a position.
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

// K-major core matrices without swizzle: a chunk is 16 bytes, and eight neighbouring positions are a core matrix of 128 bytes. The
// chunks of ROWS positions are contiguous. Of each term, GROUPS groups of eight channels have TERM_CHUNKS chunks each. Either the
// channels or the positions may be K.
template <int ROWS_, int GROUPS_, int TERMS, int TERM_CHUNKS = 1> struct CoreMatrixLayout {
    static constexpr int ROWS = ROWS_, GROUPS = GROUPS_, COLUMNS = GROUPS * TERM_CHUNKS; // COLUMNS: chunks of a row and term
    static constexpr int COLUMN_BYTES = ROWS * CHUNK_BYTES, TERM_BYTES = COLUMNS * COLUMN_BYTES, SIZE = TERMS * TERM_BYTES;
    static __device__ __forceinline__ int offset(int term, int column, int row) {
        return term * TERM_BYTES + column * COLUMN_BYTES + row * CHUNK_BYTES;
    }
    // Of chunk i of a group of channels, in the order of KMajorOperand.
    static __device__ __forceinline__ int chunk(int i, int group, int row) {
        return offset(i / TERM_CHUNKS, group * TERM_CHUNKS + i % TERM_CHUNKS, row);
    }
};
template <int ROWS, int GROUPS, int TERMS = KMajorOperand::TERMS>
using KMajorLayout = CoreMatrixLayout<ROWS, GROUPS, TERMS, KMajorOperand::TERM_CHUNKS>;
