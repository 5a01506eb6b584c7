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
    static constexpr int CHANNELS = C, ROWS = H / 2, COLUMNS = W / 2, AREA = ROWS * COLUMNS;
    const T *g;
    const int32_t *where;
    int images;

    // CHUNK_ELEMENTS neighbouring channels of COUNT neighbouring windows, one or two.
    template <int COUNT> struct Windows {
        Vector<T, COUNT> g[CHUNK_ELEMENTS];
        Vector<int32_t, COUNT> where[CHUNK_ELEMENTS];
    };

    // row: of windows in the flat index, from one image before the first one on. column: a multiple of COUNT.
    template <int COUNT> __device__ __forceinline__ void read(Windows<COUNT> &found, int row, int column, int channel) const {
        constexpr int ROWS_OF_IMAGE = IMAGE_PAIRS / PAIR_PITCH / 2, WIDE = COLUMNS % COUNT == 0 ? COUNT : 1;
        const int image = row / ROWS_OF_IMAGE - 1, y = row % ROWS_OF_IMAGE;
        const int at = (image * C + channel) * AREA + y * COLUMNS + column;
        #pragma unroll
        for (int first = 0; first < COUNT; first += WIDE) {
            const bool inside = (unsigned)image < (unsigned)images && y < ROWS && column + first < COLUMNS;
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) {
                const bool in_range = inside && channel + (C % CHUNK_ELEMENTS == 0 ? 0 : j) < C;
                const auto numbers = in_range ? load<T, WIDE>(g + at + first + j * AREA) : Vector<T, WIDE>{};
                const auto places = in_range ? load<int32_t, WIDE>(where + at + first + j * AREA) : Vector<int32_t, WIDE>{};
                #pragma unroll
                for (int i = 0; i < WIDE; i++) {
                    found.g[j].lane[first + i] = numbers.lane[i];
                    found.where[j].lane[first + i] = places.lane[i];
                }
            }
        }
    }

    // Offset of the number at a pixel of an image; -1 where there is none.
    __device__ __forceinline__ int at(int image, int channel, int y, int x) const {
        if (image >= images || y < 0 || x < 0 || y / 2 >= ROWS || x / 2 >= COLUMNS) return -1;
        const int window = (image * C + channel) * AREA + y / 2 * COLUMNS + x / 2;
        return where[window] == y % 2 * 2 + x % 2 ? window : -1;
    }
};

// Loads Layout::ROWS pairs from `first` on, and the channels of a stage from `channel` on. An item is CHUNK_ELEMENTS channels of
// WINDOWS neighbouring windows. Each of THREADS threads has one item in registers; AHEAD: it loads the next one before it stores
// that one, which takes registers for both.
template <class Layout, class Operand, int THREADS, int WINDOWS, bool AHEAD, class Gradients> struct PooledGradientLoader {
    static constexpr int ROW_PAIRS = 2 * PAIR_PITCH; // pairs of a row of windows
    static constexpr int ROW_ITEMS = (PAIR_PITCH + WINDOWS - 1) / WINDOWS; // items of a row of windows and a group of channels
    const Gradients &gradients;
    const int thread;
    int first, channel, item, group; // of the item
    typename Gradients::template Windows<WINDOWS> windows;

    // The first row of windows with these pairs, and the number of items of a group from there on.
    __device__ __forceinline__ int top() const { return first / ROW_PAIRS; }
    __device__ __forceinline__ int count() const {
        return ((first + Layout::ROWS - 1) / ROW_PAIRS - top() + 1) * ROW_ITEMS;
    }

    __device__ __forceinline__ void advance(int items) { // neighbouring threads load neighbouring windows
        for (item += items; item >= count(); item -= count()) group++;
    }
    __device__ __forceinline__ void read() {
        const int own = group < Layout::GROUPS ? channel + group * CHUNK_ELEMENTS : Gradients::CHANNELS; // beyond the last: zeros
        gradients.read(windows, top() + item / ROW_ITEMS, item % ROW_ITEMS * WINDOWS, own);
    }

    __device__ __forceinline__ void start(int first_, int channel_) {
        first = first_ + IMAGE_PAIRS, channel = channel_; // IMAGE_PAIRS: so that it is not negative
        item = group = 0;
        advance(thread);
        read();
    }

    // Stores all pairs: store(group of channels, pair, chunks, selectors). A selector is a bit for each channel: the position
    // in the pair.
    template <class Store> __device__ __forceinline__ void finish(Store &&store) {
        if constexpr (AHEAD) {
            #pragma unroll 1
            while (group < Layout::GROUPS) {
                PooledGradientLoader current = *this;
                advance(THREADS);
                read();
                current.store_item(store);
            }
        } else {
            #pragma unroll 1
            for (; group < Layout::GROUPS; advance(THREADS), read()) store_item(store);
        }
    }

  private:
    // Moves the other window of two into the place of the first.
    template <class Store> __device__ __forceinline__ void store_item(Store &&store) {
        const int column = item % ROW_ITEMS * WINDOWS, pair = (top() + item / ROW_ITEMS) * ROW_PAIRS + column - first;
        #pragma unroll 1
        for (int i = 0; i < WINDOWS && column + i < PAIR_PITCH; i++) {
            store_window(store, pair + i);
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) {
                windows.g[j].lane[0] = windows.g[j].lane[WINDOWS - 1];
                windows.where[j].lane[0] = windows.where[j].lane[WINDOWS - 1];
            }
        }
    }
    // The first of the windows, whose upper row is `pair`.
    template <class Store> __device__ __forceinline__ void store_window(Store &&store, int pair) const {
        float g[CHUNK_ELEMENTS];
        // upper: mask of channels whose number is in the first row of the window
        constexpr int WORDS = 4 * Operand::TERM_CHUNKS, IN_WORD = CHUNK_ELEMENTS / WORDS; // of eight channels; channels of a word
        uint32_t upper[WORDS] = {}, selectors = 0;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const int where = windows.where[j].lane[0];
            g[j] = windows.g[j].lane[0];
            if (where < 2) upper[j / IN_WORD] |= IN_WORD == 1 ? ~0u : 0xffffu << j % 2 * 16;
            selectors |= (where & 1) << j;
        }
        Chunk chunks[Operand::CHUNKS];
        Operand::split(chunks, g);
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            if ((unsigned)(pair + row * PAIR_PITCH) >= Layout::ROWS) continue;
            Chunk of_row[Operand::CHUNKS];
            #pragma unroll
            for (int c = 0; c < Operand::CHUNKS; c++)
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t mask = upper[(4 * c + j) % WORDS];
                    of_row[c].lane[j] = chunks[c].lane[j] & (row == 0 ? mask : ~mask);
                }
            store(group, pair + row * PAIR_PITCH, of_row, selectors);
        }
    }
};
