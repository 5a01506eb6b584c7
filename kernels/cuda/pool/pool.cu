// Pooling of planes: height x width pixels to rows x columns windows. Max pooling also stores the position of each maximum in its
// window, counted row by row. put scatters to these positions, pick gathers from them.
//
// put and avg_pool2d_put use no atomics: an element of the image gathers from its windows in a fixed order, so each run gives
// the same bits.
//
// Images have elements of type S, which may be bfloat16. Arithmetic has type T.
//
// Images (N, C, H, W) are N x C planes, whose pixels have one element. Images that are channels last (N, H, W, C) are N planes,
// whose pixels have CHANNELS elements; a thread computes LANES of these.
//
// Macros, so that loops over windows are unrolled: window KH x KW, stride SH x SW, padding PH x PW.
#include "common/common.cuh"
#include "pool/window_max.cuh"

#ifndef CHANNELS
#define CHANNELS 1
#define LANES 1
#endif
// Positions in windows: bytes if BYTE_POSITIONS, else integers of 32 bits.
#ifdef BYTE_POSITIONS
typedef uint8_t Position;
#else
typedef int32_t Position;
#endif
constexpr int GROUPS = CHANNELS / LANES;

typedef StoredAs<U>::type S;
typedef Vector<T, LANES> Lanes;

#define POOL_NUMBERS int64_t planes, int64_t height_, int64_t width_, int64_t rows_, int64_t columns_
#define POOL const int height = height_, width = width_, rows = rows_, columns = columns_;

// The plane of element i, where a plane has `area` elements, and its offset there. Avoids a 64-bit division where
// possible.
struct PlaneOffset {
    int64_t plane;
    int at;
    __device__ PlaneOffset(int64_t i, int area) {
        plane = i <= 0xffffffffu ? (unsigned)i / (unsigned)area : i / area;
        at = i - plane * area;
    }
};

// Work `i` of a thread: LANES channels from `first` on, of the outputs or the cell with the number `of`.
struct Channel {
    int first;
    int64_t of;
    __device__ Channel(int64_t i) {
        of = GROUPS == 1 ? i : i <= 0xffffffffu ? (unsigned)i / GROUPS : i / GROUPS;
        first = (i - of * GROUPS) * LANES;
    }
};

// A thread computes AT_ONCE neighbouring outputs of a row, and loads SPAN pixels of each row of their windows.
#ifndef AT_ONCE
#define AT_ONCE 1
#endif
constexpr int SPAN = (AT_ONCE - 1) * SW + KW, RESULTS = AT_ONCE * LANES;
// For large windows, the loop over rows is not unrolled, which compiles faster, and means are added in TotalOf<T>::type.
#if KH * KW <= 64
#define ROWS_AT_ONCE KH
typedef T Total;
#else
#define ROWS_AT_ONCE 1
typedef TotalOf<T>::type Total;
#endif

// Outputs i * RESULTS and following: their plane and channel, and the corner of the first one's window.
struct Corner {
    int64_t plane;
    int channel, y, x;
    __device__ Corner(int64_t i, int rows, int columns) {
        const Channel lanes(i);
        const PlaneOffset offset(lanes.of, rows * (columns / AT_ONCE));
        plane = offset.plane;
        channel = lanes.first;
        y = offset.at / (columns / AT_ONCE) * SH - PH;
        x = offset.at % (columns / AT_ONCE) * AT_ONCE * SW - PW;
    }
};

__device__ __forceinline__ bool inside(int y, int x, int height, int width) {
    return (PH == 0 || (unsigned)y < height) && (PW == 0 || (unsigned)x < width);
}

// Calls take(output, tap, lane, value) for the windows of AT_ONCE outputs, row by row; value is `outside` in the padding.
template <class Take>
__device__ __forceinline__ void windows(const S *x, const Corner &corner, int height, int width, T outside, Take take) {
    const S *const plane = x + corner.plane * height * width * CHANNELS + corner.channel;
    #pragma unroll(ROWS_AT_ONCE)
    for (int row = 0; row < KH; row++) {
        const S *from = plane + ((int64_t)(corner.y + row) * width + corner.x) * CHANNELS;
        Lanes values[SPAN];
        #pragma unroll
        for (int i = 0; i < SPAN; i++) {
            if (inside(corner.y + row, corner.x + i, height, width)) {
                values[i] = load_as<T, LANES>(from + i * CHANNELS);
            } else {
                #pragma unroll
                for (int c = 0; c < LANES; c++) values[i].lane[c] = outside;
            }
        }
        #pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            #pragma unroll
            for (int column = 0; column < KW; column++)
                #pragma unroll
                for (int c = 0; c < LANES; c++) take(k, row * KW + column, c, values[k * SW + column].lane[c]);
    }
}

KERNEL max_pool2d(const S *__restrict__ x, S *__restrict__ y, Position *__restrict__ where, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    // The end first: L2 holds what the previous kernel wrote last.
    for (int64_t i = planes * rows * columns / AT_ONCE * GROUPS - 1 - grid_index(); i >= 0; i -= grid_size()) {
        const Corner corner(i, rows, columns);
        Maximum largest[RESULTS];
        #pragma unroll
        for (int k = 0; k < RESULTS; k++) {
            const int left = corner.x + k / LANES * SW;
            largest[k].at = (PH == 0 ? 0 : max(-corner.y, 0) * KW) + (PW == 0 ? 0 : max(-left, 0));
        }
        windows(x, corner, height, width, -(T)INFINITY,
            [&](int k, int tap, int c, T value) { largest[k * LANES + c].take(tap, value); });
        Vector<T, RESULTS> best;
        Vector<Position, RESULTS> position;
        #pragma unroll
        for (int k = 0; k < RESULTS; k++) {
            best.lane[k] = largest[k].value;
            position.lane[k] = largest[k].at;
        }
        store_as(y, i * RESULTS, best);
        store(where, i * RESULTS, position);
    }
}

KERNEL max_pool2d_pick(const S *__restrict__ x, const Position *__restrict__ where, S *__restrict__ y, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    for (int64_t i = grid_index(); i < planes * rows * columns / AT_ONCE * GROUPS; i += grid_size()) {
        const Corner corner(i, rows, columns);
        const Vector<Position, RESULTS> position = load<Position, RESULTS>(where + i * RESULTS);
        Vector<T, RESULTS> picked;
        #pragma unroll
        for (int k = 0; k < RESULTS; k++) {
            const int row = corner.y + position.lane[k] / KW, left = corner.x + k / LANES * SW;
            const int64_t pixel = corner.plane * height * width + row * width + left + position.lane[k] % KW;
            picked.lane[k] = x[pixel * CHANNELS + corner.channel + k % LANES];
        }
        store_as(y, i * RESULTS, picked);
    }
}

KERNEL avg_pool2d(const S *__restrict__ x, S *__restrict__ y, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    for (int64_t i = grid_index(); i < planes * rows * columns / AT_ONCE * GROUPS; i += grid_size()) {
        const Corner corner(i, rows, columns);
        Total total[RESULTS] = {};
        windows(x, corner, height, width, (T)0, [&](int k, int, int c, T value) { total[k * LANES + c] += value; });
        Vector<T, RESULTS> mean;
        #pragma unroll
        for (int k = 0; k < RESULTS; k++) mean.lane[k] = (T)(total[k] / (Total)(KH * KW));
        store_as(y, i * RESULTS, mean);
    }
}

// put and avg_pool2d_put: a thread computes a cell of the image, CELL_Y x CELL_X pixels that begin at a multiple of the stride.
// So the windows of each pixel, and its position in them, are known at compile time. A cell of pixels of one element is WIDE
// elements wide if that is a multiple of the stride. With a long stride a cell is one pixel.
constexpr bool SMALL = SH * SW <= (CHANNELS == 1 ? 16 : 9);
constexpr int WIDE = CHANNELS == 1 ? 16 / sizeof(T) : 1;
constexpr int CELL_Y = SMALL ? SH : 1, CELL_X = !SMALL ? 1 : WIDE % SW == 0 ? WIDE : SW;

// The last window that begins at or before a position of the padded image; rounds down below 0 too.
__device__ constexpr int last_window(int position, int stride) { return (position + stride * 64) / stride - 64; }

// The cells of a plane.
struct Cells {
    int height, width, rows, columns, across, count; // of a plane
    __device__ __forceinline__ Cells(int height, int width, int rows, int columns)
        : height(height), width(width), rows(rows), columns(columns), across((width + CELL_X - 1) / CELL_X),
          count((height + CELL_Y - 1) / CELL_Y * across) {}

    // Stores in each pixel of a cell the sum of share(window)(tap, lane) over its windows, in LANES channels. A window is the
    // number of its first element.
    template <class Share>
    __device__ __forceinline__ void fill(S *__restrict__ x, int64_t plane, int cell, int channel, Share share) const {
        const bool aligned = width % CELL_X == 0;
        const int top = cell / across * CELL_Y, left = cell % across * CELL_X;
        // Windows and taps of the cell at (0, 0), moved by whole strides. If a cell is one pixel, its phase in the stride is
        // not known at compile time.
        const int phase_y = SMALL ? 0 : top % SH, phase_x = SMALL ? 0 : left % SW;
        const int64_t first = (plane * rows + top / SH) * columns + left / SW;
        constexpr int FIRST_Y = last_window(PH - KH, SH) + 1, LAST_Y = last_window(PH + (SMALL ? CELL_Y : SH) - 1, SH);
        constexpr int FIRST_X = last_window(PW - KW, SW) + 1, LAST_X = last_window(PW + (SMALL ? CELL_X : SW) - 1, SW);
        T totals[CELL_Y][CELL_X][LANES] = {};
        #pragma unroll
        for (int v = FIRST_Y; v <= LAST_Y; v++) {
            #pragma unroll
            for (int u = FIRST_X; u <= LAST_X; u++) {
                if ((unsigned)(top / SH + v) >= rows || (unsigned)(left / SW + u) >= columns) continue;
                const auto from = share((first + v * columns + u) * CHANNELS + channel);
                #pragma unroll
                for (int a = 0; a < CELL_Y; a++) {
                    #pragma unroll
                    for (int b = 0; b < CELL_X; b++) {
                        const int tap_y = phase_y + a + PH - v * SH, tap_x = phase_x + b + PW - u * SW;
                        if ((unsigned)tap_y < KH && (unsigned)tap_x < KW)
                            #pragma unroll
                            for (int c = 0; c < LANES; c++) totals[a][b][c] += from(tap_y * KW + tap_x, c);
                    }
                }
            }
        }
        S *to = x + ((plane * height + top) * width + left) * CHANNELS + channel;
        #pragma unroll
        for (int a = 0; a < CELL_Y; a++) {
            if (top + a >= height) continue;
            if constexpr (CHANNELS == 1 && CELL_X == WIDE)
                if (aligned) {
                    store_as(to, (int64_t)a * width, *reinterpret_cast<Vector<T, WIDE> *>(totals[a]));
                    continue;
                }
            #pragma unroll
            for (int b = 0; b < CELL_X; b++)
                if (left + b < width)
                    store_as(to, ((int64_t)a * width + b) * CHANNELS, *reinterpret_cast<Lanes *>(totals[a][b]));
        }
    }
};

// Fills all cells of all planes.
template <class Share>
__device__ __forceinline__ void gather(
    S *__restrict__ x, int64_t planes, int height, int width, int rows, int columns, Share share) {
    const Cells cells(height, width, rows, columns);
    for (int64_t i = grid_index(); i < planes * cells.count * GROUPS; i += grid_size()) {
        const Channel lanes(i);
        const PlaneOffset offset(lanes.of, cells.count);
        cells.fill(x, offset.plane, offset.at, lanes.first, share);
    }
}

KERNEL max_pool2d_put(const S *__restrict__ ct, const Position *__restrict__ where, S *x, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    gather(x, planes, height, width, rows, columns,
        [&](int64_t window) {
            const Lanes value = load_as<T, LANES>(ct + window);
            const Vector<Position, LANES> chosen = load<Position, LANES>(where + window);
            return [=](int position, int c) { return chosen.lane[c] == position ? value.lane[c] : (T)0; };
        });
}

KERNEL avg_pool2d_put(const S *__restrict__ ct, S *x, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    gather(x, planes, height, width, rows, columns,
        [&](int64_t window) {
            Lanes share = load_as<T, LANES>(ct + window);
            #pragma unroll
            for (int c = 0; c < LANES; c++) share.lane[c] /= (T)(KH * KW);
            return [=](int, int c) { return share.lane[c]; };
        });
}
