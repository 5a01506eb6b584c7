// The gradient through a 2 x 2 max pooling as a 2:4 sparse WGMMA operand. It is zero but for one position of each
// window, so of four neighbouring k at most two are not zero. Read conv/shifted.cuh first.
//
// A pair is the two positions of a row of a window. At most one is not zero: the operand has that number, and a bit that
// selects the position. Pairs are in the order of positions, PAIR_PITCH per row, so 2 n positions are n pairs. Images have an
// even number of rows, padding included.
#pragma once
#include "conv/shifted.cuh"

constexpr int PAIR_PITCH = PITCH / 2, IMAGE_PAIRS = IMAGE_PITCH / 2;
static_assert(IMAGE_PITCH % (2 * PITCH) == 0, "an image ends with a row of windows");

// The pooled gradient (N, C, H / 2, W / 2), and the position of each number in its window (0 to 3, row by row).
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

    // row: of windows in the flat index, from one image before the first one on.
    __device__ __forceinline__ void read(Window &found, int row, int column, int channel) const {
        constexpr int ROWS_OF_IMAGE = IMAGE_PAIRS / PAIR_PITCH / 2;
        const int image = row / ROWS_OF_IMAGE - 1, y = row % ROWS_OF_IMAGE;
        const bool inside = (unsigned)image < (unsigned)images && y < ROWS && column < COLUMNS;
        const int at = (image * C + channel) * AREA + y * COLUMNS + column;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const bool in_range = inside && channel + (C % CHUNK_ELEMENTS == 0 ? 0 : j) < C;
            found.g[j] = in_range ? g[at + j * AREA] : 0;
            found.where[j] = in_range ? where[at + j * AREA] : 0;
        }
    }

    // Offset of the number at a pixel of an image; -1 where there is none.
    __device__ __forceinline__ int at(int image, int channel, int y, int x) const {
        if (image >= images || y < 0 || x < 0 || y / 2 >= ROWS || x / 2 >= COLUMNS) return -1;
        const int window = (image * C + channel) * AREA + y / 2 * COLUMNS + x / 2;
        return where[window] == y % 2 * 2 + x % 2 ? window : -1;
    }
};

// Loads Layout::ROWS pairs from `first` on, and the channels of a stage from `channel` on. Each of THREADS threads loads the
// next window before it stores the previous one. Only the last SHARING threads load more than one window.
template <class Layout, class Operand, int THREADS, class Gradients, int SHARING = THREADS> struct PooledGradientLoader {
    static constexpr int ROW_PAIRS = 2 * PAIR_PITCH; // pairs of a row of windows
    const Gradients &gradients;
    const int thread;
    int first, channel, window, group; // of the next load
    typename Gradients::Window next;

    // The first row of windows with these pairs, and the number of windows from there on.
    __device__ __forceinline__ int top() const { return first / ROW_PAIRS; }
    __device__ __forceinline__ int count() const {
        return ((first + Layout::ROWS - 1) / ROW_PAIRS - top() + 1) * PAIR_PITCH;
    }

    __device__ __forceinline__ void advance(int windows) { // neighbouring threads load neighbouring windows
        for (window += windows; window >= count(); window -= count()) group++;
    }
    __device__ __forceinline__ void read() {
        if (group < Layout::GROUPS)
            gradients.read(next, top() + window / PAIR_PITCH, window % PAIR_PITCH, channel + group * CHUNK_ELEMENTS);
    }

    __device__ __forceinline__ void start(int first_, int channel_) {
        first = first_ + IMAGE_PAIRS, channel = channel_; // IMAGE_PAIRS: so that it is not negative
        window = group = 0;
        advance(thread);
        read();
    }

    // Stores all pairs: store(group of channels, pair, chunks, selectors). A selector is a bit for each channel: the position
    // in the pair.
    template <class Store> __device__ __forceinline__ void finish(Store &&store) {
        #pragma unroll 1
        while (group < Layout::GROUPS) {
            const auto current = next;
            const int own_group = group, pair = (top() + window / PAIR_PITCH) * ROW_PAIRS + window % PAIR_PITCH - first;
            if (thread >= THREADS - SHARING)
                advance(SHARING);
            else
                group = Layout::GROUPS;
            read();
            Chunk chunks[Operand::CHUNKS];
            Operand::split(chunks, current.g);
            // upper: mask of channels whose number is in the first row of the window
            constexpr int WORDS = 4 * Operand::TERM_CHUNKS, IN_WORD = CHUNK_ELEMENTS / WORDS; // of eight channels; channels of a word
            uint32_t upper[WORDS] = {}, selectors = 0;
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) {
                if (current.where[j] < 2) upper[j / IN_WORD] |= IN_WORD == 1 ? ~0u : 0xffffu << j % 2 * 16;
                selectors |= (current.where[j] & 1) << j;
            }
            #pragma unroll
            for (int row = 0; row < 2; row++) {
                if ((unsigned)(pair + row * PAIR_PITCH) >= Layout::ROWS) continue;
                Chunk of_row[Operand::CHUNKS];
                #pragma unroll
                for (int i = 0; i < Operand::CHUNKS; i++)
                    #pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const uint32_t mask = upper[(4 * i + j) % WORDS];
                        of_row[i].lane[j] = chunks[i].lane[j] & (row == 0 ? mask : ~mask);
                    }
                store(own_group, pair + row * PAIR_PITCH, of_row, selectors);
            }
        }
    }
};
