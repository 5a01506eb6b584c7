// The gradient behind a max pooling of windows of 2 x 2, which is zero but for one position of each window, as an
// operand of Hopper's matrix units that is sparse: of four neighbouring k at most two are not zero. Read conv/shifted.cuh first.
//
// A pair holds both positions of a row of a window, of which one at most is not zero: that number, and which of the two it
// is. Lines lie one behind the other as positions do, PITCH / 2 of them a row, so what is 2 n positions away is n pairs
// away. Images have an even number of rows, those between them included.
#pragma once
#include "conv/shifted.cuh"

constexpr int PAIR_PITCH = PITCH / 2, IMAGE_PAIRS = IMAGE_PITCH / 2;
static_assert(IMAGE_PITCH % (2 * PITCH) == 0, "an image ends with a row of windows");

// (N, C, H / 2, W / 2), and where in its window each number lies, row by row.
template <int C, int H, int W> struct PooledGradients {
    static constexpr int ROWS = H / 2, COLUMNS = W / 2, AREA = ROWS * COLUMNS;
    const T *g;
    const int32_t *where;
    int images;

    // CHUNK_ELEMENTS neighbouring channels of a window.
    struct Window {
        float g[CHUNK_ELEMENTS];
        int where[CHUNK_ELEMENTS];
    };

    // row: of all images' windows, from one image in front of the first on.
    __device__ __forceinline__ void read(Window &found, int row, int column, int channel) const {
        constexpr int ROWS_OF_IMAGE = IMAGE_PAIRS / PAIR_PITCH / 2;
        const int image = row / ROWS_OF_IMAGE - 1, y = row % ROWS_OF_IMAGE;
        const bool inside = (unsigned)image < (unsigned)images && y < ROWS && column < COLUMNS;
        const int at = (image * C + channel) * AREA + y * COLUMNS + column;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const bool there = inside && channel + (C % CHUNK_ELEMENTS == 0 ? 0 : j) < C;
            found.g[j] = there ? g[at + j * AREA] : 0;
            found.where[j] = there ? where[at + j * AREA] : 0;
        }
    }

    // Where the number at a place of an image lies; -1 where there is none.
    __device__ __forceinline__ int at(int image, int channel, int y, int x) const {
        if (image >= images || y < 0 || x < 0 || y / 2 >= ROWS || x / 2 >= COLUMNS) return -1;
        const int window = (image * C + channel) * AREA + y / 2 * COLUMNS + x / 2;
        return where[window] == y % 2 * 2 + x % 2 ? window : -1;
    }
};

// Brings Layout::ROWS pairs from `first` on, of the channels from `channel` on, to a stage: THREADS threads read windows,
// each the next one before it puts the last one's pairs to their places. All but SHARING, the last ones, take one each.
template <class Layout, int THREADS, class Gradients, int SHARING = THREADS> struct PooledGradientLoader {
    static constexpr int ROW = 2 * PAIR_PITCH; // pairs of a row of windows
    const Gradients &gradients;
    const int thread;
    int first, channel, window, group; // window, group: what is read next
    typename Gradients::Window next;

    // The first row of windows that has such pairs; windows, from its first one on, that have any.
    __device__ __forceinline__ int top() const { return first / ROW; }
    __device__ __forceinline__ int count() const { return ((first + Layout::ROWS - 1) / ROW - top() + 1) * PAIR_PITCH; }

    __device__ __forceinline__ void advance(int windows) { // so neighbouring threads have neighbouring windows
        for (window += windows; window >= count(); window -= count()) group++;
    }
    __device__ __forceinline__ void read() {
        if (group < Layout::GROUPS)
            gradients.read(next, top() + window / PAIR_PITCH, window % PAIR_PITCH, channel + group * CHUNK_ELEMENTS);
    }

    __device__ __forceinline__ void start(int first_, int channel_) {
        first = first_ + IMAGE_PAIRS, channel = channel_; // which is not below 0
        window = group = 0;
        advance(thread);
        read();
    }

    // Hands all pairs to `put` (group, pair, words in terms, of each channel a bit: which of the pair's positions it is).
    template <class Store> __device__ __forceinline__ void finish(Store &&store) {
        #pragma unroll 1
        while (group < Layout::GROUPS) {
            const auto now = next;
            const int own = group, pair = (top() + window / PAIR_PITCH) * ROW + window % PAIR_PITCH - first;
            if (thread >= THREADS - SHARING)
                advance(SHARING);
            else
                group = Layout::GROUPS;
            read();
            Chunk words[BF16X3_TERMS];
            split_bf16x3(words, now.g);
            uint32_t upper[CHUNK_ELEMENTS / 2], which = 0; // upper: of two channels, those in the window's first row
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) {
                const uint32_t half = now.where[j] < 2 ? 0xffffu << j % 2 * 16 : 0;
                upper[j / 2] = j % 2 == 0 ? half : upper[j / 2] | half;
                which |= (now.where[j] & 1) << j;
            }
            #pragma unroll
            for (int row = 0; row < 2; row++) {
                if ((unsigned)(pair + row * PAIR_PITCH) >= Layout::ROWS) continue;
                Chunk of_row[BF16X3_TERMS];
                #pragma unroll
                for (int p = 0; p < BF16X3_TERMS; p++)
                    #pragma unroll
                    for (int j = 0; j < CHUNK_ELEMENTS / 2; j++)
                        of_row[p].lane[j] = words[p].lane[j] & (row == 0 ? upper[j] : ~upper[j]);
                store(own, pair + row * PAIR_PITCH, of_row, which);
            }
        }
    }
};
